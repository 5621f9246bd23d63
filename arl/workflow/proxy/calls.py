"""What lies between the protocols and the model: a call, as any of them may put it, its answers, and its refusal.

request --protocol--> ChatCall --EpisodeSession.acomplete--> Answers --protocol--> response or stream
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from arl.api.errors import ArlError
from arl.api.types import ModelResponse, SamplingParams
from arl.workflow.chat_template import Message, ToolSpecs
from arl.workflow.dialogue import Turn

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """What a program asks of the model.

    messages: all that was said, as chat templates take it. tools: what may be called, in OpenAI's form. n: how many
    answers, sampled at once. one_tool_call: an answer that calls several tools is cut to the first of them.
    """

    messages: Sequence[Message]
    sampling: SamplingParams
    tools: ToolSpecs = ()
    n: int = 1
    one_tool_call: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCall:
    """The same from a program that makes prompts itself: the model is shown these tokens."""

    input_ids: Sequence[int]
    sampling: SamplingParams
    n: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledTool:
    """A tool that an answer calls. arguments: a JSON object, as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """What the model sampled, taken apart. reasoning: what stood in <think>; None where nothing did."""

    content: str
    reasoning: str | None
    tool_calls: tuple[CalledTool, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """One answer to a call, recorded as `turn`. num_prompt_tokens: how many tokens the model was shown."""

    turn: Turn
    spoken: Spoken
    num_prompt_tokens: int

    @property
    def response(self) -> ModelResponse:
        assert self.turn.response is not None, "a program's turns are sampled"
        return self.turn.response


class RefusedCallError(ArlError):
    """A call that is answered with an HTTP error. param: the field at fault; code: as OpenAI names the error."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code


class EpisodeOverError(RefusedCallError):
    """The episode ended before the call was answered."""

    def __init__(self) -> None:
        super().__init__("the episode that this key was made for is over", status=401, code="invalid_api_key")

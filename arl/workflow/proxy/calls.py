"""The records between the protocols and the model: a call, its answers, and its refusal.

request --protocol--> ChatCall --EpisodeSession.acomplete--> Answers --protocol--> response or stream
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from arl.api.errors import ArlError
from arl.api.types import ModelResponse, SamplingParams
from arl.web.bodies import BodyError, RequestError, shown
from arl.workflow.chat_template import Message, ToolSpecs
from arl.workflow.dialogue import Turn

FinishReason = Literal["stop", "length", "tool_calls"]
MAX_SEED = (1 << 31) - 1
"""The largest seed that every server takes."""

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A program's call of the model with messages."""

    messages: Sequence[Message]
    """The whole history, as chat templates take it."""
    sampling: SamplingParams
    tools: ToolSpecs = ()
    """The tools that the model may call, in OpenAI's form."""
    n: int = 1
    """How many answers to sample at once."""
    one_tool_call: bool = False
    """Cut an answer that calls several tools to the first call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCall:
    """A call from a program that makes its prompts itself: the model gets exactly these tokens."""

    input_ids: Sequence[int]
    sampling: SamplingParams
    n: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledTool:
    """A tool that an answer calls."""

    id: str
    name: str
    arguments: str
    """A JSON object, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """The parts of a sampled text."""

    content: str
    reasoning: str | None
    """The text within <think>; None if there is none."""
    tool_calls: tuple[CalledTool, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallAnswer:
    """One answer to a call, recorded as a turn."""

    turn: Turn
    spoken: Spoken
    num_prompt_tokens: int
    """How many tokens the prompt had."""

    @property
    def response(self) -> ModelResponse:
        assert self.turn.response is not None, "a program's turns are sampled"
        return self.turn.response


class RefusedCallError(RequestError, ArlError):
    """The call is answered with an HTTP error. param: the field at fault; code: OpenAI's name for the error."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, status)
        self.param = param
        self.code = code


def wrong(where: str, value: Any, described: str) -> BodyError:
    return BodyError(f"{where} is {shown(value)}; it must be {described}", param=where)


def refused(where: str, reason: str) -> BodyError:
    """The error for a known field or value that the endpoint cannot honour."""
    return BodyError(f"{where} {reason}", param=where, code="unsupported_value")


class EpisodeOverError(RefusedCallError):
    """The episode ended before the call was answered."""

    def __init__(self) -> None:
        super().__init__("the episode that this key was made for is over", status=401, code="invalid_api_key")

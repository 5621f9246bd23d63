"""The settings of an endpoint: how it samples, renders prompts and reads answers, for all of its calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from arl.api.errors import PromptTooLongError
from arl.api.types import ModelResponse, SamplingParams, StopReason
from arl.web.bodies import BodyError
from arl.workflow.call_formats import CallFormat, ToolCall, call_format_of
from arl.workflow.chat_template import ChatTemplate
from arl.workflow.dialogue import Dialogue, Prompt, Rewriting
from arl.workflow.proxy.calls import CalledTool, ChatCall, Spoken

THINK, END_OF_THINK = "<think>", "</think>"

Reasoning = Literal["apart", "inline"]
"""The place of the model's thinking in an answer: `reasoning_content`, or `content` with the tags."""


def before_stop(text: str, stop: Sequence[str]) -> str:
    """The text up to the first stop string in it."""
    found = [at for string in stop if (at := text.find(string)) >= 0]
    return text[: min(found)] if found else text


def split_reasoning(text: str, *, is_thinking: bool) -> tuple[str | None, str]:
    """The thinking and the rest of a text. is_thinking: the prompt has opened <think> already."""
    head, tag, rest = text.partition(THINK)
    if tag and not head.strip():
        text, is_thinking = rest, True
    if not is_thinking:
        return None, text
    thought, _, said = text.partition(END_OF_THINK)
    return thought.strip("\n"), said.lstrip("\n")


def message_of(spoken: Spoken) -> dict[str, Any]:
    """The answer as a message for the model's next prompt."""
    message: dict[str, Any] = {"role": "assistant", "content": spoken.content}
    if spoken.reasoning is not None:
        message["reasoning_content"] = spoken.reasoning
    if spoken.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in spoken.tool_calls
        ]
    return message


def finish_reason_of(stop_reason: StopReason) -> Literal["stop", "length"]:
    """An aborted answer is as incomplete as one that ran out of tokens."""
    return "stop" if stop_reason == "stop" else "length"


_TAIL = 8
"""This many of a prompt's last tokens hold a <think> at its end."""
_CLIENTS_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallPolicy:
    """The settings of one endpoint."""

    template: ChatTemplate
    """Renders messages."""
    sampling: SamplingParams
    """The parameters that a call does not name."""
    overrides: bool
    """Take temperature, top_p, top_k, min_p and seed from `sampling` whatever calls ask for."""
    rewriting: Rewriting
    reasoning: Reasoning
    context_length: int | None
    """Tokens that the model can hold; None: unknown."""
    call_format: CallFormat | None = None
    """How the model writes tool calls; None: as its chat template says."""

    def new_dialogue(self) -> Dialogue:
        return Dialogue(self.template, rewriting=self.rewriting)

    def sampling_of(self, **asked: Any) -> SamplingParams:
        """`sampling` with the fields of SamplingParams that a call names. None: the call does not name the field.

        Raises BodyError for values out of range.
        """
        given = {name: value for name, value in asked.items() if value is not None}
        try:
            sampling = replace(self.sampling, **given)
        except ValueError as error:
            param = str(error).partition(" ")[0]
            raise BodyError(str(error), param=param) from error
        if not self.overrides:
            return sampling
        return replace(sampling, **{name: getattr(self.sampling, name) for name in _CLIENTS_FIELDS})

    def within_context(self, sampling: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Ask for no more tokens than fit. Raises PromptTooLongError if none fits."""
        if self.context_length is None:
            return sampling
        room = self.context_length - num_prompt_tokens
        if room < 1:
            raise PromptTooLongError(
                f"the messages are {num_prompt_tokens} tokens, and the model's context is {self.context_length}"
            )
        return replace(sampling, max_new_tokens=min(room, sampling.max_new_tokens))

    def opens_thinking(self, prompt: Prompt) -> bool:
        """Whether the prompt ends with <think>, so that the answer begins with thinking."""
        if self.reasoning == "inline" or THINK not in str(self.template.tokenizer.chat_template):
            return False
        return str(self.template.tokenizer.decode(list(prompt.given_ids[-_TAIL:]))).rstrip().endswith(THINK)

    def spoken(self, text: str, response: ModelResponse, call: ChatCall, *, is_thinking: bool) -> Spoken:
        """The parts of a sampled text, as the program receives them."""
        said, reasoning = before_stop(text, call.sampling.stop), None
        if self.reasoning == "apart":
            reasoning, said = split_reasoning(said, is_thinking=is_thinking)
        said, calls = self._calls(said, call) if call.tools else (said, ())
        return Spoken(
            content=said,
            reasoning=reasoning,
            tool_calls=calls,
            finish_reason="tool_calls" if calls else finish_reason_of(response.stop_reason),
        )

    def check_tools(self, call: ChatCall) -> None:
        """Raises ModelError if the model's call format is unknown."""
        if call.tools and self.call_format is None:
            call_format_of(self.template.tokenizer)

    def _calls(self, said: str, call: ChatCall) -> tuple[str, tuple[CalledTool, ...]]:
        """The text outside tool calls, and the calls. An answer with an unreadable call stays text."""
        parsed = (self.call_format or call_format_of(self.template.tokenizer)).parse(said)
        read = [one for one in parsed.calls if isinstance(one, ToolCall)]
        if len(read) < len(parsed.calls) or not read:
            return said, ()
        called = [
            CalledTool(id=one.id, name=one.name, arguments=json.dumps(one.arguments, ensure_ascii=False))
            for one in read
        ]
        return parsed.content, tuple(called[:1] if call.one_tool_call else called)

"""How an endpoint samples, shows and reads: what is the same for all of its calls."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from arl.api.errors import PromptTooLongError
from arl.api.types import ModelResponse, SamplingParams
from arl.workflow.call_formats import CallFormat, ToolCall, call_format_of
from arl.workflow.chat_template import ChatTemplate
from arl.workflow.dialogue import Dialogue, Prompt, Rewriting
from arl.workflow.proxy.calls import CalledTool, ChatCall, RefusedCallError, Spoken
from arl.workflow.proxy.spoken import THINK, Reasoning, before_stop, finish_reason_of, split_reasoning

_TAIL = 8
"""How many of a prompt's last tokens hold a <think> that it ends with."""
_CLIENTS_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed")
MAX_SEED = (1 << 31) - 1
"""Every server takes such a seed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallPolicy:
    """template: how messages are shown. sampling: for what calls do not say. overrides: temperature, top_p, top_k,
    min_p and seed are those of `sampling` whatever calls say. context_length: tokens that the model can hold;
    None: unknown. call_format: how the model writes calls of tools; None: as its chat template asks it to."""

    template: ChatTemplate
    sampling: SamplingParams
    overrides: bool
    rewriting: Rewriting
    reasoning: Reasoning
    context_length: int | None
    call_format: CallFormat | None = None

    def new_dialogue(self) -> Dialogue:
        return Dialogue(self.template, rewriting=self.rewriting)

    def sampling_of(self, **asked: Any) -> SamplingParams:
        """`sampling`, with what a call asked for in SamplingParams' own fields; None: it did not say.

        Raises RefusedCallError for values out of range.
        """
        given = {name: value for name, value in asked.items() if value is not None}
        try:
            sampling = replace(self.sampling, **given)
        except ValueError as error:
            param = str(error).partition(" ")[0]
            raise RefusedCallError(str(error), param=param, code="invalid_value") from error
        if not self.overrides:
            return sampling
        return replace(sampling, **{name: getattr(self.sampling, name) for name in _CLIENTS_FIELDS})

    def within_context(self, sampling: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Ask for no more tokens than there is room for. Raises PromptTooLongError where there is none."""
        if self.context_length is None:
            return sampling
        room = self.context_length - num_prompt_tokens
        if room < 1:
            raise PromptTooLongError(
                f"the messages are {num_prompt_tokens} tokens, and the model's context is {self.context_length}"
            )
        return replace(sampling, max_new_tokens=min(room, sampling.max_new_tokens))

    def opens_thinking(self, prompt: Prompt) -> bool:
        """Whether the prompt ends with <think>, so that the answer begins with thoughts."""
        if self.reasoning == "inline" or THINK not in str(self.template.tokenizer.chat_template):
            return False
        return str(self.template.tokenizer.decode(list(prompt.given_ids[-_TAIL:]))).rstrip().endswith(THINK)

    def spoken(self, text: str, response: ModelResponse, call: ChatCall, *, is_thinking: bool) -> Spoken:
        """What the model sampled, as the program is told."""
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
        """Raises ModelError where it is not known how the model would call the tools."""
        if call.tools and self.call_format is None:
            call_format_of(self.template.tokenizer)

    def _calls(self, said: str, call: ChatCall) -> tuple[str, tuple[CalledTool, ...]]:
        """What stands beside the calls, and these. An answer with a call that cannot be read is told as it is."""
        parsed = (self.call_format or call_format_of(self.template.tokenizer)).parse(said)
        read = [one for one in parsed.calls if isinstance(one, ToolCall)]
        if len(read) < len(parsed.calls) or not read:
            return said, ()
        called = [
            CalledTool(id=one.id, name=one.name, arguments=json.dumps(one.arguments, ensure_ascii=False))
            for one in read
        ]
        return parsed.content, tuple(called[:1] if call.one_tool_call else called)

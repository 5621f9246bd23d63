"""How an endpoint samples, shows and reads: what is the same for all of its calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from arl.api.errors import PromptTooLongError
from arl.api.types import ModelResponse, SamplingParams
from arl.workflow.chat_template import ChatTemplate
from arl.workflow.dialogue import Dialogue, Prompt, Rewriting
from arl.workflow.proxy.calls import CalledTool, ChatCall, RefusedCallError, Spoken
from arl.workflow.proxy.spoken import THINK, Reasoning, before_stop, finish_reason_of, split_reasoning

_TAIL = 8
"""How many of a prompt's last tokens hold a <think> that it ends with."""
_CLIENTS_FIELDS = ("temperature", "top_p", "top_k", "min_p")
_MAX_SEED = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallPolicy:
    """template: how messages are shown. sampling: for what calls do not say. overrides: temperature, top_p, top_k and
    min_p are those of `sampling` whatever calls say. context_length: tokens that the model can hold; None: unknown."""

    template: ChatTemplate
    sampling: SamplingParams
    overrides: bool
    rewriting: Rewriting
    reasoning: Reasoning
    context_length: int | None

    def new_dialogue(self) -> Dialogue:
        return Dialogue(self.template, rewriting=self.rewriting)

    def sampling_of(self, **asked: Any) -> SamplingParams:
        """`sampling`, with what a call asked for in SamplingParams' own fields; None: it did not say.

        Raises RefusedCallError for values out of range.
        """
        given = {name: value for name, value in asked.items() if value is not None}
        if "seed" in given and not 0 <= given["seed"] <= _MAX_SEED:
            raise RefusedCallError(f"seed is {given['seed']}; it must be from 0 to {_MAX_SEED}", param="seed")
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
        if self.reasoning == "inline":
            return False
        return str(self.template.tokenizer.decode(list(prompt.given_ids[-_TAIL:]))).rstrip().endswith(THINK)

    def spoken(self, text: str, response: ModelResponse, call: ChatCall, *, is_thinking: bool) -> Spoken:
        """What the model sampled, as the program is told."""
        said, reasoning = before_stop(text, call.sampling.stop), None
        if self.reasoning == "apart":
            reasoning, said = split_reasoning(said, is_thinking=is_thinking)
        calls: tuple[CalledTool, ...] = ()
        return Spoken(
            content=said,
            reasoning=reasoning,
            tool_calls=calls,
            finish_reason="tool_calls" if calls else finish_reason_of(response.stop_reason),
        )

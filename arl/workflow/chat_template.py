"""A tokenizer's chat template: messages to text, text to tokens, and what closes an assistant's turn."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from arl.api.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""A chat message as templates take it: `role`, `content`, and what else a role has (`tool_calls`, for instance)."""

ToolSpecs = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

_MARKER = "arl-marks-the-sampled-turn"


class ChatTemplate:
    """Renders and encodes as one tokenizer does. options: passed to its template (`enable_thinking=False`, say).

    Raises ModelError where the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template; use a chat "
                "(instruct) model, or put the template into chat_template.jinja in the model's directory"
            )
        self.tokenizer = tokenizer
        self._options = dict(options or {})
        self._special_ids = frozenset(tokenizer.all_special_ids)

    def render(
        self, messages: Iterable[Message], tools: ToolSpecs = (), *, add_generation_prompt: bool = True
    ) -> str:
        """Raises ModelError, with the template's own words, where it does not take such messages."""
        try:
            text = self.tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,  # pyright: ignore[reportArgumentType]
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._options,
            )
        except (TemplateError, TypeError) as error:
            raise ModelError(f"the model's chat template does not take these messages: {error}") from error
        return str(text)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def text_of(self, output_ids: Sequence[int]) -> str:
        """What was sampled, as text, without the token that ended it."""
        ids = output_ids[:-1] if self.ends_turn(output_ids) else output_ids
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def ends_turn(self, output_ids: Sequence[int]) -> bool:
        """Whether the model itself ended its turn, by whichever special token."""
        return bool(output_ids) and output_ids[-1] in self._special_ids

    @cached_property
    def end_of_turn(self) -> str:
        """What the template writes after an assistant's last words.

        Raises ModelError for a template that does not show them.
        """
        return self.after_turn([{"role": "user", "content": ""}], [], add_generation_prompt=False)

    def after_turn(
        self,
        before: Sequence[Message],
        messages: Iterable[Message],
        tools: ToolSpecs = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """What the template writes after the words of an assistant who spoke after `before`, when `messages` follow."""
        said = {"role": "assistant", "content": _MARKER}
        text = self.render([*before, said, *messages], tools, add_generation_prompt=add_generation_prompt)
        shown, marker, after = text.rpartition(_MARKER)
        if not marker or _MARKER in shown:
            raise ModelError("the chat template does not show an assistant's message as it is; it cannot be used")
        return after


def _for_template(message: Message) -> dict[str, Any]:
    """Templates take a call's arguments as an object; OpenAI's protocol has them as JSON in a string."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}

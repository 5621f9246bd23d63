"""Between text and token ids: prompts, chat templates, and the text of an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arl.engine.local.job import Job

_INCOMPLETE = "\ufffd"
"""What a tokenizer decodes the first bytes of an unfinished character to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How output tokens become text. trim_stop: leave out the stop string or stop token that ended it."""

    skip_special_tokens: bool = True
    trim_stop: bool = True


class TextError(ValueError):
    """There is no tokenizer or no chat template, or the template cannot render these messages."""


class Text:
    """A model's tokenizer, as the endpoints need it; None where the model has none and serves token ids alone."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._known = tokenizer
        self._pieces: dict[int, str] = {}

    @property
    def has_tokenizer(self) -> bool:
        return self._known is not None

    def check(self) -> None:
        """Raise TextError if there is no tokenizer."""
        if self._known is None:
            raise TextError("this model was saved without a tokenizer; send input_ids to /generate instead")

    @property
    def _tokenizer(self) -> Any:
        self.check()
        return self._known

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises TextError."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def chat_prompt(self, messages: list[Any], tools: list[Any] | None, options: Mapping[str, Any]) -> list[int]:
        """The token ids of a conversation, by the tokenizer's own chat template. Raises TextError."""
        if not self._tokenizer.chat_template:
            raise TextError("this model's tokenizer has no chat template; send input_ids to /generate instead")
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=False, **options
            )
        except Exception as error:  # a template is a program of its own and raises what it likes
            raise TextError(f"the chat template refused these messages: {error}") from error

    def token_text(self, token_id: int) -> str:
        """The text of one token alone."""
        if token_id not in self._pieces:
            self._pieces[token_id] = self._tokenizer.decode([token_id])
        return self._pieces[token_id]

    def decode(self, job: Job, num_tokens: int, options: TextOptions) -> str:
        """The text of a job's first `num_tokens` output tokens.

        While the job runs, the end that a later token may still change is held back: an unfinished character, and
        what may be the beginning of a stop string.
        """
        reason = job.finish_reason or {}
        matched = reason.get("matched") if options.trim_stop else None
        ids = job.output_ids[:num_tokens]
        if isinstance(matched, int):
            ids = ids[:-1]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=options.skip_special_tokens)
        if isinstance(matched, str):
            return text.partition(matched)[0]
        return text if job.is_done else _settled(text, job.sampling.stop)


def _settled(text: str, stops: Sequence[str]) -> str:
    text = text.rstrip(_INCOMPLETE)
    held = max((k for stop in stops for k in range(1, len(stop)) if text.endswith(stop[:k])), default=0)
    return text[: len(text) - held]

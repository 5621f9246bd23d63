"""ChoiceMatch: whether an answer names the right one of several choices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from arl.api.errors import RewardError
from arl.api.types import Example
from arl.rewards.answers import Extract, bare, stated, unmarked
from arl.rewards.score import reported, shown

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceMatch:
    r"""1.0 if the answer names the right choice, and no other: `B`, `(b)`, `B) Paris`, `Paris`, `\boxed{B}`.

    The answer is the content of the last box, else the text after the last `####` or "the answer is", else the whole
    text. Prose about several choices names none.
    """

    column: str = "answer"
    """The example's column with the right choice: its label, its index (an int, from 0), or its text."""
    choices: str = "choices"
    """The column with the choices: their texts (A, B, C, ...), or `{"label": [...], "text": [...]}`. If the example has
    no such column, the labels are letters, and only they are compared."""
    extract: Extract | None = None
    """Finds the answer in the text. If it is unset, the whole text is searched."""

    def check_example(self, data: Example) -> None:
        self._right(data)

    @reported
    async def __call__(self, answer: str, data: Example) -> float:
        right, texts = self._right(data)
        text = self.extract(answer) if self.extract else answer
        if text is None:
            return 0.0
        said = stated(text)
        return float(_named(text if said is None else said, texts) == right)

    def _right(self, data: Example) -> tuple[str, Mapping[str, str]]:
        """The right label, and all labels with their texts. Raises RewardError if the example lacks one of them."""
        texts = self._texts(data)
        given = data.get(self.column)
        if isinstance(given, int) and not isinstance(given, bool):
            label = list(texts)[given] if 0 <= given < len(texts) else None
        else:
            label = _named(given, texts) if isinstance(given, str) else None
        if label is None:
            raise RewardError(
                f"the column {self.column!r} of the example has {shown(given)}, which is none of the choices "
                f"{shown(dict(texts))}; it must be a label, an index from 0 or a text (the example has the columns "
                f"{', '.join(map(repr, data))}: name others by column= and choices=)"
            )
        return label, texts

    def _texts(self, data: Example) -> Mapping[str, str]:
        given = data.get(self.choices)
        if given is None:
            return dict.fromkeys(_LETTERS, "")
        if isinstance(given, Mapping):
            table = cast("Mapping[str, Sequence[Any]]", given)
            labels, texts = [str(label) for label in table.get("label", ())], list(table.get("text", ()))
        else:
            texts = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
            labels = list(_LETTERS[: len(texts)])
        if not texts or len(labels) != len(texts) or len(set(labels)) < len(labels):
            raise RewardError(
                f"the column {self.choices!r} of the example has {shown(given)}; it must be a list of 1 to 26 texts, "
                'or {"label": [...], "text": [...]} of equal lengths'
            )
        return {label: str(text) for label, text in zip(labels, texts, strict=True)}


_WITH_REST = re.compile(r"(?:(?:option|choice)\s+)?[(\[]?(\w+)[)\]]?[).:,]*\s+(.+)", re.IGNORECASE | re.DOTALL)
_REASON = re.compile(r"(?:because|since)\b", re.IGNORECASE)


def _named(said: str, texts: Mapping[str, str]) -> str | None:
    """The label of the choice that a short text names: by its label, by its text, or by both and perhaps a reason."""
    said = unmarked(said)
    if (label := _label(bare(said), texts)) is not None:
        return label
    with_rest = _WITH_REST.fullmatch(said)
    label = _label(with_rest[1], texts) if with_rest else None
    if with_rest and label and (_REASON.match(with_rest[2]) or _is_text(with_rest[2], texts[label])):
        return label
    named = [label for label, text in texts.items() if _is_text(said, text)]
    return named[0] if len(named) == 1 else None


def _label(said: str, texts: Mapping[str, str]) -> str | None:
    return next((label for label in (said, said.upper()) if label in texts), None)


def _is_text(said: str, text: str) -> bool:
    return bool(text) and bare(said).casefold() == bare(text).casefold()

"""The text of tokens, by the run's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTEXT = 8
"""Tokens before a window that are decoded with it: its first character may begin there."""
_LONGEST = 8
"""A character has 4 bytes at most; bytes that are none after this many tokens are shown as they are."""
_BROKEN = "\ufffd"


class Texts:
    """Decodes tokens. Without a tokenizer, a token's text is its id."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    @property
    def is_known(self) -> bool:
        return self._tokenizer is not None

    def whole(self, token_ids: Sequence[int]) -> str:
        return self.many([token_ids])[0]

    def many(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row. Ids outside the vocabulary have none."""
        if self._tokenizer is None:
            return [" ".join(map(str, row)) for row in rows]
        return self._tokenizer.decode_batch([_valid(row) for row in rows], skip_special_tokens=False)

    def pieces(self, token_ids: Sequence[int], start: int = 0, stop: int | None = None) -> list[str]:
        """One string for each of the tokens start <= index < stop; joined, they are the text.

        A character that several tokens make belongs to the last of them.
        """
        stop = len(token_ids) if stop is None else min(stop, len(token_ids))
        if self._tokenizer is None:
            return [f"{token} " for token in token_ids[start:stop]]
        begin = max(0, start - _CONTEXT)
        return self._pieces(token_ids[begin : stop + _LONGEST])[start - begin : stop - begin]

    def _pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Decode each token behind a few others: some tokenizers write a token differently at the beginning."""
        pieces: list[str] = []
        first = told = 0
        known = ""
        for end in range(1, len(token_ids) + 1):
            text = self.whole(token_ids[first:end])
            if text.endswith(_BROKEN) and end - told < _LONGEST and end < len(token_ids):
                pieces.append("")
                continue
            pieces.append(text[len(known) :])
            first, told = told, end
            known = self.whole(token_ids[first:end])
        return pieces


def find_texts(run_dir: Path, settings: dict[str, Any]) -> Texts:
    """With the tokenizer that the run left in its log, or its model's."""
    model = settings.get("model")
    for place in (run_dir / "events", *([Path(model)] if isinstance(model, str) else []), run_dir / "model"):
        if (tokenizer := _tokenizer(place / "tokenizer.json")) is not None:
            return Texts(tokenizer)
    return Texts(None)


def _tokenizer(file: Path) -> Tokenizer | None:
    try:
        if not file.is_file():
            return None
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001 - tokenizers raises nothing narrower for a file that is none
        return None


def _valid(row: Sequence[int]) -> list[int]:
    """tokenizers takes unsigned 32-bit integers only."""
    return [token for token in row if 0 <= token < 1 << 32]

"""Stop strings: found in the text of the last tokens, wherever the token boundaries fall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """Looks for stop strings that end within the newest token."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def find(self, output_ids: Sequence[int], stop: Sequence[str]) -> str | None:
        """The first of `stop` in the text of the newest tokens, or None. Called after each token."""
        piece = self._piece(output_ids[-1])
        if not any(_may_end_in(piece, string) for string in stop):
            return None
        # A token adds at least one byte of text, so these hold any match that the newest token completes.
        num_tokens = max(len(string.encode()) for string in stop) + 1
        tail = self._decode(output_ids[-num_tokens:])
        return next((string for string in stop if string in tail), None)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _piece(self, token_id: int) -> str:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._decode([token_id])
        return piece


def _may_end_in(piece: str, string: str) -> bool:
    """Whether a match of `string` can end within a token that reads `piece` on its own.

    Alone, a token may lose its spaces (empty or stripped pieces) or hold a part of a character (U+FFFD).
    """
    last = string[-1]
    return last in piece or not piece or "\ufffd" in piece or last.isspace()

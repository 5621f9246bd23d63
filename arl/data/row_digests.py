"""The fingerprint of a dataset: tells a run that continues whether its dataset is the one that it had."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

_NUM_ROWS = 64
"""Rows that are read, evenly spread."""


def fingerprint(rows: Any) -> dict[str, str]:
    """Index -> digest, of a few rows: the same in every process. rows: with a length and integer indexing.

    A row that is not the same when it is read again, because a column is drawn at random, say, has no digest. Nor has a
    row's value that JSON does not know: only its type counts.
    """
    number = min(len(rows), _NUM_ROWS)
    places = [i * (len(rows) - 1) // max(number - 1, 1) for i in range(number)]
    first, again = ({str(place): digest_of(rows[place]) for place in places} for _ in range(2))
    return {place: digest for place, digest in first.items() if again[place] == digest}


def digest_of(row: Any) -> str:
    """32 bits of a row's content, as hexadecimal text."""
    text = json.dumps(_plain(row), sort_keys=True, default=lambda value: type(value).__name__)
    return blake2b(text.encode(errors="surrogatepass"), digest_size=4).hexdigest()


def _plain(value: Any) -> Any:
    """Keys of all kinds as text, and numpy's values and tuples as JSON has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    to_list: Callable[[], Any] | None = getattr(value, "tolist", None)
    return to_list() if callable(to_list) and not isinstance(value, str | bytes) else value

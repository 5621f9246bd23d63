"""Finding the longest known prefix of a prompt: in sequences that run, and in those that finished recently.

They are shared among sequences of the same extra key alone, by which a client names what must not mix. All of it
belongs to the weights of the moment: whoever changes them clears it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

_BLOCK = 16
"""Prefixes are indexed at multiples of this many tokens, and at a sequence's end."""


@dataclass(slots=True, eq=False)
class Prefix:
    """Tokens, the first `num_computed` of which have keys and values at hand. keys: what it is indexed by."""

    tokens: list[int]
    num_computed: int = 0
    extra_key: str = ""
    keys: list[int] = field(default_factory=list[int], kw_only=True)

    def common_length(self, tokens: Sequence[int], at_least: int) -> int:
        """How many first tokens are the same; 0 if fewer than `at_least`."""
        if self.tokens[:at_least] != tokens[:at_least]:
            return 0
        end = min(len(self.tokens), len(tokens))
        length = min(at_least, end)
        while length < end and self.tokens[length] == tokens[length]:
            length += 1
        return length


@dataclass(slots=True, eq=False)
class Retained(Prefix):
    """What is left of a finished sequence: kv is its exported cache row, [2, layers, kv heads, num_computed, d]."""

    kv: torch.Tensor = field(kw_only=True)


def _keys(tokens: Sequence[int], extra_key: str) -> Iterator[tuple[int, int]]:
    """(length, key of the first `length` tokens) at each block's end and at the end of all."""
    key = hash(extra_key)
    for start in range(0, len(tokens), _BLOCK):
        end = min(start + _BLOCK, len(tokens))
        key = hash((key, *tokens[start:end]))
        yield end, key


class PrefixIndex:
    """Running and retained prefixes by their tokens; retained ones are evicted, least recently used first.

    max_bytes: memory for retained keys and values.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._by_key: dict[int, Prefix] = {}
        self._retained: OrderedDict[Retained, None] = OrderedDict()

    def find(self, tokens: Sequence[int], extra_key: str = "") -> tuple[Prefix, int] | None:
        """The prefix of this extra key that shares most with `tokens`, and how many tokens they share."""
        best, indexed_length = None, 0
        for length, key in _keys(tokens, extra_key):
            if (prefix := self._by_key.get(key)) and prefix.extra_key == extra_key:
                best, indexed_length = prefix, length
        if best is None or not (length := best.common_length(tokens, indexed_length)):
            return None
        if isinstance(best, Retained):
            self._retained.move_to_end(best)
        return best, length

    def add(self, prefix: Prefix) -> None:
        """Make a prefix findable by its tokens as they are now; retain it if it brings its keys and values along."""
        prefix.keys = [key for _, key in _keys(prefix.tokens, prefix.extra_key)]
        for key in prefix.keys:
            self._by_key[key] = prefix
        if isinstance(prefix, Retained):
            self._retained[prefix] = None
            self._num_bytes += prefix.kv.nbytes
            while self._num_bytes > self._max_bytes:
                self.remove(next(iter(self._retained)))

    def remove(self, prefix: Prefix) -> None:
        """Forget a prefix."""
        for key in prefix.keys:
            if self._by_key.get(key) is prefix:
                del self._by_key[key]
        prefix.keys = []
        if isinstance(prefix, Retained):
            del self._retained[prefix]
            self._num_bytes -= prefix.kv.nbytes

    def clear(self) -> None:
        self._by_key.clear()
        self._retained.clear()
        self._num_bytes = 0

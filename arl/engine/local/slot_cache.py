"""The key-value cache of the running sequences: one row each, contiguous, so that a batch is a view and no gather."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

_FIRST_ROWS = 8
_FIRST_CAPACITY = 256
"""Rows, and positions of each, that a cache has at first. It doubles what it runs out of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What one position of one sequence takes: keys and values of every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class SlotCache:
    """Keys and values [2, layers, rows, kv heads, capacity, head dim]; row i belongs to the i-th running sequence.

    `keys[l]` and `values[l]` are layer l's views [rows, kv heads, capacity, head dim].
    """

    def __init__(self, shape: CacheShape, max_rows: int, max_length: int, device: torch.device) -> None:
        self.shape = shape
        self.max_length = max_length
        self._max_rows = max_rows
        self._device = device
        self._use(self._allocate(min(_FIRST_ROWS, max_rows), min(_FIRST_CAPACITY, max_length)))

    def _allocate(self, num_rows: int, capacity: int) -> torch.Tensor:
        """Zeros: attention multiplies what lies beyond a sequence's end by 0, so it must be finite."""
        s = self.shape
        size = (2, s.num_layers, num_rows, s.num_kv_heads, capacity, s.head_dim)
        return torch.zeros(size, dtype=s.dtype, device=self._device)

    def _use(self, data: torch.Tensor) -> None:
        self._data = data
        self.keys = list(data[0])
        self.values = list(data[1])

    @property
    def num_rows(self) -> int:
        return self._data.shape[2]

    @property
    def capacity(self) -> int:
        """Positions that a row holds without growing."""
        return self._data.shape[4]

    def reserve(self, num_rows: int, length: int) -> None:
        """Hold at least `num_rows` rows of `length` positions, keeping what is there."""
        if num_rows <= self.num_rows and length <= self.capacity:
            return
        num_rows = _grow(self.num_rows, num_rows, self._max_rows)
        length = _grow(self.capacity, length, self.max_length)
        grown = self._allocate(num_rows, length)
        grown[:, :, : self.num_rows, :, : self.capacity] = self._data
        self._use(grown)

    def clear(self) -> None:
        """Forget everything, numbers that are not finite among it."""
        self._data.zero_()

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` to row `target`."""
        self._data[:, :, target, :, :length] = self._data[:, :, source, :, :length]

    def export(self, row: int, length: int) -> torch.Tensor:
        """A copy of a row's first `length` positions: [2, layers, kv heads, length, head dim]."""
        return self._data[:, :, row, :, :length].clone()

    def restore(self, row: int, exported: torch.Tensor, length: int) -> None:
        """Write the first `length` positions of an exported row into `row`."""
        self._data[:, :, row, :, :length] = exported[:, :, :, :length]


def _grow(size: int, wanted: int, limit: int) -> int:
    """`size`, doubled until it holds `wanted`; at most `limit`."""
    while size < wanted:
        size *= 2
    return min(size, limit)


# Finding the longest known prefix of a prompt: in sequences that run, and in those that finished recently.


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

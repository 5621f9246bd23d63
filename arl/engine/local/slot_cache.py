"""The key-value cache of the running sequences: one row each, contiguous, so that a batch is a view and no gather."""

from __future__ import annotations

from dataclasses import dataclass

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

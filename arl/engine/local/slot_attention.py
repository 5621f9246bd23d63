"""The slot cache, and attention over it. transformers knows the attention function, so models run their own code.

Each running sequence has one contiguous row of keys and values, so a batch is a view and needs no gather. A forward
pass takes all tokens of a step as one sequence [1, tokens]: first one token of each decoding sequence (cache rows 0,
1, ...), then the chunks of prompts. Linear layers see them together; attention separates them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from arl.api.errors import ModelError

SLOT_ATTENTION = "arl_slot_attention"
"""transformers knows the function by this name."""

_BLOCK_ROWS = 16
"""The fewest rows of a segment when a batch is split by length."""

_FIRST_ROWS = 8
_FIRST_CAPACITY = 256
"""A new cache's rows, and the positions of each. The cache doubles whichever runs out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The size of one position of one sequence: keys and values of every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


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
        """Zeros: attention multiplies everything beyond a sequence's end by 0, so it must be finite."""
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
        """Hold at least `num_rows` rows of `length` positions, and keep the present contents."""
        if num_rows <= self.num_rows and length <= self.capacity:
            return
        num_rows = _grow(self.num_rows, num_rows, self._max_rows)
        length = _grow(self.capacity, length, self.max_length)
        grown = self._allocate(num_rows, length)
        grown[:, :, : self.num_rows, :, : self.capacity] = self._data
        self._use(grown)

    def clear(self) -> None:
        """Forget everything, and with it any numbers that are not finite."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens of one prompt that a step computes: positions start..start+length-1 of cache row `row`."""

    row: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """Decoding rows first..last-1, which attend to `context` positions together."""

    first: int
    last: int
    context: int
    bias: torch.Tensor | None
    """[rows * kv heads, 1, context], 0 or -inf; None where all rows have the same length."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotBatch:
    """Where the tokens of one step belong."""

    cache: SlotCache
    rows: torch.Tensor
    """int64[D], 0..D-1, of the D decoding sequences."""
    positions: torch.Tensor
    """int64[D], of the D decoding sequences."""
    segments: Sequence[Segment]
    """Segments that cover the decoding sequences in order."""
    chunks: Sequence[Chunk]
    masks: Sequence[torch.Tensor | None]
    """For each chunk its bias [length, start + length], 0 or -inf; None for a chunk that begins its prompt."""

    @classmethod
    def of(cls, cache: SlotCache, rows: torch.Tensor, positions: Sequence[int], chunks: Sequence[Chunk]) -> SlotBatch:
        """A batch that decodes at `positions` of the first rows, and computes `chunks`."""
        places = torch.tensor(positions, dtype=torch.int64, device=rows.device)
        segments = [
            Segment(first=first, last=last, context=context, bias=_bias(cache, places, positions, first, last, context))
            for first, last, context in _split(positions)
        ]
        return cls(
            cache=cache,
            rows=rows[: len(positions)],
            positions=places,
            segments=segments,
            chunks=chunks,
            masks=[_causal_bias(cache, chunk, rows.device) if chunk.start else None for chunk in chunks],
        )


def _split(positions: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first row, end, context) of runs of blocks whose contexts are within a factor of two.

    All rows of a segment read as much of the cache as its longest, so one long row must not slow down all others.
    """
    segments: list[tuple[int, int, int]] = []
    for first in range(0, len(positions), _BLOCK_ROWS):
        block = positions[first : first + _BLOCK_ROWS]
        context = max(block) + 1
        last = first + len(block)
        if segments:
            start, _, before = segments[-1]
            if max(before, context) <= 2 * min(before, context):
                segments[-1] = (start, last, max(before, context))
                continue
        segments.append((first, last, context))
    return segments


def _bias(
    cache: SlotCache, places: torch.Tensor, positions: Sequence[int], first: int, last: int, context: int
) -> torch.Tensor | None:
    if min(positions[first:last]) + 1 == context:
        return None
    visible = torch.arange(context, device=places.device) <= places[first:last, None]
    bias = torch.zeros((), dtype=cache.shape.dtype, device=places.device).where(visible, float("-inf"))
    return bias.repeat_interleave(cache.shape.num_kv_heads, 0)[:, None]


def _causal_bias(cache: SlotCache, chunk: Chunk, device: torch.device) -> torch.Tensor:
    size = (chunk.length, chunk.end)
    return torch.full(size, float("-inf"), dtype=cache.shape.dtype, device=device).triu(chunk.start + 1)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    slot_batch: SlotBatch | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Write the step's keys and values into the cache and attend to it.

    query [1, heads, N, d], key and value [1, kv heads, N, d]; returns [1, N, heads, d]. Called by the model's layers.
    """
    if slot_batch is None:
        raise ModelError("the model does not pass keyword arguments to its attention; the embedded server needs that")
    _refuse_unknown(options, slot_batch)
    layer: Any = module.layer_idx
    num_decoding = len(slot_batch.rows)
    if not slot_batch.chunks:
        return _decode(layer, query[0], key[0], value[0], slot_batch, scaling).unsqueeze(0), None
    keys, values = slot_batch.cache.keys[layer], slot_batch.cache.values[layer]
    outputs = []
    if num_decoding:
        q, k, v = (x[0, :, :num_decoding] for x in (query, key, value))
        outputs.append(_decode(layer, q, k, v, slot_batch, scaling))
    start = num_decoding
    for chunk, mask in zip(slot_batch.chunks, slot_batch.masks, strict=True):
        q, k, v = (x[:, :, start : start + chunk.length] for x in (query, key, value))
        outputs.append(_prefill(q, k, v, keys[chunk.row], values[chunk.row], chunk, mask, scaling))
        start += chunk.length
    return torch.cat(outputs).unsqueeze(0), None


def _refuse_unknown(options: dict[str, Any], batch: SlotBatch) -> None:
    window = options.get("sliding_window")
    if window is not None and window < batch.cache.max_length:
        raise ModelError(
            f"the model attends to a sliding window of {window} tokens, which the embedded server does not support; "
            f"set context_length to at most {window}"
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ModelError(f"the model's attention uses {name}, which the embedded server does not support")


def _decode(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: SlotBatch, scaling: float
) -> torch.Tensor:
    """One token of each decoding sequence: query [heads, D, d], key and value [kv heads, D, d] -> [D, heads, d].

    The query heads that share a kv head become rows of one small matrix, so that keys are never repeated.
    """
    keys, values = batch.cache.keys[layer], batch.cache.values[layer]
    keys[batch.rows, :, batch.positions] = key.transpose(0, 1)
    values[batch.rows, :, batch.positions] = value.transpose(0, 1)
    num_heads, num_rows, head_dim = query.shape
    group = num_heads // key.shape[0]
    query = query.transpose(0, 1).reshape(-1, group, head_dim)
    if len(batch.segments) == 1:
        output = _attend(query, keys, values, batch.segments[0], scaling)
    else:
        per_row = key.shape[0]
        parts = [_attend(query[s.first * per_row : s.last * per_row], keys, values, s, scaling) for s in batch.segments]
        output = torch.cat(parts)
    return output.view(num_rows, num_heads, head_dim)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, segment: Segment, scaling: float
) -> torch.Tensor:
    """query [M, group, d] of the segment's M = rows * kv heads; keys and values of the whole layer."""
    k = keys[segment.first : segment.last, :, : segment.context].flatten(0, 1)
    v = values[segment.first : segment.last, :, : segment.context].flatten(0, 1)
    if segment.bias is None:
        scores = torch.bmm(query * scaling, k.transpose(1, 2))
    else:
        scores = torch.baddbmm(segment.bias, query, k.transpose(1, 2), alpha=scaling)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return torch.bmm(weights, v)


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chunk: Chunk,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """A chunk of one prompt: query [1, heads, T, d], key and value [1, kv heads, T, d] -> [T, heads, d].

    keys and values: the sequence's cache row in this layer, [kv heads, capacity, d].
    """
    keys[:, chunk.start : chunk.end] = key[0]
    values[:, chunk.start : chunk.end] = value[0]
    output = F.scaled_dot_product_attention(
        query,
        keys[None, :, : chunk.end],
        values[None, :, : chunk.end],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[0].transpose(0, 1)


AttentionInterface.register(SLOT_ATTENTION, slot_attention)

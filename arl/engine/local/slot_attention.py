"""The slot cache, and attention over it. transformers knows the attention function, so models run their own code.

Each running sequence has one contiguous row of keys and values, so a batch is a view and needs no gather. A forward
pass takes all tokens of a step as one sequence: first one token of each decoding sequence (cache rows 0, 1, ...), then
the chunks of prompts (the rows after them). Linear layers see them together; attention separates them again.

Each call of the attention function in a pass has keys and values of its own, whatever module makes it: calls are
numbered in their order.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from arl.api.errors import ModelError
from arl.engine.trial import refuse_tensors

SLOT_ATTENTION = "arl_slot_attention"
"""transformers knows the function by this name."""

_BLOCK_ROWS = 16
"""The fewest rows of a segment when a batch is split by length."""

_QUICK_PRODUCT = 400
"""torch multiplies batches of smaller matrices (inner size times context) one number after another on a CPU."""

_MOST_SCORES = 1 << 26
"""Most scores that are held at a time where torch's fused attention cannot compute them."""

_FIRST_ROWS = 8
_FIRST_CAPACITY = 256
"""A new cache's rows, and the positions of each. The cache doubles whichever runs out."""


class SlotCache:
    """Keys and values [layers, 2, rows, kv heads, capacity, head dim]; row i belongs to the i-th running sequence."""

    can_rewind = True
    """Whether the first positions of a row can be used without the others."""

    def __init__(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, max_rows: int, max_length: int, like: torch.Tensor
    ) -> None:
        """like: it has the dtype and the device of keys and values."""
        self.num_kv_heads, self.head_dim, self.max_length = num_kv_heads, head_dim, max_length
        self._num_layers, self._max_rows = num_layers, max_rows
        self.device, self._dtype = like.device, like.dtype
        both = torch.tensor([0.0, -torch.inf], dtype=like.dtype, device=like.device)
        self._seen_then_hidden = {max_length: both.repeat_interleave(max_length)}
        """By window: what each of `max_length` positions is to the last of them, and as many more positions."""
        self.resume()

    @property
    def num_bytes(self) -> int:
        return self._data.nbytes

    def resume(self) -> None:
        """Take memory as at the beginning."""
        self._use(self._allocate(min(_FIRST_ROWS, self._max_rows), min(_FIRST_CAPACITY, self.max_length)))

    def release(self) -> None:
        """Forget everything and hold no memory. Only `resume` may follow."""
        self._data = torch.empty(0, dtype=self._dtype, device=self.device)
        self._rows, self._vectors = (), []

    def _allocate(self, num_rows: int, capacity: int) -> torch.Tensor:
        """Zeros: attention multiplies everything beyond a sequence's end by 0, so it must be finite."""
        size = (self._num_layers, 2, num_rows, self.num_kv_heads, capacity, self.head_dim)
        if self.device.type != "cpu" or 0 in size:
            return torch.zeros(size, dtype=self._dtype, device=self.device)
        # Unlike torch's, numpy's zeros take memory and time only once they are touched.
        zeros = np.zeros(math.prod(size) * self._dtype.itemsize, np.uint8)
        return torch.from_numpy(zeros).view(self._dtype).view(size)

    def _use(self, data: torch.Tensor) -> None:
        self._data = data
        self.num_rows, self.capacity = data.shape[2], data.shape[4]
        """Rows, and the positions that each holds without growing."""
        self._rows = data.unbind(2)
        self._vectors = [layer.view(-1, self.head_dim) for layer in data]
        keys = np.arange(self.num_rows * self.num_kv_heads).reshape(self.num_rows, -1)
        self._lines = np.concatenate([keys, keys + keys.size], axis=1) * self.capacity
        """Where each row's keys and values begin among the vectors of a layer: int64[rows, 2 x kv heads]."""

    def reserve(self, num_rows: int, length: int) -> None:
        """Hold at least `num_rows` rows of `length` positions, and keep the present contents."""
        if num_rows <= self.num_rows and length <= self.capacity:
            return
        rows, capacity = self.num_rows, self.capacity
        while rows < num_rows:
            rows *= 2
        while capacity < length:
            capacity *= 2
        grown = self._allocate(min(rows, self._max_rows), min(capacity, self.max_length))
        grown[:, :, : self.num_rows, :, : self.capacity] = self._data
        self._use(grown)

    def places(self, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Where `write` puts tokens' keys and values, int64[tokens, 2 x kv heads]; valid until the cache grows."""
        return torch.from_numpy(self._lines[rows] + positions[:, None]).to(self.device)

    def write(self, layer: int, places: torch.Tensor, keys_values: torch.Tensor) -> None:
        """keys_values [tokens, 2 x kv heads, head dim]: of each token, the keys of all kv heads and then the values."""
        self._vectors[layer][places] = keys_values

    def view(self, first: int, last: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in the first `context` positions of rows first..last-1; valid until the cache grows:
        [layers, rows, kv heads, context, head dim]."""
        keys, values = self._data[:, :, first:last, :, :context].unbind(1)
        return keys, values

    def bias(self, positions: np.ndarray, context: int, window: int | None = None) -> torch.Tensor:
        """[*positions, context]: 0 for what a token at each position sees, and -inf for the rest.

        It sees itself and what comes before it, or only the last `window` of these.
        """
        window = min(window or self.max_length, self.max_length)
        if (seen := self._seen_then_hidden.get(window)) is None:
            seen = self._seen_then_hidden[window] = self._seen_then_hidden[self.max_length].clone()
            seen[: self.max_length - window] = -torch.inf
        starts = torch.from_numpy(np.maximum(self.max_length - 1 - positions, 0)).to(self.device)
        return seen.unfold(0, context, 1)[starts]

    def clear(self) -> None:
        """Forget everything, and with it any numbers that are not finite."""
        self._data.zero_()

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` to row `target`."""
        self._rows[target].narrow(3, 0, length).copy_(self._rows[source].narrow(3, 0, length))

    def spread(self, source: int, first: int, last: int, length: int) -> None:
        """Copy the first `length` positions of row `source` to rows first..last-1."""
        row = self._data[:, :, source : source + 1, :, :length]
        self._data[:, :, first:last, :, :length] = row

    def export(self, row: int, length: int) -> Any:
        """A copy of a row's first `length` positions, for `restore`; it has `nbytes`."""
        return self._rows[row].narrow(3, 0, length).clone(memory_format=torch.contiguous_format)

    def restore(self, row: int, exported: Any, length: int) -> None:
        """Write the first `length` positions of an exported row into `row`."""
        self._rows[row].narrow(3, 0, length).copy_(exported.narrow(3, 0, length))


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
    """Decoding rows that attend to equally many positions together, the context."""

    keys: Sequence[torch.Tensor]
    """For each layer [rows * kv heads, head dim, context]."""
    values: Sequence[torch.Tensor]
    """For each layer [rows * kv heads, context, head dim]."""
    tokens: slice
    """Theirs among the tokens of the batch."""
    positions: np.ndarray
    """[rows * kv heads, 1], or [1, 1] where all rows have the same length."""
    biases: dict[int | None, torch.Tensor | None]
    """0 or -inf, [*positions, context]: for layers without a sliding window, and for each window that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """Chunks that attend to equally many positions together, the context, padded to the longest."""

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    """For each layer [rows, kv heads, context, head dim]."""
    tokens: slice | torch.Tensor
    """The batch's tokens that fill [rows, longest chunk]; a token of the same chunk fills up a shorter one."""
    filled: torch.Tensor | None
    """A mask of the rows * longest places that are not padding; None if none is padding."""
    positions: np.ndarray
    """[rows, 1, longest]"""
    biases: dict[int | None, torch.Tensor | None]
    """As of a Segment; None for layers without a window and a single chunk that begins its prompt."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotBatch:
    """Where the tokens of one step belong, or of a part of it."""

    cache: SlotCache
    places: torch.Tensor
    segments: Sequence[Segment]
    """They cover the decoding sequences in order."""
    windows: Sequence[Window]
    """They cover the chunks in order."""
    calls: Iterator[int] = field(default_factory=count)
    """Numbers the calls of `slot_attention`."""

    @classmethod
    def of(cls, cache: SlotCache, positions: np.ndarray, chunks: Sequence[Chunk], first_row: int = 0) -> SlotBatch:
        """positions: int64, of every token: first one of each decoding row from first_row on, then the chunks'."""
        lengths = [chunk.length for chunk in chunks]
        num_decoding = len(positions) - sum(lengths)
        rows = np.arange(first_row, first_row + num_decoding)
        if chunks:
            rows = np.concatenate([rows, np.repeat([chunk.row for chunk in chunks], lengths)])
        decoding = positions[:num_decoding]
        starts = (num_decoding + np.cumsum([0, *lengths])).tolist()
        return cls(
            cache=cache,
            places=cache.places(rows, positions),
            segments=[_segment(cache, decoding, slice(i, j), first_row) for i, j in _split(decoding)],
            windows=[_window(cache, chunks[i:j], starts[i]) for i, j in _alike(chunks)],
        )


def _split(positions: np.ndarray) -> list[tuple[int, int]]:
    """(first, end) of runs of blocks whose contexts are within a factor of two.

    All rows of a segment read as much of the cache as its longest, so one long row must not slow down all others.
    """
    if len(positions) <= _BLOCK_ROWS:
        return [(0, len(positions))] if len(positions) else []
    firsts = range(0, len(positions), _BLOCK_ROWS)
    contexts = (np.maximum.reduceat(positions, list(firsts)) + 1).tolist()
    segments: list[tuple[int, int]] = []
    before = 0
    for first, context in zip(firsts, contexts, strict=True):
        last = min(first + _BLOCK_ROWS, len(positions))
        if segments and max(before, context) <= 2 * min(before, context):
            segments[-1] = (segments[-1][0], last)
            before = max(before, context)
        else:
            segments.append((first, last))
            before = context
    return segments


def _segment(cache: SlotCache, positions: np.ndarray, tokens: slice, first_row: int) -> Segment:
    places = positions[tokens]
    context = max(int(places.max()) + 1, min(-(-_QUICK_PRODUCT // cache.head_dim), cache.capacity))
    is_one_length = places.min() == places.max()
    positions = (places[:1] if is_one_length else np.repeat(places, cache.num_kv_heads))[:, None]
    keys, values = cache.view(first_row + tokens.start, first_row + tokens.stop, context)
    return Segment(
        keys=keys.flatten(1, 2).transpose(2, 3).unbind(),
        values=values.flatten(1, 2).unbind(),
        tokens=tokens,
        positions=positions,
        biases={None: cache.bias(positions, context)},
    )


def _alike(chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
    """(first, end) of runs of chunks that padding to the longest makes at most twice as much work."""
    runs: list[tuple[int, int]] = []
    length = context = work = 0
    for index, chunk in enumerate(chunks):
        longest, widest = max(length, chunk.length), max(context, chunk.end)
        more = work + chunk.length * chunk.end
        if runs and longest * widest * (index + 1 - runs[-1][0]) <= 2 * more:
            runs[-1] = (runs[-1][0], index + 1)
            length, context, work = longest, widest, more
        else:
            runs.append((index, index + 1))
            length, context, work = chunk.length, chunk.end, chunk.length * chunk.end
    return runs


def _window(cache: SlotCache, chunks: Sequence[Chunk], start: int) -> Window:
    """start: the index of the chunks' first token among the batch's."""
    context = max(chunk.end for chunk in chunks)
    keys, values = cache.view(chunks[0].row, chunks[-1].row + 1, context)
    lengths = np.array([chunk.length for chunk in chunks])
    steps = np.arange(lengths.max())
    ends = start + np.cumsum(lengths)
    tokens = np.minimum((ends - lengths)[:, None] + steps, ends[:, None] - 1)
    positions = np.array([chunk.start for chunk in chunks])[:, None, None] + steps
    begins = len(chunks) == 1 and chunks[0].start == 0
    filled = np.flatnonzero(steps < lengths[:, None])
    is_even = len(filled) == tokens.size
    return Window(
        keys=keys.unbind(),
        values=values.unbind(),
        tokens=slice(start, int(ends[-1])) if is_even else torch.from_numpy(tokens.ravel()).to(cache.device),
        filled=None if is_even else torch.from_numpy(filled).to(cache.device),
        positions=positions,
        biases={None: None if begins else cache.bias(positions, context)},
    )


class Scoring(NamedTuple):
    """What a layer does with its attention scores besides scaling them."""

    window: int
    """How many tokens each one sees, with itself."""
    cap: float | None
    """Scores become cap * tanh(scores / cap)."""
    sinks: torch.Tensor | None
    """[kv heads, heads of each] One more score for each head, of something that has no value."""

    @property
    def only_hides(self) -> bool:
        return self.cap is None and self.sinks is None


def attend(
    layer: int,
    query: torch.Tensor,
    keys_values: torch.Tensor,
    batch: SlotBatch,
    scaling: float,
    scoring: Scoring | None = None,
) -> torch.Tensor:
    """Write the batch's keys and values into the cache and attend to it; returns [tokens, heads * d].

    query [tokens, heads, d]; keys_values [tokens, 2 x kv heads, d].
    """
    batch.cache.write(layer, batch.places, keys_values)
    if scoring is not None:
        for part in (*batch.segments, *batch.windows):
            if scoring.window not in part.biases:
                context = part.values[layer].shape[-2]
                part.biases[scoring.window] = batch.cache.bias(part.positions, context, scoring.window)
    outputs = [_decode(layer, query, segment, scaling, scoring) for segment in batch.segments]
    outputs += [_prefill(layer, query, window, scaling, scoring) for window in batch.windows]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _decode(layer: int, query: torch.Tensor, segment: Segment, scaling: float, scoring: Scoring | None) -> torch.Tensor:
    """One token of each row. The query heads that share a kv head are rows of one small matrix: no key is repeated."""
    keys, values = segment.keys[layer], segment.values[layer]
    query = query[segment.tokens]
    q = query.reshape(len(keys), -1, query.shape[-1])
    bias = segment.biases[None if scoring is None else scoring.window]
    return _weighed(q, keys, values, bias, scaling, scoring).view(len(query), -1)


def _prefill(layer: int, query: torch.Tensor, window: Window, scaling: float, scoring: Scoring | None) -> torch.Tensor:
    keys, values = window.keys[layer], window.values[layer]
    (num_rows, num_kv_heads, context, head_dim), num_heads = keys.shape, query.shape[1]
    query = query[window.tokens].reshape(num_rows, -1, num_heads, head_dim).transpose(1, 2)
    bias = window.biases[None if scoring is None else scoring.window]
    if bias is None or scoring is None or scoring.only_hides:
        output = F.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=bias,
            is_causal=bias is None,
            scale=scaling,
            enable_gqa=num_heads != num_kv_heads,
        )
    else:
        output, keys, values = torch.empty_like(query), keys.flatten(0, 1).mT, values.flatten(0, 1)
        at_once = max(1, _MOST_SCORES // (num_rows * num_heads * context))
        for start in range(0, query.shape[2], at_once):
            some = slice(start, start + at_once)
            q = query[:, :, some].reshape(len(keys), -1, head_dim)
            repeated = bias[:, :, some].repeat_interleave(num_kv_heads, 0).repeat(1, num_heads // num_kv_heads, 1, 1)
            part = _weighed(q, keys, values, repeated.flatten(1, 2), scaling, scoring)
            output[:, :, some] = part.view(num_rows, num_heads, -1, head_dim)
    output = output.transpose(1, 2).reshape(-1, num_heads * head_dim)
    return output if window.filled is None else output[window.filled]


def _weighed(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: Any,
    scaling: float,
    scoring: Scoring | None,
) -> torch.Tensor:
    """Attention, its scores in memory: [n, m, d] as the query; n: rows * kv heads, m: heads of each (* tokens).

    keys [n, d, context]; values [n, context, d]; bias [n or 1, m or 1, context].
    """
    if scoring is None or scoring.only_hides:
        scores = torch.baddbmm(bias, query, keys, alpha=scaling)
    else:
        scores = torch.bmm(query, keys) * scaling
        if scoring.cap is not None:
            scores = scoring.cap * torch.tanh(scores / scoring.cap)
        scores = scores + bias
        if scoring.sinks is not None:
            sinks = scoring.sinks.repeat_interleave(query.shape[1] // scoring.sinks.shape[1], 1)
            scores = torch.cat([scores, sinks.repeat(len(query) // len(sinks), 1)[..., None].to(scores)], -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : values.shape[1]].to(query.dtype)
    return torch.bmm(weights, values)


_now = threading.local()


@contextmanager
def computing(batch: Any) -> Iterator[None]:
    """`slot_attention` is called for the tokens of a SlotBatch meanwhile, on this thread; or for a Survey to see."""
    _now.batch = batch
    try:
        yield
    finally:
        _now.batch = None


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`attend`, as the layers of transformers' models call it.

    query [1, heads, N, d], key and value [1, kv heads, N, d]; returns [1, N, heads, d]. Raises ModelError for a layer
    that slots cannot serve.
    """
    refuse_tensors(module, {"attention_mask": attention_mask, **options, "s_aux": None})
    if options.get("is_causal") is False:
        raise ModelError(f"{type(module).__name__} lets tokens see what comes after them")
    batch = _now.batch
    if not isinstance(batch, SlotBatch):
        return batch.note(module, query, key, value, scaling, options.get("sliding_window")), None
    cache, scoring = batch.cache, None
    cap, sinks = options.get("softcap"), options.get("s_aux")
    window = min(options.get("sliding_window") or cache.max_length, cache.max_length)
    if window < cache.max_length or cap is not None or sinks is not None:
        scoring = Scoring(window, cap, None if sinks is None else sinks.view(cache.num_kv_heads, -1))
    if cache.num_kv_heads != key.shape[1]:
        key, value = (part.repeat_interleave(cache.num_kv_heads // key.shape[1], 1) for part in (key, value))
    num_heads, size, value_size = *query.shape[1::2], value.shape[3]
    # Zeros at the end of each head: keys and values of unequal sizes share a cache.
    query, key, value = (
        part[0] if part.shape[-1] == cache.head_dim else F.pad(part[0], (0, cache.head_dim - part.shape[-1]))
        for part in (query, key, value)
    )
    keys_values = torch.cat([key, value]).transpose(0, 1)
    output = attend(next(batch.calls), query.transpose(0, 1), keys_values, batch, scaling or size**-0.5, scoring)
    return output.view(1, -1, num_heads, cache.head_dim)[..., :value_size].contiguous(), None


AttentionInterface.register(SLOT_ATTENTION, slot_attention)

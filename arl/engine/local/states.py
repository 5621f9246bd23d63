"""What sequences leave behind besides slots: the states of recurrent modules, or whole caches of transformers.

A recurrent module (a Mamba mixer, linear attention, a short convolution) reads a sequence in order. It carries a state
along in the cache that its forward takes. In a step it sees the sequences apart: decoding rows stacked [B, 1, ..], and
each chunk of a prompt by itself [1, L, ..]. All other modules see the step's tokens in one row [1, N, ..].

A state cannot go back: it serves only sequences that begin with all tokens that it has seen.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import Cache

from arl.engine.local.adapters import LoadedAdapters
from arl.engine.local.slot_attention import Chunk, SlotCache, computing
from arl.engine.trial import note_scores

_Boxes = list[tuple[Any, Any]]
"""Where a cache of transformers holds its tensors: (dict or list, key)."""


class Exported(NamedTuple):
    """A copy of a row."""

    content: Any
    nbytes: int


class _Part(NamedTuple):
    """Some of a step's tokens: one of each decoding row, or those of a chunk."""

    tokens: slice
    rows: slice
    cache: Cache
    boxes: _Boxes | None = None
    """Those of the cache, if it began with states."""
    is_decoding: bool = False

    def of(self, value: Any, num_tokens: int) -> Any:
        """The part of an argument that belongs to these tokens, if it has one for each of the step's."""
        if type(value) in (tuple, list):
            return type(value)(self.of(item, num_tokens) for item in value)
        if not isinstance(value, torch.Tensor) or value.shape[:2] != (1, num_tokens):
            return value
        return value[:, self.tokens].transpose(0, 1) if self.is_decoding else value[:, self.tokens]

    def result(self, value: Any) -> Any:
        """[1, tokens, ..] of something that has a part for each token; else None."""
        value = value.transpose(0, 1) if self.is_decoding and isinstance(value, torch.Tensor) else value
        is_ours = isinstance(value, torch.Tensor) and value.shape[:2] == (1, self.tokens.stop - self.tokens.start)
        return value if is_ours else None


class StateCache(SlotCache):
    """Slots, and the states of recurrent modules by row."""

    can_rewind = False

    def __init__(self, way: str, survey: Survey, adapters: LoadedAdapters, **slots: Any) -> None:
        """way: one of WAYS."""
        self._way, self._empty, self._adapters = way, survey.cache, adapters
        self._states: list[torch.Tensor] = []
        """[rows, ..] for each tensor that a cache holds; modules change them in place."""
        self._used: Cache | None = None
        """A cache with all its states, for its structure."""
        self._spares: list[tuple[Cache, _Boxes]] = []
        self._parts: Sequence[_Part] = ()
        super().__init__(**slots)
        for module, name in survey.recurrent.items():
            module.forward = self._apart(module.forward, name)  # pyright: ignore[reportAttributeAccessIssue]

    # ---- a pass through the model -----------------------------------------------------------------------------

    @contextmanager
    def passing(self, positions: np.ndarray, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Recurrent modules compute a SlotBatch's tokens meanwhile. They go on from the states of its rows."""
        start = len(positions) - sum(chunk.length for chunk in chunks)
        parts = list[_Part]()
        if start:
            for state in self._states:
                state[:start][torch.from_numpy(positions[:start] == 0)] = 0  # prompts of one token
            parts.append(_Part(slice(0, start), slice(0, start), *self._spare(0, slice(0, start)), is_decoding=True))
        for chunk in chunks:
            row, stop = slice(chunk.row, chunk.row + 1), start + chunk.length
            goes_on = chunk.start > 0
            cache, boxes = self._spare(len(parts), row) if goes_on else (copy.deepcopy(self._empty), None)
            step = 1 if goes_on and "one" in self._way else chunk.length
            parts += [_Part(slice(i, i + step), row, cache, boxes) for i in range(start, stop, step)]
            start = stop
        self._parts = parts
        try:
            yield
        finally:
            self._parts = ()
        for part in parts:
            boxes = part.boxes or list(_tensors(part.cache))
            if self._used is None:
                self._used = copy.deepcopy(part.cache)
                with torch.inference_mode(False):
                    self._states = [box[key].new_zeros(self.num_rows, *box[key].shape[1:]) for box, key in boxes]
            for (box, key), state in zip(boxes, self._states, strict=True):
                if box[key].data_ptr() != state[part.rows].data_ptr():
                    state[part.rows] = box[key]

    def _spare(self, number: int, rows: slice) -> tuple[Cache, _Boxes]:
        """A cache that has the states of these rows, for the part of a pass with this number."""
        while len(self._spares) <= number:
            cache: Any = copy.deepcopy(self._used)
            self._spares.append((cache, list(_tensors(cache))))
        for (box, key), state in zip(self._spares[number][1], self._states, strict=True):
            box[key] = state[rows]
        return self._spares[number]

    def _apart(self, own: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A recurrent module's forward, which computes one part after another. name: of the argument for a cache."""
        index = list(inspect.signature(own).parameters).index(name)

        @wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._parts:
                return own(*args, **kwargs)
            num_tokens = self._parts[-1].tokens.stop
            results: list[tuple[Any, ...]] = []
            is_tuple = False
            for part in self._parts:
                positional = [part.of(value, num_tokens) for value in args]
                named = {key: part.of(value, num_tokens) for key, value in kwargs.items()}
                if index < len(args):
                    positional[index] = part.cache
                else:
                    named[name] = part.cache
                with self._adapters.within(part.tokens):
                    result = own(*positional, **named)
                is_tuple = isinstance(result, tuple)
                results.append(tuple(map(part.result, result if is_tuple else (result,))))
            if len(results) > 1:
                columns = zip(*results, strict=True)
                results = [tuple(None if column[0] is None else torch.cat(column, 1) for column in columns)]
            return results[0] if is_tuple else results[0][0]

        return forward

    # ---- as a cache of rows -----------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(state.nbytes for state in self._states)

    def release(self) -> None:
        super().release()
        self._states, self._spares = [state.new_zeros(0, *state.shape[1:]) for state in self._states], []

    def reserve(self, num_rows: int, length: int) -> None:
        super().reserve(num_rows, length)
        for number, state in enumerate(self._states):
            if len(state) < self.num_rows:
                self._states[number] = state.new_zeros(self.num_rows, *state.shape[1:])
                self._states[number][: len(state)] = state

    def clear(self) -> None:
        super().clear()
        for state in self._states:
            state.zero_()

    def copy(self, source: int, target: int, length: int) -> None:
        super().copy(source, target, length)
        for state in self._states:
            state[target] = state[source]

    def export(self, row: int, length: int) -> Exported:
        slots, states = super().export(row, length), [state[row].clone() for state in self._states]
        return Exported((slots, states), slots.nbytes + sum(state.nbytes for state in states))

    def restore(self, row: int, exported: Exported, length: int) -> None:
        slots, states = exported.content
        super().restore(row, slots, length)
        for state, known in zip(self._states, states, strict=True):
            state[row] = known


class OwnCache:
    """A cache of transformers for each row, as the model makes it."""

    can_rewind = False

    def __init__(self, way: str) -> None:
        """way: one of WAYS. With "never", rows are the tokens so far."""
        self.way = way
        self.rows: dict[int, Any] = {}

    def runs(self, positions: Sequence[int], chunks: Sequence[Chunk]) -> list[Chunk]:
        """The tokens of a step, in their order, by passes through the model."""
        num_decoding = len(positions) - sum(chunk.length for chunk in chunks)
        runs = [Chunk(row=row, start=positions[row], length=1) for row in range(num_decoding)]
        for chunk in chunks:
            size = 1 if "one" in self.way and chunk.start else chunk.length
            runs += [Chunk(row=chunk.row, start=i, length=size) for i in range(chunk.start, chunk.end, size)]
        return runs

    @property
    def num_bytes(self) -> int:
        return sum(map(_num_bytes, self.rows.values()))

    def reserve(self, num_rows: int, length: int) -> None:
        """Drop what rows beyond num_rows have left behind."""
        for row in [row for row in self.rows if row >= num_rows]:
            del self.rows[row]

    def clear(self) -> None:
        self.rows = {}

    resume = release = clear

    def copy(self, source: int, target: int, length: int) -> None:
        self.rows[target] = copy.deepcopy(self.rows.get(source))

    def export(self, row: int, length: int) -> Exported:
        return Exported(copy.deepcopy(self.rows[row]), _num_bytes(self.rows[row]))

    def restore(self, row: int, exported: Exported, length: int) -> None:
        self.rows[row] = copy.deepcopy(exported.content)


def _tensors(cache: Any) -> Iterator[tuple[Any, Any]]:
    """Where a cache holds tensors with a part for each sequence."""
    for holder in (cache, *getattr(cache, "layers", ())):
        fields = getattr(holder, "__dict__", {"": holder})
        for box in (fields, *(value for value in fields.values() if isinstance(value, dict | list))):
            for key, value in box.items() if isinstance(box, dict) else enumerate(box):
                if isinstance(value, torch.Tensor) and value.dim() > 1:
                    yield box, key


def _num_bytes(cache: Any) -> int:
    if isinstance(cache, torch.Tensor):
        return cache.nbytes
    return sum(box[key].nbytes for box, key in _tensors(cache))


class Survey:
    """What a pass through a model, in which it makes a cache, shows of its modules. Each token attends to itself."""

    def __init__(self, model: nn.Module, tokens: torch.Tensor) -> None:
        """tokens [1, T]. What the pass raises is kept as `error`."""
        self.shapes: list[tuple[int, int, int | None]] = []
        """(kv heads, head dim, sliding window) of each call of the attention function."""
        self.recurrent: dict[nn.Module, str] = {}
        """The innermost modules that leave tensors in the cache without calling the attention function, with the name
        of the argument that takes the cache."""
        self.cache: Any = None
        """As the model makes it: empty."""
        self.error: Exception | None = None
        self._begun: list[tuple[int, ...]] = []
        handles = [module.register_forward_pre_hook(self._enter, with_kwargs=True) for module in model.modules()]
        handles += [module.register_forward_hook(self._leave, with_kwargs=True) for module in model.modules()]
        try:
            with computing(self):
                model(input_ids=tokens, use_cache=True)
        except Exception as error:  # noqa: BLE001 - the model's code, used as it was not meant to be
            self.error = error
        finally:
            for handle in handles:
                handle.remove()

    def note(self, module: nn.Module, query: Any, key: Any, value: Any, scaling: Any, window: int | None) -> Any:
        """A call of the attention function."""
        note_scores(module, query, key, scaling)
        self.shapes.append((key.shape[1], max(key.shape[3], value.shape[3]), window))
        return value.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(1, 2).contiguous()

    def _counts(self, values: Iterable[Any]) -> tuple[int, ...]:
        caches = [value for value in values if isinstance(value, Cache)]
        if caches and self.cache is None:
            self.cache = copy.deepcopy(caches[0])
        return sum(len(list(_tensors(cache))) for cache in caches), len(self.shapes), len(self.recurrent)

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._begun.append(self._counts((*args, *kwargs.values())))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, _: Any) -> None:
        before, now = self._begun.pop(), self._counts((*args, *kwargs.values()))
        if now[0] > before[0] and now[1:] == before[1:]:
            bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            self.recurrent[module] = next(name for name, value in bound.items() if isinstance(value, Cache))

"""What sequences leave behind besides slots: the states of recurrent modules, or whole caches of transformers.

A recurrent module (a Mamba mixer, linear attention, a short convolution) reads a sequence in order. It carries a state
along in the cache that its forward takes. In a step it sees the sequences apart: decoding rows stacked [B, 1, ..], and
each chunk of a prompt by itself [1, L, ..]. All other modules see the step's tokens in one row [1, N, ..].

A state cannot go back: it serves only sequences that begin with all tokens that it has seen.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Cache

from arl.engine.local.adapters import LoadedAdapters
from arl.engine.local.slot_attention import Chunk, SlotCache, Survey, computing

_Boxes = list[tuple[Any, Any]]
"""Where a cache of transformers holds its tensors: (dict or list, key)."""


@dataclass(frozen=True, slots=True, eq=False)
class Exported:
    """A copy of a row."""

    content: Any
    nbytes: int


@dataclass(slots=True, eq=False)
class _Part:
    """Some of a step's tokens: one of each decoding row, or those of a chunk."""

    tokens: slice
    rows: slice
    cache: Cache
    is_decoding: bool = False
    boxes: _Boxes = field(default_factory=list[tuple[Any, Any]])
    """Those of the cache, if it began with states."""

    def of(self, value: Any, num_tokens: int) -> Any:
        """The part of an argument that belongs to these tokens, if it has one for each of the step's."""
        if type(value) in (tuple, list):
            return type(value)(self.of(item, num_tokens) for item in value)
        if not isinstance(value, torch.Tensor) or value.shape[:2] != (1, num_tokens):
            return value
        return value[:, self.tokens].transpose(0, 1) if self.is_decoding else value[:, self.tokens]

    def result(self, value: Any) -> Any:
        """[1, tokens, ..] of something that has a part for each token; else None."""
        num_tokens = self.tokens.stop - self.tokens.start
        shape = (num_tokens, 1) if self.is_decoding else (1, num_tokens)
        if not isinstance(value, torch.Tensor) or value.shape[:2] != shape:
            return None
        return value.transpose(0, 1) if self.is_decoding else value


class StateCache(SlotCache):
    """Slots, and the states of recurrent modules by row."""

    can_rewind = False

    def __init__(self, survey: ModelSurvey, goes_on: str, config: Any, adapters: LoadedAdapters, **slots: Any) -> None:
        """goes_on: with how many tokens of a prompt the modules go on from a state at once, "many" or "one"."""
        self._goes_on = goes_on
        self._kind, self._config, self._adapters = type(survey.cache), config, adapters
        self._states: list[torch.Tensor] = []
        """[rows, ..] for each tensor that a cache holds; modules change them in place."""
        self._used: Cache | None = None
        """A cache with all its states, for its structure."""
        self._spare: list[tuple[Cache, _Boxes]] = []
        self._parts: Sequence[_Part] = ()
        super().__init__(**slots)
        for module, name in survey.recurrent.items():
            module.forward = self._apart(module.forward, name)  # pyright: ignore[reportAttributeAccessIssue]

    def _new(self) -> Cache:
        try:
            return self._kind(config=self._config)  # pyright: ignore[reportCallIssue]
        except TypeError:
            return self._kind()

    # ---- a pass through the model -----------------------------------------------------------------------------

    @contextmanager
    def passing(self, positions: np.ndarray, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Recurrent modules compute a SlotBatch's tokens meanwhile. They go on from the states of its rows."""
        start = len(positions) - sum(chunk.length for chunk in chunks)
        parts = list[_Part]()
        if start:
            for row in np.flatnonzero(positions[:start] == 0).tolist():  # a prompt of one token
                for state in self._states:
                    state[row] = 0
            parts.append(self._from(slice(0, start), slice(0, start), len(parts)))
            parts[0].is_decoding = True
        for chunk in chunks:
            tokens, row = slice(start, start + chunk.length), slice(chunk.row, chunk.row + 1)
            start = tokens.stop
            if chunk.start == 0:
                parts.append(_Part(tokens, row, self._new()))
                continue
            part = self._from(tokens, row, len(parts))
            step = chunk.length if self._goes_on == "many" else 1
            firsts = range(tokens.start, tokens.stop, step)
            parts += [_Part(slice(first, first + step), row, part.cache, boxes=part.boxes) for first in firsts]
        self._parts = parts
        try:
            yield
        finally:
            self._parts = ()
        for part in parts:
            self._keep(part)

    def _from(self, tokens: slice, rows: slice, number: int) -> _Part:
        """The part of a pass with this number, which goes on from the states of its rows."""
        while len(self._spare) <= number:
            cache = copy.deepcopy(self._used)
            if cache is None:
                raise RuntimeError("decoding came before any prompt")
            self._spare.append((cache, list(_tensors(cache))))
        cache, boxes = self._spare[number]
        for (box, key), state in zip(boxes, self._states, strict=True):
            box[key] = state[rows]
        return _Part(tokens, rows, cache, boxes=boxes)

    def _keep(self, part: _Part) -> None:
        boxes = part.boxes or list(_tensors(part.cache))
        if self._used is None:
            self._used = copy.deepcopy(part.cache)
            with torch.inference_mode(False):
                self._states = [box[key].new_zeros(self.num_rows, *box[key].shape[1:]) for box, key in boxes]
        for (box, key), state in zip(boxes, self._states, strict=True):
            if box[key].data_ptr() != state[part.rows].data_ptr():
                state[part.rows] = box[key]

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
        self._states, self._spare = [state.new_zeros(0, *state.shape[1:]) for state in self._states], []

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

    def __init__(self, goes_on: str) -> None:
        """goes_on: as in a StateCache, or "never": rows are the tokens so far."""
        self.goes_on = goes_on
        self.rows: dict[int, Any] = {}

    def runs(self, positions: Sequence[int], chunks: Sequence[Chunk]) -> list[Chunk]:
        """The tokens of a step, in their order, by passes through the model."""
        num_decoding = len(positions) - sum(chunk.length for chunk in chunks)
        runs = [Chunk(row=row, start=positions[row], length=1) for row in range(num_decoding)]
        for chunk in chunks:
            size = 1 if self.goes_on == "one" and chunk.start else chunk.length
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


@dataclass(slots=True, eq=False)
class ModelSurvey(Survey):
    """What a pass through a model shows of it."""

    recurrent: dict[nn.Module, str] = field(default_factory=dict[nn.Module, str])
    """The innermost modules that leave tensors in a cache without calling the attention function, and the argument by
    which they take it."""
    cache: Any = None
    """The cache that the model made."""
    error: Exception | None = None
    """What the pass raised."""

    @classmethod
    def of(cls, model: nn.Module, run: Callable[[], object]) -> ModelSurvey:
        """run: makes a pass through the model, in which the model makes a cache."""
        survey = cls()
        begun: list[tuple[int, int, int]] = []

        def counts(args: Any, kwargs: Any) -> tuple[int, int, int]:
            caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
            survey.cache = caches[0] if caches else survey.cache
            return sum(1 for cache in caches for _ in _tensors(cache)), len(survey.shapes), len(survey.recurrent)

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            begun.append(counts(args, kwargs))

        def leave(module: nn.Module, args: Any, kwargs: Any, _: Any) -> None:
            (tensors, *others), (tensors_now, *others_now) = begun.pop(), counts(args, kwargs)
            if tensors_now > tensors and others_now == others:
                bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
                survey.recurrent[module] = next(name for name, value in bound.items() if isinstance(value, Cache))

        handles = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in model.modules()]
        handles += [module.register_forward_hook(leave, with_kwargs=True) for module in model.modules()]
        try:
            with computing(survey):
                run()
        except Exception as error:  # noqa: BLE001 - the model's code, used as it was not meant to be
            survey.error = error
        finally:
            for handle in handles:
                handle.remove()
        return survey

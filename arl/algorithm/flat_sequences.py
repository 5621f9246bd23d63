"""Sequences end to end: how batches, packing and train engines hold many TrainSequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import torch

from arl.api.images import PlacedImage
from arl.api.routed_experts import Routes
from arl.api.sampling_mask import KeptIds
from arl.api.train_engine import TOKEN_FIELDS, TrainSequence
from arl.api.types import Arrays

TENSORS = ("token_ids", "loss_mask", *TOKEN_FIELDS)
"""The fields of TrainSequence that are tensors."""

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatSequences(Sequence[TrainSequence]):
    """S sequences of T tokens together. Reading one gives views. It pickles as arrays, which Ray sends as they are."""

    lengths: tuple[int, ...]
    """[S] Tokens of each sequence."""
    columns: Mapping[str, torch.Tensor]
    """[T] for each of TENSORS, on the CPU. Fields that are not known yet may share their zeros."""
    temperatures: tuple[float, ...]
    """[S]"""
    units: tuple[int, ...]
    """[S]"""
    kept_ids: KeptIds | None = None
    """[T] What each token was sampled among; None: all among the whole vocabulary."""
    routes: Routes | None = None
    """[T] Which experts compute each token; None: those that the model's routers choose."""
    images: tuple[tuple[PlacedImage, ...], ...] = ()
    """[S] The images of each sequence, placed among its own tokens; empty: none has any."""
    arrays: tuple[Arrays, ...] = ()
    """[S] The arrays of each sequence, of a model of another kind; empty: none has any."""

    @classmethod
    def of(cls, sequences: Sequence[TrainSequence]) -> FlatSequences:
        if isinstance(sequences, FlatSequences):
            return sequences
        nothing = TrainSequence(token_ids=torch.zeros(0, dtype=torch.int64), loss_mask=torch.zeros(0, dtype=torch.bool))
        rows = sequences or [nothing]
        return cls(
            lengths=tuple(len(sequence) for sequence in sequences),
            columns={name: torch.cat([getattr(row, name) for row in rows]) for name in TENSORS},
            temperatures=tuple(sequence.temperature for sequence in sequences),
            units=tuple(sequence.unit for sequence in sequences),
            kept_ids=KeptIds.joined([len(s) if s.kept_ids is None else s.kept_ids for s in sequences]),
            routes=Routes.joined([len(s) if s.routes is None else s.routes for s in sequences]),
            images=unless_empty(s.images for s in sequences),
            arrays=unless_empty(s.arrays for s in sequences),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        places = range(len(self))[index]
        if isinstance(places, range):
            return [self[place] for place in places]
        start, stop = self.starts[places : places + 2].tolist()
        columns = {name: column[start:stop] for name, column in self.columns.items()}
        return TrainSequence(
            **columns,
            temperature=self.temperatures[places],
            unit=self.units[places],
            kept_ids=self.kept_ids and self.kept_ids.take(slice(start, stop)),
            routes=self.routes and self.routes.take(slice(start, stop)),
            images=self.images[places] if self.images else (),
            arrays=self.arrays[places] if self.arrays else {},
        )

    def __reduce__(self) -> tuple[Any, ...]:
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return _from_arrays, (own | {"columns": of_each(self.columns, torch.Tensor.numpy)},)

    @property
    def token_ids(self) -> torch.Tensor:
        return self.columns["token_ids"]

    @property
    def loss_mask(self) -> torch.Tensor:
        return self.columns["loss_mask"]

    @property
    def num_bytes(self) -> int:
        records = sum(record.num_bytes for record in (self.kept_ids, self.routes) if record)
        files = {placed.image: len(placed.image.data) for images in self.images for placed in images}
        return records + sum(files.values()) + sum({id(c): c.nbytes for c in self.columns.values()}.values())

    @cached_property
    def starts(self) -> torch.Tensor:
        """int64[S + 1]: where each sequence's tokens begin, and T."""
        return torch.tensor((0, *self.lengths)).cumsum(0)

    def places(self, indices: Sequence[int]) -> torch.Tensor:
        """int64: where the tokens of these sequences lie, end to end."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        return runs(self.starts[chosen], self.starts[chosen + 1] - self.starts[chosen])

    def take(self, indices: Sequence[int]) -> FlatSequences:
        """The sequences with these indices."""
        if list(indices) == list(range(len(self))):
            return self
        places = self.places(indices)
        return FlatSequences(
            lengths=tuple(self.lengths[i] for i in indices),
            columns=of_each(self.columns, lambda column: column[places]),
            temperatures=tuple(self.temperatures[i] for i in indices),
            units=tuple(self.units[i] for i in indices),
            kept_ids=self.kept_ids and self.kept_ids.take(places.numpy()),
            routes=self.routes and self.routes.take(places.numpy()),
            images=tuple(self.images[i] for i in indices) if self.images else (),
            arrays=tuple(self.arrays[i] for i in indices) if self.arrays else (),
        )


def unless_empty(records: Iterable[_Given]) -> tuple[_Given, ...]:
    """[N] The records, such as images; empty if all are empty."""
    found = tuple(records)
    return found if any(found) else ()


def of_each(columns: Mapping[str, _Given], change: Callable[[_Given], _Made]) -> dict[str, _Made]:
    """Applies `change` to each column. Fields that share a column still share the result."""
    distinct = {id(column): column for column in columns.values()}
    made = {key: change(column) for key, column in distinct.items()}
    return {name: made[id(column)] for name, column in columns.items()}


def runs(begins: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """int64: begins[0], .., begins[0] + counts[0] - 1, begins[1], and so on."""
    shifts = begins - (counts.cumsum(0) - counts)
    places = shifts.repeat_interleave(counts)
    return places + torch.arange(len(places))


def _from_arrays(own: dict[str, Any]) -> FlatSequences:
    """The tensors are copies, because arrays in Ray's shared memory are read-only."""
    columns: Any = of_each(own["columns"], lambda array: torch.from_numpy(array.copy()))
    return FlatSequences(**own | {"columns": columns})

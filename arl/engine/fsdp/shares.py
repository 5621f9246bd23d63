"""How a minibatch is divided over data-parallel ranks, and the compact form in which a share travels to its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from arl.algorithm.packing import balanced_shares
from arl.api.types import TrainSequence

_NAMES = tuple(field.name for field in fields(TrainSequence))


def divide(sequences: Sequence[TrainSequence], num_shares: int, *, share_prefixes: bool) -> list[list[int]]:
    """Indices into `sequences` in shares that forward nearly equal numbers of tokens; a share may be empty.

    Sequences without a trained token are in none of them: there is nothing to compute for them.
    """
    trained = [i for i, sequence in enumerate(sequences) if sequence.loss_mask.any()]
    shares = balanced_shares([sequences[i] for i in trained], num_shares, share_prefixes=share_prefixes)
    return [[trained[i] for i in share] for share in shares]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequences:
    """Sequences end to end: one array for each field of TrainSequence, which travels without being pickled.

    lengths: tokens of each sequence. per_token: field -> array[sum(lengths)]. per_sequence: field -> a value for each.
    """

    lengths: list[int]
    per_token: dict[str, np.ndarray]
    per_sequence: dict[str, list[Any]]

    @classmethod
    def of(cls, sequences: Sequence[TrainSequence]) -> PackedSequences:
        values = {name: [getattr(sequence, name) for sequence in sequences] for name in _NAMES if sequences}
        is_tensor = {name: isinstance(column[0], torch.Tensor) for name, column in values.items()}
        return cls(
            lengths=[len(sequence) for sequence in sequences],
            per_token={name: torch.cat(values[name]).numpy() for name in values if is_tensor[name]},
            per_sequence={name: values[name] for name in values if not is_tensor[name]},
        )

    def unpack(self) -> list[TrainSequence]:
        """The sequences, as views of tensors of their own: what arrives through shared memory is read-only."""
        columns: dict[str, Sequence[Any]] = {
            name: torch.from_numpy(array.copy()).split(self.lengths) for name, array in self.per_token.items()
        }
        return [TrainSequence(**row) for row in _rows(columns | self.per_sequence, len(self.lengths))]


def _rows(columns: dict[str, Sequence[Any]], count: int) -> Iterator[dict[str, Any]]:
    return ({name: column[i] for name, column in columns.items()} for i in range(count))

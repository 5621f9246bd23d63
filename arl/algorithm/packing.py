"""Grouping of sequences: into microbatches under a token budget, and into balanced shares for data-parallel ranks.

Both count forwarded tokens and never split a unit. They depend on token ids and units alone: all ranks group alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arl.algorithm.prefix_tree import PrefixOrder, prefix_order
from arl.api.types import TrainSequence

_TOLERANCE = 0.01
"""The relative precision of the search for the smallest budget."""


def pack(order: PrefixOrder, budget: int, units: Sequence[int] = ()) -> list[list[int]]:
    """Bins of the order's indices that forward at most `budget` tokens each; a larger sequence or unit gets its own.

    units[i]: the unit of the order's index i. Sequences of one unit >= 0 are one piece; any other sequence is one.

    Packing goes from the leaves of the radix tree to its root. The pieces below a node are packed first-fit-decreasing
    (Johnson 1973: at most 11/9 of the fewest possible bins, plus one) into bins that hold the node's own prefix once.
    Pieces that fit into one bin stay together from there on. A family that does not fit is cut, and its smallest part
    is packed with others. Indices within a bin are ascending, and so are the bins by their first index.
    """
    if budget < 1:
        raise ValueError(f"the token budget is {budget}; it must be at least 1")
    return sorted(sorted(piece.indices) for piece in _bins(_Parts.of(order, units), budget))


def balanced_shares(
    sequences: Sequence[TrainSequence], num_shares: int, *, share_prefixes: bool = True
) -> list[list[int]]:
    """Split the indices of `sequences` into `num_shares` shares that forward nearly equal numbers of tokens.

    The shares are the bins of the smallest budget that needs at most `num_shares` bins (MULTIFIT: Coffman, Garey &
    Johnson 1978; without shared prefixes at most 13/11 of the smallest possible maximum). A family is cut only if it is
    too large. Indices within a share are ascending. A share may be empty.
    """
    if num_shares < 1:
        raise ValueError(f"num_shares is {num_shares}; it must be at least 1")
    order = prefix_order(sequences, share_prefixes=share_prefixes)
    parts = _Parts.of(order, [sequence.unit for sequence in sequences])
    too_small, enough = 0.0, float(parts.num_tokens)
    while enough - too_small > enough * _TOLERANCE:
        budget = (too_small + enough) / 2
        if len(_bins(parts, budget)) > num_shares:
            too_small = budget
        else:
            enough = budget
    bins = [sorted(piece.indices) for piece in _bins(parts, enough)]
    return bins + [[]] * (num_shares - len(bins))


@dataclass(frozen=True, slots=True)
class _Piece:
    num_tokens: int
    """That they forward."""
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Parts:
    """Units of several sequences, which are never cut, and the order of all others."""

    units: tuple[_Piece, ...]
    others: PrefixOrder

    @classmethod
    def of(cls, order: PrefixOrder, units: Sequence[int]) -> _Parts:
        members: dict[int, list[int]] = {}
        for index in sorted(order.indices):
            if units and units[index] >= 0:
                members.setdefault(units[index], []).append(index)
        several = [indices for indices in members.values() if len(indices) > 1]
        together = {index for indices in several for index in indices}
        return cls(
            tuple(_Piece(order.only(indices).num_tokens, tuple(indices)) for indices in several),
            order.only(set(order.indices) - together) if together else order,
        )

    @property
    def num_tokens(self) -> int:
        """An upper bound of the forwarded tokens: tokens that a unit shares with others count for each."""
        return sum(unit.num_tokens for unit in self.units) + self.others.num_tokens


def _bins(parts: _Parts, budget: float) -> list[_Piece]:
    return _first_fit_decreasing([*parts.units, *_families(parts.others, budget)], 0, budget)


def _families(order: PrefixOrder, budget: float) -> list[_Piece]:
    """Families, cut to the budget: bottom up, pieces below a node (a shared prefix) are joined if they fit."""
    depths = [0]  # of the nodes on the path from the root to the current sequence
    open_pieces: list[list[_Piece]] = [[]]  # that lie below each of them, and not below the next
    # A last entry that shares nothing closes all nodes.
    next_shared = (*order.shared[1:], 0)
    for index, length, shared in zip(order.indices, order.lengths, next_shared, strict=False):
        piece = [_Piece(length, (index,))]
        while depths[-1] > shared:
            piece = _first_fit_decreasing(open_pieces.pop() + piece, depths.pop(), budget)
        if depths[-1] < shared:
            depths.append(shared)
            open_pieces.append([])
        open_pieces[-1] += piece
    return open_pieces[0]


def _first_fit_decreasing(pieces: Sequence[_Piece], depth: int, budget: float) -> list[_Piece]:
    """Join pieces that share their first `depth` tokens, as long as they fit into the budget."""
    joined: list[list[_Piece]] = []
    room: list[float] = []
    for piece in sorted(pieces, key=lambda piece: (-piece.num_tokens, min(piece.indices))):
        own = piece.num_tokens - depth
        fit = next((b for b, left in enumerate(room) if left >= own), None)
        if fit is None:
            joined.append([piece])
            room.append(budget - piece.num_tokens)
        else:
            joined[fit].append(piece)
            room[fit] -= own
    return [_joined(parts, depth) for parts in joined]


def _joined(parts: Sequence[_Piece], depth: int) -> _Piece:
    num_tokens = depth + sum(part.num_tokens - depth for part in parts)
    return _Piece(num_tokens, tuple(index for part in parts for index in part.indices))

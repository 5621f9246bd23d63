"""Grouping of sequences: into microbatches under a token budget, and into balanced shares for data-parallel ranks.

Both count forwarded tokens and never split a unit. They depend on token ids and units alone: all ranks group alike.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from arl.algorithm.flat_sequences import FlatSequences
from arl.algorithm.prefix_tree import PrefixOrder, prefix_order
from arl.api.train_engine import TrainSequence

_TOLERANCE = 0.01
"""The relative precision of the search for the smallest budget."""
_FEW = 16
"""Up to this many pieces of a node are packed from scratch instead of being filled up."""


def pack(order: PrefixOrder, budget: int, units: Sequence[int] = ()) -> list[list[int]]:
    """Bins of the order's indices that forward at most `budget` tokens each, or as many as the largest piece has.

    units[i]: the unit of the order's index i. Sequences of one unit >= 0 are one piece, as is any other sequence. The
    largest piece needs its memory anyway. So the long branches of one episode, each above the budget, go together.

    Packing goes from the leaves of the radix tree to its root. The pieces below a node are packed best-fit-decreasing
    (Johnson 1973: at most 11/9 of the fewest possible bins, plus one) into bins that hold the node's own prefix once.
    Pieces that fit into one bin stay together from there on. A family that does not fit is cut, and its smallest part
    is packed with others. Indices within a bin are ascending, and so are the bins by their first index.
    The time is nearly linear in the number of sequences, however deep the tree is.
    """
    if budget < 1:
        raise ValueError(f"the token budget is {budget}; it must be at least 1")
    if order.num_tokens <= budget and len(order.indices):
        return [sorted(order.indices.tolist())]
    parts = _Parts.of(order, units)
    return sorted(sorted(piece.indices()) for piece in _bins(parts, max(budget, parts.largest)))


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
    flat = FlatSequences.of(sequences)
    parts = _Parts.of(prefix_order(flat, share_prefixes=share_prefixes), flat.units)
    too_small, enough = 0.0, float(parts.num_tokens)
    while enough - too_small > enough * _TOLERANCE:
        budget = (too_small + enough) / 2
        try:
            _bins(parts, budget, num_shares)
            enough = budget
        except _TooManyError:
            too_small = budget
    bins = [sorted(piece.indices()) for piece in reversed(_bins(parts, enough))]
    return bins + [[]] * (num_shares - len(bins))


class _TooManyError(Exception):
    """There are more bins than wanted."""


@dataclass(frozen=True, slots=True)
class _Piece:
    num_tokens: int
    """Tokens that its parts forward."""
    first: int
    """Its smallest index."""
    parts: tuple[_Piece | int, ...]
    """Pieces and indices; flattened only at the end, because pieces of a deep tree are joined again and again."""

    def indices(self) -> Iterable[int]:
        left: list[_Piece | int] = [self]
        while left:
            part = left.pop()
            if isinstance(part, _Piece):
                left += part.parts
            else:
                yield part


@dataclass(frozen=True, slots=True)
class _Parts:
    """Units of several sequences, which are never cut, and the order of all others."""

    units: tuple[_Piece, ...]
    others: PrefixOrder

    @classmethod
    def of(cls, order: PrefixOrder, units: Sequence[int]) -> _Parts:
        members: dict[int, list[int]] = {}
        for index, unit in enumerate(units):
            if unit >= 0:
                members.setdefault(unit, []).append(index)
        several = [indices for indices in members.values() if len(indices) > 1]
        together = {index for indices in several for index in indices}
        return cls(
            tuple(_Piece(order.only(indices).num_tokens, indices[0], tuple(indices)) for indices in several),
            order.only(set(order.indices.tolist()) - together) if together else order,
        )

    @property
    def num_tokens(self) -> int:
        """An upper bound of the forwarded tokens: tokens that a unit shares with others count for each."""
        return sum(unit.num_tokens for unit in self.units) + self.others.num_tokens

    @property
    def largest(self) -> int:
        """Tokens of the largest sequence or unit, which no budget cuts."""
        return max((*(unit.num_tokens for unit in self.units), *self.others.lengths.tolist()), default=0)


def _bins(parts: _Parts, budget: float, most: float = inf) -> list[_Piece]:
    """Raises _TooManyError as soon as more than `most` bins are certain."""
    return _best_fit_decreasing(
        [*([unit] for unit in parts.units), *_families(parts.others, budget, most)], 0, budget, most
    )


def _families(order: PrefixOrder, budget: float, most: float) -> list[list[_Piece]]:
    """Families, cut to the budget: bottom up, pieces below a node (a shared prefix) are joined if they fit."""
    depths = [0]  # of the nodes on the path from the root to the current sequence
    children: list[list[list[_Piece]]] = [[]]  # for each of these nodes, the pieces of its complete children
    # A last entry that shares nothing closes all nodes.
    columns = order.indices.tolist(), order.lengths.tolist(), [*order.shared[1:].tolist(), 0]
    for index, length, shared in zip(*columns, strict=False):
        pieces = [_Piece(length, index, (index,))]
        while depths[-1] > shared:
            pieces = _best_fit_decreasing([*children.pop(), pieces], depths.pop(), budget, most)
        if depths[-1] < shared:
            depths.append(shared)
            children.append([])
        children[-1].append(pieces)
    return children[0]


def _best_fit_decreasing(
    children: Sequence[list[_Piece]], depth: int, budget: float, most: float = inf
) -> list[_Piece]:
    """Join pieces that share their first `depth` tokens, as long as they fit into the budget; the fullest come last.

    No two pieces of one child fit together: they did not fit below, where they share more. So if a child has many, the
    pieces of the others fill them up in place. The pieces here need at least as many bins in the end.
    """
    largest = max(range(len(children)), key=lambda i: len(children[i]), default=0)
    bins = children[largest] if children else []
    others = [piece for i, pieces in enumerate(children) for piece in pieces if i != largest]
    if len(bins) <= _FEW + 2 * len(others):
        bins, others = [], [*bins, *others]
    for piece in sorted(others, key=lambda piece: (-piece.num_tokens, piece.first)):
        place = bisect_right(bins, budget - (piece.num_tokens - depth), key=lambda bin: bin.num_tokens) - 1
        joined = _joined(bins.pop(place), piece, depth) if place >= 0 else piece
        insort(bins, joined, key=lambda bin: (bin.num_tokens, -bin.first))
    if len(bins) > most:
        raise _TooManyError
    return bins


def _joined(one: _Piece, other: _Piece, depth: int) -> _Piece:
    return _Piece(one.num_tokens + other.num_tokens - depth, min(one.first, other.first), (one, other))

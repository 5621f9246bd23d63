"""How sequences are grouped: into microbatches under a token budget, and into balanced shares for data-parallel ranks.

Both count the tokens that are forwarded, so they keep together what shares a prefix. Both are deterministic functions
of the token ids alone, so every rank and every rerun groups alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from arl.algorithm.prefix_tree import PrefixOrder, prefix_order
from arl.api.types import TrainSequence

_CUTS = (1, 2, 4, 8)
"""Into how many pieces of a rank's share families are cut, coarsest first, when shares are balanced."""


def pack(order: PrefixOrder, budget: int) -> list[list[int]]:
    """Bins of the order's indices that forward at most `budget` tokens each; one longer than that gets its own bin.

    From the leaves of the radix tree to its root, what lies below a node is packed first-fit-decreasing (Johnson 1973:
    at most 11/9 of the fewest possible bins, plus one) into bins that hold the node's own prefix once. What fits into
    one bin stays together from there on; a family that does not fit is cut, and its smallest part packed on with
    others. Indices within a bin are ascending, and so are the bins by their first index.
    """
    if budget < 1:
        raise ValueError(f"the token budget is {budget}; it must be at least 1")
    return sorted(sorted(item.indices) for item in _pieces(order, budget))


def balanced_shares(
    sequences: Sequence[TrainSequence], num_shares: int, *, share_prefixes: bool = True
) -> list[list[int]]:
    """Indices into `sequences` in `num_shares` shares that forward nearly equal numbers of tokens; some may be empty.

    share_prefixes: whether the tokens that sequences begin with are forwarded once in each share, as
    TrainConfig.share_prefixes says. Families stay together as far as balance allows: they are cut into ever smaller
    pieces, each time dealt out largest first to the share with the fewest tokens (Graham 1969: at most 4/3 of the
    smallest possible maximum for the pieces), and of these the split with the smallest largest share is taken.
    Indices within a share are ascending.
    """
    if num_shares < 1:
        raise ValueError(f"num_shares is {num_shares}; it must be at least 1")
    order = prefix_order(sequences, share_prefixes=share_prefixes)
    ideal = order.num_tokens / num_shares
    budgets = [max(int(ideal / cut), 1) for cut in _CUTS] + [1]
    splits = [_dealt(_pieces(order, budget), num_shares) for budget in budgets]
    # min takes the first of equals: the one that cuts least.
    best = min(splits, key=lambda shares: max(order.only(share).num_tokens for share in shares))
    return [sorted(share) for share in best]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Sequences that stay together: the tokens that they forward, and their indices."""

    num_tokens: int
    indices: tuple[int, ...]


def _pieces(order: PrefixOrder, budget: int) -> list[_Piece]:
    """Bottom up over the radix tree: what each node's pieces become, until those of the root are left."""
    depths = [0]  # of the nodes on the path from the root to the current sequence
    open_pieces: list[list[_Piece]] = [[]]  # that lie below each of them, and not below the next
    # Beyond the last sequence lies one that shares nothing, which closes all nodes.
    next_shared = (*order.shared[1:], 0)
    for index, length, shared in zip(order.indices, order.lengths, next_shared, strict=False):
        piece = [_Piece(length, (index,))]
        while depths[-1] > shared:
            piece = _first_fit_decreasing(open_pieces.pop() + piece, depths.pop(), budget)
        if depths[-1] < shared:
            depths.append(shared)
            open_pieces.append([])
        open_pieces[-1] += piece
    return _first_fit_decreasing(open_pieces[0], 0, budget)


def _first_fit_decreasing(pieces: Sequence[_Piece], depth: int, budget: int) -> list[_Piece]:
    """Join pieces that have their first `depth` tokens in common, as long as they fit into the budget."""
    joined: list[list[_Piece]] = []
    room: list[int] = []
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


def _dealt(pieces: Sequence[_Piece], num_shares: int) -> list[list[int]]:
    """Longest first, each to the share with the fewest tokens."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [(0, share) for share in range(num_shares)]
    for piece in sorted(pieces, key=lambda piece: (-piece.num_tokens, min(piece.indices))):
        load, share = heapq.heappop(loads)
        shares[share].extend(piece.indices)
        heapq.heappush(loads, (load + piece.num_tokens, share))
    return shares

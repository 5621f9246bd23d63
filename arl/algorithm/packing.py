"""How sequences are grouped: into microbatches under a token budget, and into balanced shares for data-parallel ranks.

Both are deterministic functions of the lengths alone, so every rank and every rerun groups alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of indices into `lengths`, each of at most `budget` tokens; one longer than that gets a bin of its own.

    First-fit-decreasing (Johnson 1973): at most 11/9 of the fewest possible bins, plus one. Indices within a bin are
    ascending, and so are the bins by their first index.
    """
    if budget < 1:
        raise ValueError(f"the token budget is {budget}; it must be at least 1")
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fit = next((b for b, left in enumerate(room) if left >= lengths[index]), None)
        if fit is None:
            bins.append([index])
            room.append(budget - lengths[index])
        else:
            bins[fit].append(index)
            room[fit] -= lengths[index]
    return sorted(sorted(members) for members in bins)


def balanced_shards(lengths: Sequence[int], num_shards: int) -> list[list[int]]:
    """Indices into `lengths` in `num_shards` shares of nearly equal token counts; a share may be empty.

    Longest first, each to the share with the fewest tokens (Graham 1969: at most 4/3 of the smallest possible
    maximum). Indices within a share are ascending.
    """
    if num_shards < 1:
        raise ValueError(f"num_shards is {num_shards}; it must be at least 1")
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    loads = [(0, shard) for shard in range(num_shards)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, shard = heapq.heappop(loads)
        shards[shard].append(index)
        heapq.heappush(loads, (load + lengths[index], shard))
    return [sorted(shard) for shard in shards]

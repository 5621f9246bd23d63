"""Shared prefixes: the radix tree of sequences, kept as its depth-first order, and its layout in a packed row.

    order of sequences       a b c d          a b c e f        a b g          row:  a b c d e f g
    shared with the last     0                3                2              attached:       2 1

In depth-first order, a sequence shares as many tokens with the one before it as with any earlier one. So the order and
these numbers describe the whole tree, and a sequence adds to the row the tokens after its shared ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from arl.algorithm.flat_sequences import FlatSequences
from arl.api.images import Image
from arl.api.train_engine import TrainSequence

MIN_SHARED_TOKENS = 8
"""Shorter common beginnings are forwarded once for each sequence: separate attention costs more than it saves. Those
that are at least half of a sequence are shared all the same, as many such sequences are one block of attention."""
_TILE = 256
"""The most tokens of several stretches that are one masked block of attention."""
_WASTED = 1024
"""A stretch joins the tile before it if at most this many of its tokens times the tile's are masked in vain."""

Run = tuple[int, int]
"""(start, stop) of neighbouring tokens in a packed row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixOrder:
    """Some sequences in the depth-first order of their radix tree."""

    indices: torch.Tensor
    """int64: the index of the k-th sequence."""
    lengths: torch.Tensor
    """int64: the number of its tokens."""
    shared: torch.Tensor
    """int64: how many first tokens it shares with the sequence before it; 0 for the first sequence."""

    @classmethod
    def unshared(cls, lengths: Sequence[int] | torch.Tensor) -> PrefixOrder:
        """The given order, without sharing."""
        lengths = torch.as_tensor(lengths, dtype=torch.int64)
        return cls(indices=torch.arange(len(lengths)), lengths=lengths, shared=torch.zeros_like(lengths))

    @classmethod
    def of(cls, sequences: Sequence[npt.ArrayLike], min_shared: int = MIN_SHARED_TOKENS) -> PrefixOrder:
        """Sort token ids, int64[T_i] of each sequence, by their prefixes. Common prefixes below `min_shared` tokens
        count as none, unless they are at least half of the sequence."""
        arrays = [np.asarray(tokens) for tokens in sequences]
        keys = [array.tobytes() for array in arrays]  # any order of the tokens will do, and bytes are fast
        indices = sorted(range(len(keys)), key=keys.__getitem__)
        shared = [0] * len(indices)
        for k in range(1, len(indices)):
            one, other = arrays[indices[k - 1]], arrays[indices[k]]
            length = min(len(one), len(other))
            first = int(np.argmax(one[:length] != other[:length])) if length else 0
            common = first if length and one[first] != other[first] else length
            shared[k] = common if common >= min_shared or 2 * common >= len(arrays[indices[k]]) else 0
        columns = (torch.tensor(c, dtype=torch.int64) for c in (indices, [len(arrays[i]) for i in indices], shared))
        return cls(**dict(zip(("indices", "lengths", "shared"), columns, strict=True)))

    @property
    def num_tokens(self) -> int:
        """Tokens to forward."""
        return int((self.lengths - self.shared).sum())

    def only(self, indices: Collection[int]) -> PrefixOrder:
        """The order of some of the sequences. Two of them share as much as all neighbours between them share."""
        is_kept = torch.isin(self.indices, torch.tensor(list(indices), dtype=torch.int64))
        num_before = is_kept.cumsum(0) - is_kept.long()
        least = torch.zeros(int(is_kept.sum()) + 1, dtype=torch.int64)
        least.scatter_reduce_(0, num_before, self.shared, "amin", include_self=False)
        return PrefixOrder(indices=self.indices[is_kept], lengths=self.lengths[is_kept], shared=least[:-1])

    def renumbered(self, indices: Sequence[int]) -> PrefixOrder:
        """`only` some sequences, with their places in the ascending `indices` as their new ones."""
        some = self.only(indices) if len(indices) < len(self.indices) else self
        numbers = torch.searchsorted(torch.tensor(indices, dtype=torch.int64), some.indices)
        return PrefixOrder(indices=numbers, lengths=some.lengths, shared=some.shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRange:
    """The tokens [start, stop) of a packed row. Each follows the one before it and attends to it causally."""

    start: int
    stop: int
    depth: int = 0
    """How many tokens of the row before it belong to the same sequences: its context."""

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Queries and keys of a row that attend to each other: all to all, causally, or under a mask."""

    queries: Run
    keys: Run
    is_causal: bool = False
    mask: torch.Tensor | None = None
    """float32[queries, keys]: 0 where the query sees the key, else minus infinity."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowPlan:
    """A packed row in which every node of the radix tree lies once, in depth-first order.

    Each sequence adds a run of its own to the row: its tokens after those that it shares with earlier ones.
    """

    order: PrefixOrder
    begins: torch.Tensor
    """int64: where the run of the order's k-th sequence begins."""
    parents: torch.Tensor
    """int64: the number of the sequence with the last token that the k-th shares; its own if it shares none."""
    stretches: tuple[StepRange, ...]
    """The row, from left to right. A node's first child continues its stretch; further children begin new ones."""
    closed: tuple[tuple[int, int, int], ...]
    """The row in pieces (start, stop, end), from left to right: the subtrees of all tokens of a piece stop at `end`."""

    @classmethod
    def of(cls, order: PrefixOrder) -> RowPlan:
        """In time proportional to the number of sequences, however deep the tree is."""
        lengths, shared = order.lengths.tolist(), order.shared.tolist()
        path: list[tuple[int, int, int]] = []  # (sequence, start, stop): the runs of the row with the current tokens
        begins: list[int] = []
        parents: list[int] = []
        starts: list[tuple[int, int]] = []  # of stretches, with their depths
        closed: list[tuple[int, int, int]] = []
        end = 0
        # A last sequence that shares nothing closes all pieces.
        for k, (length, common) in enumerate(zip([*lengths, 0], [*shared, 0], strict=True)):
            while path:
                owner, start, stop = path.pop()
                kept = start + max(common - shared[owner], 0)
                if kept < stop:
                    closed.append((kept, stop, end))
                if kept > start:
                    path.append((owner, start, min(kept, stop)))
                    break
            begins.append(end)
            parents.append(path[-1][0] if path else k)
            if length > common:
                if not path or path[-1][2] != end:
                    starts.append((end, common))
                path.append((k, end, end + length - common))
                end += length - common
        stops = [*(start for start, _ in starts[1:]), end]
        stretches = [StepRange(start=a, stop=b, depth=depth) for (a, depth), b in zip(starts, stops, strict=False)]
        return cls(
            order=order,
            begins=torch.tensor(begins[:-1], dtype=torch.int64),
            parents=torch.tensor(parents[:-1], dtype=torch.int64),
            stretches=tuple(stretches),
            closed=tuple(sorted(closed)),
        )

    @property
    def num_tokens(self) -> int:
        return self.stretches[-1].stop if self.stretches else 0

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64[T]: for each token of the row, the number of tokens before it in its sequences."""
        columns = [(s.depth - s.start, s.num_tokens) for s in self.stretches]
        shifts, sizes = torch.tensor(columns, dtype=torch.int64).view(-1, 2).T
        return torch.arange(self.num_tokens) + shifts.repeat_interleave(sizes)

    @cached_property
    def subtree_stops(self) -> torch.Tensor:
        """int64[T]: for each token, the place after the last token of its subtree. q sees k when k <= q < stops[k]."""
        starts, stops, ends = torch.tensor(self.closed, dtype=torch.int64).view(-1, 3).T
        return ends.repeat_interleave(stops - starts)

    def places(self, numbers: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64[M]: the place in the row of the token at positions[i] of the order's sequence numbers[i]."""
        owners, shared = numbers, self.order.shared
        # The owner is the nearest ancestor with at most `position` shared tokens; jumps double in length.
        jumps = [self.parents]
        while not torch.equal(further := jumps[-1][jumps[-1]], jumps[-1]):
            jumps.append(further)
        for jump in reversed(jumps):
            owners = torch.where(shared[jump[owners]] > positions, jump[owners], owners)
        owners = torch.where(shared[owners] > positions, self.parents[owners], owners)
        return self.begins[owners] + positions - shared[owners]

    @cached_property
    def apart(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The order's N sequences each by itself, padded to the longest, L: int64[N, L], the place in the row of each
        token, and again of the last one as padding; int64[T], where each token of the row lies among the N * L."""
        lengths, shared = self.order.lengths, self.order.shared
        size = int(lengths.max())
        numbers = torch.arange(len(lengths))
        positions = torch.minimum(torch.arange(size), lengths[:, None] - 1)
        places = self.places(numbers.repeat_interleave(size), positions.flatten())
        owners = numbers.repeat_interleave(lengths - shared)
        found = torch.arange(self.num_tokens) + (numbers * size + shared - self.begins)[owners]
        return places.view(-1, size), found

    def context(self, steps: StepRange) -> torch.Tensor:
        """int64[depth]: the places of the tokens before the stretch that it sees, in order."""
        if not steps.depth:
            return self.subtree_stops[:0]
        return (self.subtree_stops[: steps.start] > steps.start).nonzero()[:, 0]

    def blocks(self) -> list[Block]:
        """The blocks of attention: tiles of the row to themselves, then runs of keys to the later queries below them.

        The blocks overlap nowhere, and the first ones hold each query once.
        """
        blocks: list[Block] = []
        for start, stop, num_stretches in self._tiles():
            run = (start, stop)
            if num_stretches == 1:
                blocks.append(Block(queries=run, keys=run, is_causal=True))
                continue
            place = torch.arange(start, stop)
            is_seen = (place <= place[:, None]) & (place[:, None] < self.subtree_stops[start:stop])
            mask = torch.zeros(is_seen.shape).masked_fill_(~is_seen, -torch.inf)
            blocks.append(Block(queries=run, keys=run, mask=mask))
        # Everything below a piece lies right of it in one piece, and its tile has the first part already.
        tile, keys, queries, tile_stops = 0, (0, 0), (0, 0), [block.queries[1] for block in blocks]
        for start, stop, end in self.closed:
            while tile_stops[tile] <= start:
                tile += 1
            seen_by = (tile_stops[tile], end)
            if keys[1] == start and queries == seen_by:
                keys = (keys[0], stop)
                continue
            if queries[0] < queries[1]:
                blocks.append(Block(queries=queries, keys=keys))
            keys, queries = (start, stop), seen_by
        if queries[0] < queries[1]:
            blocks.append(Block(queries=queries, keys=keys))
        return blocks

    def _tiles(self) -> Iterator[tuple[int, int, int]]:
        """(start, stop, number of stretches) of each tile, from left to right."""
        start, count = 0, 0
        for i, steps in enumerate(self.stretches):
            width = steps.start - start
            if i and (steps.stop - start > _TILE or width * steps.num_tokens > _WASTED):
                yield start, steps.start, count
                start, count = steps.start, 0
            count += 1
        if count:
            yield start, self.num_tokens, count


def last_trained(sequences: Sequence[TrainSequence]) -> torch.Tensor:
    """int64[N]: the place of each sequence's last trained token; -1 without one."""
    flat = FlatSequences.of(sequences)
    trained = flat.loss_mask.nonzero()[:, 0]
    found = torch.cat([torch.tensor([-1]), trained])[torch.searchsorted(trained, flat.starts[1:])] - flat.starts[:-1]
    return found.clamp(min=-1)


def needed_tokens(sequences: Sequence[TrainSequence]) -> list[npt.NDArray[np.int64]]:
    """int64[at least 1] each: the tokens before the last trained one. By causality no others matter.

    Numbers are equal where one computation serves both tokens, if it does for those before them: they are the token
    ids, but an image's placeholders have numbers of their own, and with routes they number the pairs of id and routes.
    """
    flat = FlatSequences.of(sequences)
    starts, stops = flat.starts.tolist(), (flat.starts[:-1] + last_trained(flat).clamp(min=1)).tolist()
    tokens = flat.token_ids.numpy()
    if flat.images:
        tokens, of_images = tokens.copy(), dict[Image, int]()
        for start, images in zip(starts, flat.images, strict=False):
            for placed in images:
                # The number names the image and the place within it. Token ids are below 2^31.
                first = of_images.setdefault(placed.image, len(of_images) + 1) << 32
                own = np.arange(first, first + placed.stop - placed.start)
                tokens[start + placed.start : start + placed.stop] = own
    if flat.routes is not None:
        numbers: dict[tuple[int, bytes], int] = {}
        pairs = zip(tokens.tolist(), flat.routes.keys(), strict=True)
        tokens = np.array([numbers.setdefault(pair, len(numbers)) for pair in pairs], np.int64)
    return [tokens[start:stop] for start, stop in zip(starts, stops, strict=False)]


def prefix_order(sequences: Sequence[TrainSequence], *, share_prefixes: bool = True) -> PrefixOrder:
    """The order in which the needed tokens share most; the given order without share_prefixes."""
    if not share_prefixes:
        return PrefixOrder.unshared(last_trained(sequences).clamp(min=1))
    return PrefixOrder.of(needed_tokens(sequences))

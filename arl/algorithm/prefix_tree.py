"""Shared prefixes: the radix tree of sequences, kept as its depth-first order, and its layout in a packed row.

    order of sequences       a b c d          a b c e f        a b g          row:  a b c d e f g
    shared with the last     0                3                2              attached:       2 1

In depth-first order, a sequence shares as many tokens with the one before it as with any earlier one. So the order and
these numbers describe the whole tree, and a sequence adds to the row the tokens after its shared ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from arl.api.types import TrainSequence

MIN_SHARED_TOKENS = 8
"""Shorter common beginnings are forwarded once for each sequence: separate attention costs more than it saves."""

Run = tuple[int, int]
"""(start, stop) of neighbouring tokens in a packed row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOrder:
    """Some sequences in the depth-first order of their radix tree."""

    indices: tuple[int, ...]
    """The index of the k-th sequence."""
    lengths: tuple[int, ...]
    """The number of its tokens."""
    shared: tuple[int, ...]
    """How many first tokens it shares with the sequence before it; 0 for the first sequence."""

    @classmethod
    def unshared(cls, lengths: Sequence[int]) -> PrefixOrder:
        """The given order, without sharing."""
        return cls(indices=tuple(range(len(lengths))), lengths=tuple(lengths), shared=(0,) * len(lengths))

    @classmethod
    def of(cls, sequences: Sequence[torch.Tensor], min_shared: int = MIN_SHARED_TOKENS) -> PrefixOrder:
        """Sort int64[T_i] token ids by their prefixes. Common prefixes below `min_shared` tokens count as none."""
        arrays = [tokens.cpu().numpy() for tokens in sequences]
        keys = [array.tobytes() for array in arrays]  # any order of the tokens will do, and bytes are fast
        indices = sorted(range(len(keys)), key=keys.__getitem__)
        shared = [0] * len(indices)
        for k in range(1, len(indices)):
            common = _common_prefix(arrays[indices[k - 1]], arrays[indices[k]])
            shared[k] = common if common >= min_shared else 0
        lengths = tuple(len(sequences[i]) for i in indices)
        return cls(indices=tuple(indices), lengths=lengths, shared=tuple(shared))

    @property
    def num_tokens(self) -> int:
        """Tokens to forward."""
        return sum(self.lengths) - sum(self.shared)

    def only(self, indices: Collection[int]) -> PrefixOrder:
        """The order of some of the sequences. Two of them share as much as all neighbours between them share."""
        wanted = frozenset(indices)
        kept: list[int] = []
        shared: list[int] = []
        common = 0
        for k, index in enumerate(self.indices):
            common = min(common, self.shared[k])
            if index in wanted:
                kept.append(k)
                shared.append(common)
                common = self.lengths[k]
        return PrefixOrder(
            indices=tuple(self.indices[k] for k in kept),
            lengths=tuple(self.lengths[k] for k in kept),
            shared=tuple(shared),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The tokens [start, stop) of a packed row. Each follows the one before it and attends to it causally."""

    start: int
    stop: int
    context: tuple[Run, ...] = ()
    """The runs of the row with the tokens before the stretch, from the root on."""

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def num_context_tokens(self) -> int:
        return _size(self.context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Queries and keys of a row that attend to each other: all to all, or causally if both are the same run."""

    queries: Run
    keys: Run
    is_causal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """A packed row in which every node of the radix tree lies once, in depth-first order."""

    stretches: tuple[Stretch, ...]
    """The row, from left to right. A node's first child continues its stretch; further children begin new ones."""
    runs: tuple[tuple[Run, ...], ...]
    """The runs with the tokens of the order's k-th sequence, from its first to its last."""

    @classmethod
    def of(cls, order: PrefixOrder) -> RowPlan:
        stretches: list[Stretch] = []
        all_runs: list[tuple[Run, ...]] = []
        runs: tuple[Run, ...] = ()
        end = 0
        for length, shared in zip(order.lengths, order.shared, strict=True):
            runs = _first(runs, shared)
            stop = end + length - shared
            if runs and runs[-1][1] == end:
                begin = stretches[-1]
                stretches[-1] = Stretch(start=begin.start, stop=stop, context=begin.context)
                runs = (*runs[:-1], (runs[-1][0], stop))
            elif stop > end:
                stretches.append(Stretch(start=end, stop=stop, context=runs))
                runs = (*runs, (end, stop))
            all_runs.append(runs)
            end = stop
        return cls(stretches=tuple(stretches), runs=tuple(all_runs))

    @property
    def num_tokens(self) -> int:
        return self.stretches[-1].stop if self.stretches else 0

    def blocks(self) -> list[Block]:
        """The blocks of attention: each stretch to itself, then neighbouring stretches together to a shared context.

        The blocks overlap nowhere, and the first ones hold each query once.
        """
        blocks = [Block(queries=(s.start, s.stop), keys=(s.start, s.stop), is_causal=True) for s in self.stretches]
        queries: dict[Run, Run] = {}
        for stretch in self.stretches:
            for run in stretch.context:
                start, _ = queries.get(run, (stretch.start, stretch.stop))
                queries[run] = (start, stretch.stop)
        # Everything below a place of the tree lies in one piece, so a run's queries are neighbours.
        return blocks + [Block(queries=q, keys=run, is_causal=False) for run, q in queries.items()]

    def positions(self) -> torch.Tensor:
        """int64[T]: for each token of the row, the number of tokens before it in its sequences."""
        return positions_of([(c, c + s.num_tokens) for s in self.stretches for c in (s.num_context_tokens,)])

    def subtree_stops(self) -> torch.Tensor:
        """int64[T]: for each token, the place after the last token of its subtree. q sees k when k <= q < stops[k]."""
        stops = torch.zeros(self.num_tokens, dtype=torch.int64)
        places = stops.numpy()  # the same memory, which numpy writes to sooner
        for stretch in self.stretches:
            for start, stop in (*stretch.context, (stretch.start, stretch.stop)):
                places[start:stop] = stretch.stop
        return stops


def needed_tokens(sequence: TrainSequence) -> torch.Tensor:
    """int64[at least 1]: the token ids to forward, all before the last trained token: by causality no others matter."""
    (trained,) = sequence.loss_mask.cpu().numpy().nonzero()
    last = int(trained[-1]) if len(trained) else 0
    return sequence.token_ids[: max(last, 1)]


def prefix_order(sequences: Sequence[TrainSequence], *, share_prefixes: bool = True) -> PrefixOrder:
    """The order in which the needed tokens share most; the given order without share_prefixes."""
    needed = [needed_tokens(sequence) for sequence in sequences]
    return PrefixOrder.of(needed) if share_prefixes else PrefixOrder.unshared([len(tokens) for tokens in needed])


def positions_of(runs: Sequence[Run]) -> torch.Tensor:
    """The places of all tokens of the runs, int64, in their order."""
    starts, stops = torch.tensor(runs, dtype=torch.int64).view(-1, 2).T
    sizes = stops - starts
    before = sizes.cumsum(0) - sizes
    return (starts - before).repeat_interleave(sizes) + torch.arange(int(sizes.sum()))


def _common_prefix(one: Any, other: Any) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def _first(runs: Sequence[Run], count: int) -> tuple[Run, ...]:
    cut: list[Run] = []
    for start, stop in runs:
        if count <= 0:
            break
        cut.append((start, min(stop, start + count)))
        count -= stop - start
    return tuple(cut)


def _size(runs: Sequence[Run]) -> int:
    return sum(stop - start for start, stop in runs)

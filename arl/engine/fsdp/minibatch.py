"""A minibatch's way through the ranks: shares, microbatches, and the sums of its metrics.

TrainSequences --divide--> shares --FlatSequences--> ranks --microbatches--> Microbatch --> MinibatchTally
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from arl.algorithm.flat_sequences import FlatSequences, of_each, runs
from arl.algorithm.packing import balanced_shares, pack
from arl.algorithm.prefix_tree import PrefixOrder, RowPlan, last_trained, prefix_order
from arl.algorithm.trained_tokens import unit_numbers
from arl.api.sampling_mask import KeptIds
from arl.api.train_engine import TOKEN_FIELDS, PackedTokens, TokenLosses, TrainSequence
from arl.data.image_processor import ImageProcessor
from arl.engine.fsdp.attention import PackedLayout
from arl.engine.fsdp.vision import NoImages, RowImages, images_of_row
from arl.engine.routers import ReplayedRoutes


def divide(sequences: Sequence[TrainSequence], num_shares: int, *, share_prefixes: bool) -> list[list[int]]:
    """Shares of nearly equal forwarded tokens, as indices; a share may be empty. Untrained sequences are in none."""
    flat = FlatSequences.of(sequences)
    trained = (last_trained(flat) >= 0).nonzero()[:, 0].tolist()
    shares = balanced_shares(flat.take(trained), num_shares, share_prefixes=share_prefixes)
    return [[trained[i] for i in share] for share in shares]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """S sequences of U tokens together, M of them trained, packed into one row of T tokens.

    The row holds shared tokens once, and omits tokens that no trained token follows. Tensors of length M are in the
    order of the sequences.
    """

    input_ids: torch.Tensor
    """int64[1, T]"""
    position_ids: torch.Tensor
    """int64[1, T], from 0 in each sequence; with images int64[3, 1, T]: time, row and column."""
    layout: PackedLayout
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    trained: torch.Tensor
    """bool[U]: the loss masks end to end, on the CPU."""
    predictors: torch.Tensor
    """int64[M]: the place in the row that predicts each trained token; several may share one."""
    targets: torch.Tensor
    """int64[M]: the trained tokens."""
    temperatures: torch.Tensor
    """float32[M]"""
    tokens: PackedTokens
    kept_ids: KeptIds | None = None
    """[M] What each trained token was sampled among; None: all among the whole vocabulary."""
    routes: ReplayedRoutes | None = None
    """[T] The experts that compute the row; None: those that the model's routers choose."""
    images: RowImages | NoImages | None = None
    """What the model sees; None: the row has no images, and the tower does not run."""

    @property
    def num_tokens(self) -> int:
        """U"""
        return sum(self.lengths)

    @property
    def num_forwarded_tokens(self) -> int:
        """T"""
        return self.input_ids.shape[1]

    def unpack(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Values of the trained tokens, float32[M] on the CPU -> float32[T_i] for each sequence, 0.0 elsewhere."""
        row = torch.zeros(self.num_tokens, dtype=torch.float32)
        row[self.trained] = values
        return list(row.split(list(self.lengths)))


def microbatches(
    sequences: Sequence[TrainSequence],
    budget: int,
    device: torch.device,
    *,
    share_prefixes: bool,
    processor: ImageProcessor | None = None,
) -> list[tuple[list[int], Microbatch]]:
    """(indices into `sequences`, their microbatch) under the budget of `pack`. Untrained sequences are in none.

    processor: of a model that sees. Images were checked.
    """
    flat = FlatSequences.of(sequences)
    trained = (last_trained(flat) >= 0).nonzero()[:, 0].tolist()
    kept = flat.take(trained)
    order = prefix_order(kept, share_prefixes=share_prefixes)
    bins = pack(order, budget, kept.units)
    return [
        ([trained[i] for i in members], _packed(kept.take(members), order.renumbered(members), device, processor))
        for members in bins
    ]


def build_microbatch(
    sequences: Sequence[TrainSequence],
    device: torch.device,
    *,
    share_prefixes: bool = True,
    processor: ImageProcessor | None = None,
) -> Microbatch:
    """Pack at least one sequence. Raises ValueError if a first token is marked as trained."""
    flat = FlatSequences.of(sequences)
    return _packed(flat, prefix_order(flat, share_prefixes=share_prefixes), device, processor)


def _packed(
    flat: FlatSequences, order: PrefixOrder, device: torch.device, processor: ImageProcessor | None
) -> Microbatch:
    places = flat.loss_mask.nonzero()[:, 0]
    sequence_ids = torch.searchsorted(flat.starts[1:], places, right=True)
    positions = places - flat.starts[sequence_ids]
    if not positions.all():
        raise ValueError("loss_mask is 1 at a sequence's first token, which has no context and so no logprob to train")
    plan = RowPlan.of(order)
    numbers = order.indices.argsort()[sequence_ids]
    temperatures = torch.tensor(flat.temperatures, dtype=torch.float32)
    # Selected before they are copied: on a GPU, selecting by a mask waits for everything queued there.
    of_trained = of_each(flat.columns, lambda column: column[places].to(device))
    layout = PackedLayout(plan, device)
    row = runs(flat.starts[order.indices] + order.shared, order.lengths - order.shared)
    routes = flat.routes and flat.routes.take(row.numpy())
    images, position_ids = None, layout.positions[None].long()
    if processor is not None and flat.images:
        images, position_ids = images_of_row(flat, order.lengths[order.indices.argsort()], row, processor, device)
    return Microbatch(
        input_ids=flat.token_ids[row][None].to(device),
        position_ids=position_ids,
        layout=layout,
        lengths=flat.lengths,
        trained=flat.loss_mask,
        predictors=plan.places(numbers, positions - 1).to(device),
        targets=of_trained["token_ids"],
        temperatures=temperatures[sequence_ids].to(device),
        tokens=PackedTokens(
            **{name: of_trained[name] for name in TOKEN_FIELDS},
            sequence_ids=sequence_ids.to(device),
            unit_ids=unit_numbers(flat.units, sequence_ids).to(device),
        ),
        kept_ids=flat.kept_ids and flat.kept_ids.take(places.numpy()),
        routes=None if routes is None else ReplayedRoutes(routes, device),
        images=images,
    )


def empty_microbatch(device: torch.device) -> Microbatch:
    """One untrained token, for a rank without work: collectives must match."""
    token = TrainSequence(token_ids=torch.zeros(1, dtype=torch.int64), loss_mask=torch.zeros(1, dtype=torch.bool))
    return build_microbatch([token], device)


class KeptValues:
    """A minibatch's TokenLosses.kept. `add` each microbatch, then read `columns`."""

    def __init__(self, flat: FlatSequences) -> None:
        self._flat = flat
        self._parts: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []

    def add(self, members: Sequence[int], batch: Microbatch, losses: TokenLosses) -> None:
        """Does not wait for the device. members: the microbatch's sequences."""
        if losses.kept and members:
            chosen = torch.tensor(members)
            begins = self._flat.starts[chosen]
            places = runs(begins, self._flat.starts[chosen + 1] - begins)[batch.trained]
            self._parts.append((places, dict(losses.kept)))

    def columns(self) -> dict[str, torch.Tensor]:
        """Name -> float32[T] over the minibatch's tokens, on the CPU; nan for those that were not trained."""
        if not self._parts:
            return {}
        places = torch.cat([places for places, _ in self._parts])
        columns: dict[str, torch.Tensor] = {}
        for name in self._parts[0][1]:
            columns[name] = torch.full((len(self._flat.token_ids),), math.nan)
            columns[name][places] = torch.cat([kept[name] for _, kept in self._parts]).float().cpu()
        return columns


def joined_columns(
    flat: FlatSequences, shares: Sequence[tuple[Sequence[int], Mapping[str, torch.Tensor]]]
) -> dict[str, torch.Tensor]:
    """The columns of a minibatch from those of its shares. shares: (sequences of the share, its columns)."""
    columns: dict[str, torch.Tensor] = {}
    for members, kept in shares:
        chosen = torch.tensor(members, dtype=torch.int64)
        begins = flat.starts[chosen]
        places = runs(begins, flat.starts[chosen + 1] - begins)
        for name, values in kept.items():
            column = columns.setdefault(name, torch.full((len(flat.token_ids),), math.nan))
            column[places] = values
    return columns


_KINDS = ("loss", "mean", "weighted", "above", "below", "size", "square")


@dataclass(slots=True, kw_only=True)
class MinibatchTally:
    """A minibatch's sums and maxima. `add` each microbatch, `reduce` once over the ranks, then read."""

    budget: int
    """Tokens that a microbatch may forward."""
    loss: float = 0.0
    tokens: int = 0
    forwarded_tokens: int = 0
    trained_tokens: int = 0
    microbatches: int = 0
    lr: float = 0.0
    grad_norm: float = 0.0
    nonfinite_grads: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    _sums: dict[tuple[tuple[str, str], ...], list[torch.Tensor]] = field(default_factory=dict)
    """Kinds and names -> for each microbatch float64[their number]."""
    _maxima: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def add(self, batch: Microbatch, loss: torch.Tensor, losses: TokenLosses) -> None:
        """loss: the microbatch's share of the minibatch's loss, detached. Does not wait for the device."""
        values = {
            **{("mean", name): value for name, value in losses.means.items()},
            **{("weighted", name): value * batch.tokens.loss_weights for name, value in losses.weighted.items()},
            **{("above", name): above for name, (above, _) in losses.quotients.items()},
            **{("below", name): below for name, (_, below) in losses.quotients.items()},
            **{("size", name): weights for name, weights in losses.sample_sizes.items()},
            **{("square", name): weights.double().square() for name, weights in losses.sample_sizes.items()},
        }
        sums = loss.double()[None]
        if values:
            sums = torch.cat([sums, torch.stack(list(values.values())).double().sum(1)])
        self._sums.setdefault((("loss", ""), *values), []).append(sums)
        for name, values in losses.maxima.items():
            peak = values.max() if len(values) else torch.tensor(-math.inf, device=values.device)
            self._maxima.setdefault(name, []).append(peak.double())
        self.trained_tokens += len(batch.targets)
        if len(batch.targets):
            self.tokens += batch.num_tokens
            self.forwarded_tokens += batch.num_forwarded_tokens
        self.microbatches += 1

    def reduce(self, device: torch.device, group: dist.ProcessGroup) -> None:
        """A collective. The ranks have the same names, as they ran the same loss."""
        if not self.microbatches:
            return
        named: dict[tuple[str, str], torch.Tensor] = {}
        for names, parts in self._sums.items():
            for name, value in zip(names, torch.stack(parts).sum(0), strict=True):
                named[name] = named[name] + value if name in named else value
        sums = torch.stack(list(named.values()))
        counts = [self.trained_tokens, self.tokens, self.forwarded_tokens, self.microbatches]
        totals = torch.cat([sums, torch.tensor(counts, dtype=sums.dtype, device=device)])
        reduce_over(totals, group)
        *values, trained, tokens, forwarded, microbatches = totals.tolist()
        self.trained_tokens, self.microbatches = int(trained), int(microbatches)
        self.tokens, self.forwarded_tokens = int(tokens), int(forwarded)
        self._read(dict(zip(named, values, strict=True)))
        if self._maxima and self.trained_tokens:
            peaks = torch.stack([torch.stack(parts).max() for parts in self._maxima.values()])
            reduce_over(peaks, group, dist.ReduceOp.MAX)
            self.maxima = dict(zip(self._maxima, peaks.tolist(), strict=True))

    def _read(self, sums: Mapping[tuple[str, str], float]) -> None:
        of: dict[str, dict[str, float]] = {kind: {} for kind in _KINDS}
        for (kind, name), value in sums.items():
            of[kind][name] = value
        count = max(self.trained_tokens, 1)
        self.loss = of["loss"][""]
        self.metrics = {
            **{name: value / count for name, value in of["mean"].items()},
            **of["weighted"],
            **{name: above / of["below"][name] for name, above in of["above"].items() if of["below"][name]},
            **{name: size**2 / (count * of["square"][name]) for name, size in of["size"].items() if of["square"][name]},
        }


def reduce_over(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """Reduce in place over the ranks of a group, or over all; a collective. One rank does not ask gloo's threads."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op, group=group)


def mean_of_minibatches(tallies: Sequence[MinibatchTally]) -> dict[str, float]:
    """The metrics of one train_batch: means of the minibatches' metrics, maxima of their maxima, sums of their counts.

    A metric's mean is over the minibatches that report it. Minibatches without a trained token count in the sums alone,
    and gradient norms that are not finite in `nonfinite_grads` alone.
    """
    trained = [tally for tally in tallies if tally.trained_tokens]
    metrics = {
        "loss": _mean([t.loss for t in trained]),
        "grad_norm": _mean([t.grad_norm for t in trained if not t.nonfinite_grads]),
        "lr": _mean([t.lr for t in trained]),
        "nonfinite_grads": float(sum(t.nonfinite_grads for t in tallies)),
        "tokens": float(sum(t.tokens for t in tallies)),
        "forwarded_tokens": float(sum(t.forwarded_tokens for t in tallies)),
        "trained_tokens": float(sum(t.trained_tokens for t in tallies)),
        "microbatches": float(sum(t.microbatches for t in tallies)),
    }
    room = sum(t.microbatches * t.budget for t in tallies)
    metrics["packing_efficiency"] = metrics["forwarded_tokens"] / room if room else 0.0
    metrics["forwarded_share"] = metrics["forwarded_tokens"] / metrics["tokens"] if metrics["tokens"] else 0.0
    metrics |= _merged([t.metrics for t in trained], _mean)
    metrics |= _merged([t.maxima for t in trained], max)
    return metrics


def _merged(parts: Sequence[Mapping[str, float]], merge: Callable[[Sequence[float]], float]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: merge([part[name] for part in parts if name in part]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

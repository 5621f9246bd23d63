"""A minibatch's way through the ranks: shares, microbatches, and what is reported of them.

TrainSequences --divide--> shares --FlatSequences--> ranks --microbatches--> Microbatch --> LossReport
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from arl.algorithm.flat_sequences import FlatSequences, of_each, runs
from arl.algorithm.packing import balanced_shares, pack
from arl.algorithm.prefix_tree import PrefixOrder, RowPlan, last_trained, prefix_order
from arl.algorithm.trained_tokens import LossReport, unit_numbers
from arl.api.sampling_mask import KeptIds
from arl.api.train_engine import TOKEN_FIELDS, PackedTokens, TrainSequence
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

    def unpack(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Values of the trained tokens, float32[M] on the CPU -> float32[T_i] for each sequence, 0.0 elsewhere."""
        row = torch.zeros(len(self.trained), dtype=torch.float32)
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


def kept_columns(
    num_tokens: int, parts: Sequence[tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
) -> dict[str, torch.Tensor]:
    """TokenLosses.kept of a minibatch, name -> float32[T] on the CPU, nan where there are none. parts: (places among
    the T tokens, values there)."""
    parts = [part for part in parts if part[1]]
    columns: dict[str, torch.Tensor] = {}
    for name in parts[0][1] if parts else ():
        columns[name] = torch.full((num_tokens,), math.nan)
        places = torch.cat([places for places, _ in parts])
        columns[name][places] = torch.cat([values[name] for _, values in parts]).float().cpu()
    return columns


def reduce_over(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """Reduce in place over the ranks of a group, or over all; a collective. One rank does not ask gloo's threads."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op, group=group)


def batch_metrics(report: LossReport, budget: int) -> dict[str, float]:
    """The metrics of one train_batch. budget: tokens that a microbatch may forward."""
    names = ("nonfinite_grads", "tokens", "forwarded_tokens", "trained_tokens", "microbatches")
    counts = {name: float(report.counts[name]) for name in names}
    room = counts["microbatches"] * budget
    return {
        "loss": 0.0,
        "grad_norm": 0.0,
        "lr": 0.0,
        **counts,
        "packing_efficiency": counts["forwarded_tokens"] / room if room else 0.0,
        "forwarded_share": counts["forwarded_tokens"] / counts["tokens"] if counts["tokens"] else 0.0,
        **report.metrics,
    }

"""A microbatch: training sequences packed into one row, with what the model and the loss need of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from arl.algorithm.prefix_tree import RowPlan, positions_of, prefix_order
from arl.api.engine import PackedTokens
from arl.api.types import TOKEN_FIELDS, TrainSequence
from arl.engine.fsdp.packed_layout import PackedLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """S sequences of U tokens together, of which M are trained and T are forwarded.

    input_ids, position_ids int64[1, T]: tokens that sequences share lie in the row once, and those that no trained
    token comes after are left out; positions count from each sequence's beginning. predictors int64[M]: the places in
    the row whose hidden states predict the trained tokens, which several may share; targets int64[M]: those tokens;
    temperatures float32[M]. All [M] are in the order of the sequences. lengths: of the sequences. trained bool[U]:
    their loss masks end to end, on the CPU.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    layout: PackedLayout
    lengths: tuple[int, ...]
    trained: torch.Tensor
    predictors: torch.Tensor
    targets: torch.Tensor
    temperatures: torch.Tensor
    tokens: PackedTokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequences, U."""
        return sum(self.lengths)

    @property
    def num_forwarded_tokens(self) -> int:
        """Tokens of the row, T."""
        return self.input_ids.shape[1]

    def unpack(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Values of the trained tokens, float32[M] on the CPU -> float32[T_i] for each sequence, 0.0 elsewhere."""
        row = torch.zeros(self.num_tokens, dtype=torch.float32)
        row[self.trained] = values
        return list(row.split(list(self.lengths)))


def build_microbatch(
    sequences: Sequence[TrainSequence], device: torch.device, *, share_prefixes: bool = True
) -> Microbatch:
    """Pack at least one sequence. Raises ValueError when a first token is marked as trained."""
    if any(s.loss_mask[0] for s in sequences):
        raise ValueError("loss_mask is 1 at a sequence's first token, which has no context and so no logprob to train")
    order = prefix_order(sequences, share_prefixes=share_prefixes)
    plan = RowPlan.of(order)
    input_ids = torch.empty(plan.num_tokens, dtype=torch.int64)
    predictors: list[torch.Tensor] = [torch.empty(0)] * len(sequences)
    for index, runs in zip(order.indices, plan.runs, strict=True):
        sequence, places = sequences[index], positions_of(runs)
        input_ids[places] = sequence.token_ids[: len(places)]
        predictors[index] = places[sequence.loss_mask.nonzero()[:, 0] - 1]

    # Selected before it is copied: on a GPU, each selection by a mask would wait for all that is queued there.
    trained = torch.cat([s.loss_mask for s in sequences])
    num_trained = torch.tensor([len(p) for p in predictors])

    def of_trained(name: str) -> torch.Tensor:
        return torch.cat([getattr(s, name) for s in sequences])[trained].to(device)

    def of_sequences(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(num_trained).to(device)

    layout = PackedLayout.of_plan(plan, device)
    return Microbatch(
        input_ids=input_ids[None].to(device),
        position_ids=layout.positions[None].long(),
        layout=layout,
        lengths=tuple(len(s) for s in sequences),
        trained=trained,
        predictors=torch.cat(predictors).to(device),
        targets=of_trained("token_ids"),
        temperatures=of_sequences(torch.tensor([s.temperature for s in sequences], dtype=torch.float32)),
        tokens=PackedTokens(
            **{name: of_trained(name) for name in TOKEN_FIELDS},
            sequence_ids=of_sequences(torch.arange(len(sequences))),
            unit_ids=of_sequences(_unit_numbers(sequences)),
        ),
    )


def empty_microbatch(device: torch.device) -> Microbatch:
    """One untrained token: what a rank computes while others still have work, so that collectives stay matched."""
    token = TrainSequence(token_ids=torch.zeros(1, dtype=torch.int64), loss_mask=torch.zeros(1, dtype=torch.bool))
    return build_microbatch([token], device)


def _unit_numbers(sequences: Sequence[TrainSequence]) -> torch.Tensor:
    """For each sequence the number of its unit in this microbatch, by first appearance."""
    numbers: dict[int | tuple[int], int] = {}
    units = [s.unit if s.unit >= 0 else (index,) for index, s in enumerate(sequences)]
    return torch.tensor([numbers.setdefault(unit, len(numbers)) for unit in units], dtype=torch.int64)

"""A microbatch: training sequences packed end to end into one row, with what the model and the loss need of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from arl.api.engine import PackedTokens
from arl.api.types import TrainSequence
from arl.engine.attention import PackedLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """S sequences of T tokens together, of which M are trained.

    input_ids, position_ids int64[1, T]; positions restart with each sequence. predictors int64[M]: the places in the
    row whose hidden states predict the trained tokens; targets int64[M]: those tokens; temperatures float32[M].
    trained bool[T]: loss masks end to end.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    layout: PackedLayout
    trained: torch.Tensor
    predictors: torch.Tensor
    targets: torch.Tensor
    temperatures: torch.Tensor
    tokens: PackedTokens

    @property
    def num_tokens(self) -> int:
        return sum(self.layout.lengths)

    def unpack(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Values of the trained tokens, float32[M] -> float32[T_i] on the CPU for each sequence, 0.0 elsewhere."""
        row = torch.zeros(self.num_tokens, dtype=torch.float32, device=values.device)
        row[self.trained] = values
        return list(row.cpu().split(list(self.layout.lengths)))


def build_microbatch(sequences: Sequence[TrainSequence], device: torch.device) -> Microbatch:
    """Pack at least one sequence, in the given order. Raises ValueError when a first token is marked as trained."""
    lengths = tuple(len(sequence) for sequence in sequences)
    layout = PackedLayout.of(lengths, device)
    starts = layout.cu_seqlens[:-1].long()
    sizes = torch.tensor(lengths, device=device)
    row_sequence_ids = torch.repeat_interleave(torch.arange(len(lengths), device=device), sizes)

    input_ids = torch.cat([s.token_ids for s in sequences]).to(device)
    trained = torch.cat([s.loss_mask for s in sequences]).to(device)
    if trained[starts].any():
        raise ValueError("loss_mask is 1 at a sequence's first token, which has no context and so no logprob to train")
    places = trained.nonzero()[:, 0]
    by_sequence = torch.tensor([s.temperature for s in sequences], dtype=torch.float32, device=device)
    sequence_ids = row_sequence_ids[places]

    def of_trained(name: str) -> torch.Tensor:
        return torch.cat([getattr(s, name) for s in sequences]).to(device)[places]

    return Microbatch(
        input_ids=input_ids[None],
        position_ids=(torch.arange(len(input_ids), device=device) - starts[row_sequence_ids])[None],
        layout=layout,
        trained=trained,
        predictors=places - 1,
        targets=input_ids[places],
        temperatures=by_sequence[sequence_ids],
        tokens=PackedTokens(
            behavior_logprobs=of_trained("behavior_logprobs"),
            proximal_logprobs=of_trained("proximal_logprobs"),
            advantages=of_trained("advantages"),
            loss_weights=of_trained("loss_weights"),
            versions=of_trained("versions"),
            sequence_ids=sequence_ids,
        ),
    )


def empty_microbatch(device: torch.device) -> Microbatch:
    """One untrained token: what a rank computes while others still have work, so that collectives stay matched."""
    nothing = torch.zeros(1)
    return build_microbatch(
        [
            TrainSequence(
                token_ids=torch.zeros(1, dtype=torch.int64),
                loss_mask=torch.zeros(1, dtype=torch.bool),
                behavior_logprobs=nothing,
                proximal_logprobs=nothing,
                advantages=nothing,
                loss_weights=nothing,
                versions=torch.zeros(1, dtype=torch.int64),
            )
        ],
        device,
    )

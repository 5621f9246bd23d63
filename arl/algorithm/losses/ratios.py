"""Ratios of policies, per token and over a trajectory. c current, p proximal, b behavior logprobs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp. exp(20) = 5e8 is far beyond any clip, so no ratio that trains sensibly is
touched; but a token that the current policy all but excludes would overflow, and one inf makes the whole step nan."""


def clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def attached(value: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
    """`value` held fixed, with the gradient of value * c: what the score function of a detached weight is made of."""
    # exp(0) is 1 exactly, and its derivative as well.
    return value.detach() * torch.exp(current - current.detach())


def approximated_proximal(
    current: torch.Tensor, behavior: torch.Tensor, versions: torch.Tensor, version: int
) -> torch.Tensor:
    """p without a forward pass: log-linear between b and c by their versions (A-3PO, 2512.06547), detached.

        p = b + a (c - b)        a = (v_p - v_b) / (v_c - v_b)

    for each token by its own version v_b, with v_p = `version`, that of the weights that the batch was taken with, and
    v_c = v_p + 1, that of the weights being made of it. A token of staleness 0 has p = b.
    """
    staleness = (version - versions).clamp(min=0).to(behavior.dtype)
    return behavior + staleness / (staleness + 1) * (current.detach() - behavior)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectories:
    """Which of the trajectories in a microbatch each trained token belongs to; a trajectory is never split.

    index int64[M]: 0 for the first trajectory that has a trained token, then 1, and so on. counts int64[M]: how many
    trained tokens its trajectory has.
    """

    index: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, sequence_ids: torch.Tensor) -> Trajectories:
        """sequence_ids int64[M], ascending; those of sequences without trained tokens do not occur."""
        # Numbered anew, as ids may be larger than M. Sizes are M and not the number of trajectories, which a GPU would
        # have to be asked for and waited for.
        index = (sequence_ids[1:] != sequence_ids[:-1]).cumsum(0)
        index = torch.cat([torch.zeros_like(sequence_ids[:1]), index])
        ones = torch.ones_like(index)
        return cls(index=index, counts=torch.zeros_like(index).index_add(0, index, ones)[index])

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """For each token the sum of `values` over the trained tokens of its trajectory: float[M]."""
        return torch.zeros_like(values).index_add(0, self.index, values)[self.index]

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """For each token the mean of `values` over the trained tokens of its trajectory: float[M]."""
        return self.sums(values) / self.counts

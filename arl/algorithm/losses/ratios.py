"""Ratios of policies, per token and over a trajectory. c current, p proximal, b behavior logprobs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from arl.api.algorithm import CorrectionConfig

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


# The weight that makes tokens of the behavior policy count as those of the proximal one, and its corrections.


def behavior_weight(log_weight: torch.Tensor, trajectories: Trajectories, config: CorrectionConfig) -> torch.Tensor:
    """w float[M], detached, from log_weight = p - b: the weight of decoupled PPO (2110.00641), and what corrects it.

        level: token      w = exp(p - b)
               sequence   w = exp(sum(p - b)), the product over the trajectory's trained tokens
               geometric  w = exp(mean(p - b))
        kind:  none       w
               truncate   min(w, upper)                          truncated importance sampling (IMPALA, 1802.01561)
               mask       w where w <= upper, else 0             masked importance sampling
               icepop     w where lower <= w <= upper, else 0    IcePop (Ring-1T, 2510.18855)
        veto:  0 for a trajectory in which any token has exp(p - b) < veto

    Denominators stay as they are: a token of weight 0 counts in its loss_weights as before.
    """
    log_weight = log_weight.detach()
    weight = torch.exp(clamped(_at_level(log_weight, trajectories, config.level)))
    if config.kind == "truncate":
        weight = weight.clamp(max=config.upper)
    elif config.kind in ("mask", "icepop"):
        lower = config.lower if config.kind == "icepop" else 0.0
        weight = weight * ((weight >= lower) & (weight <= config.upper))
    if config.veto is not None:
        is_low = (log_weight < math.log(config.veto)).to(log_weight.dtype)
        weight = weight * (trajectories.sums(is_low) == 0)
    return weight


def _at_level(log_weight: torch.Tensor, trajectories: Trajectories, level: str) -> torch.Tensor:
    if level == "sequence":
        return trajectories.sums(log_weight)
    return trajectories.means(log_weight) if level == "geometric" else log_weight


# Divergence of policies, estimated from the tokens that were sampled ("Approximating KL divergence", Schulman 2020).


Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(log_ratio: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """k1, k2 or k3 of d = log_ratio, float[M].

    Beyond +-MAX_LOG_RATIO k2 goes on as a straight line, and below -MAX_LOG_RATIO k3 stays where it is.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return F.huber_loss(log_ratio, torch.zeros_like(log_ratio), reduction="none", delta=MAX_LOG_RATIO)
    # d >= 20 needs no bound, as exp(-d) only vanishes, and has to keep the gradient that draws it back.
    d = log_ratio.clamp(min=-MAX_LOG_RATIO)
    return torch.expm1(-d) + d


def unbiased_kl(
    current: torch.Tensor, behavior: torch.Tensor, reference: torch.Tensor, estimator: Estimator
) -> torch.Tensor:
    """An estimate from tokens of the behavior policy whose expected gradient is that of KL(pi || ref), whatever c is.

        exp(c - b) k1,   exp(c - b) k3,   sg(exp(c - b)) k2

    (DeepSeek-V3.2, 2512.02556, section 3.1, with k3). The ratio is to b and not to p, as b is what the tokens were
    drawn from. For k1 and k3 it is differentiated too: sum(exp(b) exp(c - b) k) = sum(pi k) is the divergence itself.
    k2 is not an estimate of it, but its gradient is right without that of the ratio.
    """
    ratio = torch.exp(clamped(current - behavior))
    if estimator == "k2":
        ratio = ratio.detach()
    return ratio * kl_estimate(current - reference, estimator)


def divergence_from_sampler(log_ratio: torch.Tensor) -> torch.Tensor:
    """k3 seen from the other side, for metrics: exp(x) - 1 - x >= 0 with x = log(. / b), whose mean over tokens from b
    estimates KL(b || .), without bias and calmly."""
    x = clamped(log_ratio)
    return torch.expm1(x) - x

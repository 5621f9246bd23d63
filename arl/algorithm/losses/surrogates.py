"""Surrogate objectives: each policy loss of the field as one pure function of a microbatch's tokens.

c current, p proximal logprobs, d = c - p, r = exp(d) with d clamped to +-MAX_LOG_RATIO, A advantage; n_i the trained
tokens of trajectory i. D_i = sum(d) over them. sg( ) is held fixed under differentiation.

Two rules hold for all of them. First, a token's loss has a gradient in that token's c alone. Quantities of a whole
trajectory enter it detached, in a form whose gradient, summed over the trajectory, is the paper's. So weights per token
(behavior weights, selections, aggregations) mean the same everywhere. Second, each loss has the scale of its paper
under one aggregation:

    losses that are means over a trajectory (gspo, gmpo) and losses per token: under sequence_mean the paper's
    losses that are sums over a trajectory (topr, mirror_descent): under sequence_sum the paper's, over the constant

Under token_mean and group_mean a trajectory counts by its length, for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from arl.api.settings.objective import (
    ClippedLossConfig,
    DPPOLossConfig,
    MirrorDescentLossConfig,
    ReinforceLossConfig,
    SAPOLossConfig,
    TOPRLossConfig,
)

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp. exp(20) = 5e8 is far beyond any clip. Without the clamp a token that the
current policy almost excludes would overflow, and one inf makes the whole step nan."""

ROUNDING = 1e-4
"""A smaller difference of two logprobs is rounding between two float32 forward passes: its sign means nothing."""


def clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def attached(value: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
    """`value` held fixed, with the gradient of value * c: the score function with a detached weight."""
    # exp(0) is 1 exactly, and its derivative as well.
    return value.detach() * torch.exp(current - current.detach())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectories:
    """The trajectory of each trained token in a microbatch. A trajectory is never split."""

    index: torch.Tensor
    """int64[M]: 0 for the first trajectory with a trained token, then 1, and so on."""
    counts: torch.Tensor
    """int64[M]: the number of trained tokens in its trajectory."""

    @classmethod
    def of(cls, sequence_ids: torch.Tensor) -> Trajectories:
        """sequence_ids: int64[M], ascending. Sequences without trained tokens do not occur."""
        # Numbered anew, because ids may exceed M. All sizes are M: to read the number of trajectories from a GPU would
        # mean to wait for it.
        index = (sequence_ids[1:] != sequence_ids[:-1]).cumsum(0)
        index = torch.cat([torch.zeros_like(sequence_ids[:1]), index])
        ones = torch.ones_like(index)
        return cls(index=index, counts=torch.zeros_like(index).index_add(0, index, ones)[index])

    @classmethod
    def of_turns(cls, sequence_ids: torch.Tensor, turn_starts: torch.Tensor) -> Trajectories:
        """The turns in place of trajectories. turn_starts: bool[M], True at each trajectory's first trained token."""
        return cls.of(turn_starts.cumsum(0)) if len(turn_starts) else cls.of(sequence_ids)

    @classmethod
    def of_units(cls, unit_ids: torch.Tensor) -> Trajectories:
        """The units in place of trajectories. unit_ids: int64[M], below M, in any order."""
        counts = torch.zeros_like(unit_ids).index_add(0, unit_ids, torch.ones_like(unit_ids))
        return cls(index=unit_ids, counts=counts[unit_ids])

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """float[M]: for each token the sum of `values` over the trained tokens of its trajectory."""
        return torch.zeros_like(values).index_add(0, self.index, values)[self.index]

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """float[M]: for each token their mean."""
        return self.sums(values) / self.counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyTokens:
    """The inputs of a surrogate, float[M] each."""

    current: torch.Tensor
    """With gradient."""
    proximal: torch.Tensor
    """Without gradient."""
    advantages: torch.Tensor
    trajectories: Trajectories
    """Those with one ratio: trajectories, or their turns."""

    @property
    def log_ratio(self) -> torch.Tensor:
        return self.current - self.proximal

    @property
    def ratio(self) -> torch.Tensor:
        return torch.exp(clamped(self.log_ratio))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surrogate:
    loss: torch.Tensor
    """float[M], with gradient."""
    is_clipped: torch.Tensor
    """bool[M]: the tokens that the loss's trust region holds back. Each loss says what that means."""
    trajectory_ratio: torch.Tensor | None = None
    """float[M], without gradient: the ratio of a token's whole trajectory or turn, of losses that have one."""
    weighted: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """TokenLosses.weighted, without gradient."""
    quotients: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """TokenLosses.quotients, without gradient."""


def ppo(tokens: PolicyTokens, config: ClippedLossConfig) -> Surrogate:
    """PPO's clip (1707.06347, eq. 7), with bounds apart (DAPO, 2503.14476) and dual clip (1912.09729):

        L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))          and min(L, dual_clip |A|)

    Dual clip affects A < 0 alone, because L <= 0 elsewhere. Without both bounds this is importance sampling, -A r.
    Clipped: no gradient.
    """
    loss, is_clipped = _clipped(tokens.ratio, tokens.advantages, config)
    if config.dual_clip is not None:
        highest = config.dual_clip * tokens.advantages.abs()
        is_above = loss > highest
        loss, is_clipped = torch.where(is_above, highest, loss), is_clipped | is_above
    return Surrogate(loss=loss, is_clipped=is_clipped)


def reinforce(tokens: PolicyTokens, config: ReinforceLossConfig) -> Surrogate:
    """The policy gradient itself (Williams 1992): -A c. No trust region, so nothing is clipped."""
    return Surrogate(loss=-tokens.advantages * tokens.current, is_clipped=torch.zeros_like(tokens.current).bool())


def gspo(tokens: PolicyTokens, config: ClippedLossConfig) -> Surrogate:
    """GSPO (2507.18071, eq. 5-7), in its token form (eq. 13-14), which is equal if A is one number per trajectory:

        s = exp(D_i / n_i)      s_t = sg(s) exp(c_t - sg(c_t))      L_t = max(-A s_t, -A clip(s_t, 1 - low, 1 + high))

    Clipped: no gradient; with one A, whole trajectories at once. With level=turn D_i and n_i are a turn's, and s is the
    turn-level ratio of ST-PPO (2511.20718, eq. 4).
    """
    ratio = torch.exp(clamped(tokens.trajectories.means(tokens.log_ratio.detach())))
    loss, is_clipped = _clipped(attached(ratio, tokens.current), tokens.advantages, config)
    return Surrogate(loss=loss, is_clipped=is_clipped, trajectory_ratio=ratio)


def gmpo(tokens: PolicyTokens, config: ClippedLossConfig) -> Surrogate:
    """GMPO (2507.20673): the geometric mean of token ratios, each clipped before, on the side that A pulls to.

        m_t = min(d_t, clip_high) where A > 0, max(d_t, -clip_low) where A < 0       g = exp(mean(m))       L_i = -A g

    Computed as L_t = -A sg(g) exp(m_t - sg(m_t)), with a gradient of -A g for each unclipped token. If A differs among
    a trajectory's tokens, each has its own A and sign.
    """
    log_ratio, advantages = tokens.log_ratio, tokens.advantages
    low = -torch.inf if config.clip_low is None else -config.clip_low
    high = torch.inf if config.clip_high is None else config.clip_high
    is_clipped = ((advantages > 0) & (log_ratio > high)) | ((advantages < 0) & (log_ratio < low))
    moved = torch.where(is_clipped, log_ratio.clamp(low, high), log_ratio)
    mean = torch.exp(clamped(tokens.trajectories.means(moved.detach())))
    return Surrogate(loss=-advantages * attached(mean, moved), is_clipped=is_clipped, trajectory_ratio=mean)


def cispo(tokens: PolicyTokens, config: ClippedLossConfig) -> Surrogate:
    """CISPO (MiniMax-M1, 2506.13585, eq. 4-5): L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A c.

    Clipped: tokens with a clipped weight. They keep their gradient.
    """
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(*_bounds(config))
    return Surrogate(loss=-weight * tokens.advantages * tokens.current, is_clipped=weight != ratio)


_TAU_POSITIVE, _TAU_NEGATIVE = 1.0, 1.05


def sapo(tokens: PolicyTokens, config: SAPOLossConfig) -> Surrogate:
    """SAPO (2511.20347, eq. 5-6): L = -(4 / tau) sigmoid(tau (r - 1)) A, tau = 1 where A > 0, 1.05 elsewhere.

    The gradient is that of -A r times 4 s (1 - s), with s the sigmoid. The factor is 1 at r = 1 and falls to 0 on both
    sides. Clipped: tokens with a factor below a half.
    """
    # Arithmetic gives tau the advantages' dtype.
    is_positive = (tokens.advantages > 0).to(tokens.advantages.dtype)
    tau = is_positive * _TAU_POSITIVE + (1 - is_positive) * _TAU_NEGATIVE
    gate = torch.sigmoid(tau * (tokens.ratio - 1))
    passed = (4 * gate * (1 - gate)).detach()
    return Surrogate(loss=-4 / tau * gate * tokens.advantages, is_clipped=passed < 0.5)


def topr(tokens: PolicyTokens, config: TOPRLossConfig) -> Surrogate:
    """TOPR (2503.14286): off-policy REINFORCE without a ratio for good trajectories, and with a capped one for bad.

        L_i = -sum_t w A_t c_t       w = 1 where A >= 0, sg(min(exp(D_i), 1)) where A < 0

    The paper's rewards, positive or negative, are the advantages here. Its behavior policy is p: use
    proximal=bypassed. Clipped: tokens with A < 0 and a capped ratio. They keep their gradient.
    """
    total = torch.exp(clamped(tokens.trajectories.sums(tokens.log_ratio.detach())))
    is_bad = tokens.advantages < 0
    weight = torch.where(is_bad, total.clamp(max=1.0), torch.ones_like(total))
    loss = -weight * tokens.advantages * tokens.current
    return Surrogate(loss=loss, is_clipped=is_bad & (total > 1), trajectory_ratio=total)


def mirror_descent(tokens: PolicyTokens, config: MirrorDescentLossConfig) -> Surrogate:
    """Online policy mirror descent (Kimi k1.5, 2501.12599, eq. 3; K2's, 2507.20534, has 2 tau times its gradient):

        L_i = -A sum_t c_t + tau / 2 D_i^2         as       L_t = -A_t c_t + tau / (2 n_i) D_i^2

    The gradient is -(A_t - tau D_i), so the trajectory is pulled back to p. d is clamped in D_i. Clipped: tokens that
    the pull has stopped or turned back, tau D_i >= A > 0 or tau D_i <= A < 0.
    """
    advantages = tokens.advantages
    total = tokens.trajectories.sums(clamped(tokens.log_ratio.detach()))
    pull = config.tau * total
    penalty = pull * total / (2 * tokens.trajectories.counts)
    # The penalty's value, and its derivative by this token's c.
    penalty = penalty + pull * (tokens.current - tokens.current.detach())
    is_stopped = (advantages != 0) & (advantages * (advantages - pull) <= 0)
    return Surrogate(loss=-advantages * tokens.current + penalty, is_clipped=is_stopped)


def dppo_tv(tokens: PolicyTokens, config: DPPOLossConfig) -> Surrogate:
    """DPPO with a binary total variation (2602.04879, eq. 11-13): a trust region of probabilities, not of ratios.

        L = -M A r       M = 0 where |exp(c) - exp(p)| > delta and A (r - 1) > 0, else 1

    |exp(c) - exp(p)| is the policies' total variation if all other tokens count as one. The paper's p is the sampler:
    use proximal=bypassed. Clipped: masked.
    """
    moved = (torch.exp(tokens.current) - torch.exp(tokens.proximal)).detach()
    is_masked = ((tokens.advantages > 0) & (moved > config.delta)) | ((tokens.advantages < 0) & (moved < -config.delta))
    return Surrogate(loss=-tokens.advantages * tokens.ratio * ~is_masked, is_clipped=is_masked)


SURROGATES: Mapping[str, Callable[[PolicyTokens, Any], Surrogate]] = {
    "ppo": ppo,
    "reinforce": reinforce,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "topr": topr,
    "mirror_descent": mirror_descent,
    "dppo_tv": dppo_tv,
}
"""By the kind of the loss. Losses of whole episodes are in arl.algorithm.losses.preferences."""


def _bounds(config: ClippedLossConfig) -> tuple[float, float]:
    """The bounds of a ratio. An unset bound does not bind."""
    low = 0.0 if config.clip_low is None else 1 - config.clip_low
    return low, torch.inf if config.clip_high is None else 1 + config.clip_high


def _clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, config: ClippedLossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """max(-A r, -A clip(r)), and whether the second is the larger."""
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(*_bounds(config))
    return torch.maximum(unclipped, clipped), (clipped > unclipped).detach()

"""Advantages, policy losses, and tokens that a loss treats apart, as settings: the kinds that each of them comes in.

Letters are those of arl.api.algorithm; formulas and papers are in docs/algorithms.md.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from arl.api.section import Section

# Advantages -----------------------------------------------------------------------------------------------------------


class ReturnsAdvantage(Section):
    """A = (R - baseline) / scale, among the trajectories of a group with the same role."""

    kind: Literal["returns"] = "returns"
    baseline: Literal["none", "group_mean", "leave_one_out", "greedy", "length_weighted"] = "group_mean"
    """group_mean: GRPO. leave_one_out: the mean of the others (RLOO). greedy: the reward of one more episode, decoded
    greedily (ReMax). length_weighted: the mean, weighted by trained tokens (OPO). none: REINFORCE."""
    scale: Literal["none", "group_std", "batch_std"] = "group_std"
    """What R - baseline is divided by. batch_std: all is whitened over the batch's trained tokens (REINFORCE++): less
    their mean, over their standard deviation."""
    separate_rewards: bool = False
    """Normalise each of the trajectories' named `rewards` apart, add them up, and whiten over the batch's trajectories
    (GDPO). `reward` is not looked at."""
    token_discount: float = Field(default=1.0, ge=0, le=1)
    """What a later process reward is worth, per trained token in between. 0: a token has its own reward alone."""
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """What a later process reward is worth, per turn in between: of both discounts, the product counts."""


class PassAtKAdvantage(Section):
    """Rewards a group for one success in k, for rewards of 0 and 1: the analytic form, which needs no subgroups.

    A trajectory whose rewards, process rewards included, add up to more than 0.5 is a success.
    """

    kind: Literal["pass_at_k"] = "pass_at_k"
    k: PositiveInt = 4
    """Of how many answers one has to be right. A group of k or fewer learns nothing: every k of it are the same."""


class RejectionAdvantage(Section):
    """A = 1 for trajectories with a reward above the threshold, and 0, which trains nothing, for the others (RAFT).

    The reward is all of a trajectory's, process rewards included.
    """

    kind: Literal["rejection"] = "rejection"
    threshold: float = 0.0


class GiGPOAdvantage(Section):
    """Group-relative over episodes, plus step_weight times group-relative over turns taken in equal states."""

    kind: Literal["gigpo"] = "gigpo"
    step_weight: float = Field(default=1.0, ge=0)
    turn_discount: float = Field(default=0.95, ge=0, le=1)
    """What a later turn's reward is worth, per turn in between. The outcome is the last turn's."""
    scale: Literal["none", "group_std"] = "group_std"
    """What both parts are divided by: their group's standard deviation, or nothing."""


class GAEAdvantage(Section):
    """Generalised advantage estimation over trained tokens, with a critic's values (PPO)."""

    kind: Literal["gae"] = "gae"
    discount: float = Field(default=1.0, ge=0, le=1)
    """gamma, per trained token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """lambda: 1 sums rewards up, 0 trusts the critic's next value."""
    whiten: bool = True
    """Subtract the batch's mean advantage and divide by its standard deviation, over trained tokens."""


class DistillationAdvantage(Section):
    """A = coefficient (teacher logprob - p), from token_rewards that are coefficient (teacher logprob - b), as
    DistillationWorkflow gives them. Other rewards are not looked at."""

    kind: Literal["distillation"] = "distillation"
    coefficient: PositiveFloat = 1.0
    """The workflow's."""


AdvantageConfig = Annotated[
    ReturnsAdvantage | PassAtKAdvantage | RejectionAdvantage | GiGPOAdvantage | GAEAdvantage | DistillationAdvantage,
    Field(discriminator="kind"),
]

# Policy losses --------------------------------------------------------------------------------------------------------


class PPOLossConfig(Section):
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))"""

    kind: Literal["ppo"] = "ppo"
    clip_low: float | None = Field(default=0.2, ge=0, le=1)
    """Unset: no lower clip."""
    clip_high: float | None = Field(default=0.2, ge=0)
    """Unset: no upper clip. With neither: plain importance sampling, -A r."""
    dual_clip: float | None = Field(default=None, gt=1)
    """For A < 0 the loss is at most dual_clip * |A|."""


class ReinforceLossConfig(Section):
    """-A c: no ratio to p, so the gradient is the same wherever c has moved."""

    kind: Literal["reinforce"] = "reinforce"


class GSPOLossConfig(Section):
    """PPO's clip on one ratio for each trajectory, exp(mean(c - p))."""

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    clip_high: float = Field(default=4e-4, ge=0)


class GMPOLossConfig(Section):
    """The geometric mean of a trajectory's clipped token ratios."""

    kind: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(default=0.4, ge=0)
    """log r is clipped to at least -clip_low."""
    clip_high: float = Field(default=0.4, ge=0)
    """log r is clipped to at most clip_high."""


class CISPOLossConfig(Section):
    """-sg(clip(r)) A c: every token keeps its gradient, with a clipped weight."""

    kind: Literal["cispo"] = "cispo"
    clip_low: float | None = Field(default=None, ge=0, le=1)
    """Unset: no lower clip, as in the paper."""
    clip_high: float = Field(default=4.0, ge=0)


class SAPOLossConfig(Section):
    """-(4 / tau) sigmoid(tau (r - 1)) A: a soft gate in the clip's place."""

    kind: Literal["sapo"] = "sapo"
    tau_positive: PositiveFloat = 1.0
    """tau where A > 0."""
    tau_negative: PositiveFloat = 1.05
    """tau where A <= 0."""


class TOPRLossConfig(Section):
    """-A c where A >= 0; with the trajectory's ratio, truncated, as a weight where A < 0. A sum over tokens, so the
    paper's scale is that of aggregation=sequence_sum."""

    kind: Literal["topr"] = "topr"
    ratio_cap: PositiveFloat = 1.0
    """The weight of trajectories with A < 0 is min(exp(sum(c - p)), ratio_cap)."""


class MirrorDescentLossConfig(Section):
    """-A sum(c) + tau / 2 sum(c - p)^2, sums over a trajectory: Kimi's regularised policy mirror descent. The paper's
    scale is that of aggregation=sequence_sum; sequence_mean divides by a trajectory's tokens."""

    kind: Literal["mirror_descent"] = "mirror_descent"
    tau: PositiveFloat = 0.1


class DPPOLossConfig(Section):
    """-A r, without the tokens that moved further than delta in total variation and would move on (DPPO-TV). The
    paper's p is the sampler: proximal=bypassed."""

    kind: Literal["dppo_tv"] = "dppo_tv"
    delta: float = Field(default=0.15, gt=0, le=1)
    """The greatest |exp(c) - exp(p)|: the total variation between token and not-token."""


LossConfig = Annotated[
    PPOLossConfig
    | ReinforceLossConfig
    | GSPOLossConfig
    | GMPOLossConfig
    | CISPOLossConfig
    | SAPOLossConfig
    | TOPRLossConfig
    | MirrorDescentLossConfig
    | DPPOLossConfig,
    Field(discriminator="kind"),
]

# Tokens treated apart, over the whole minibatch -----------------------------------------------------------------------


class NoSelection(Section):
    kind: Literal["none"] = "none"


class SecondMomentSelection(Section):
    """Leave out the tokens of largest (p - b)^2 until its mean is at most `limit`, among those that a clip could
    concern: A > 0 and p > b, or A < 0 and p < b (M2PO)."""

    kind: Literal["second_moment"] = "second_moment"
    limit: PositiveFloat = 0.04


class ClipCovSelection(Section):
    """Leave out random tokens among those whose covariance of logprob and advantage lies in [low, high]."""

    kind: Literal["clip_cov"] = "clip_cov"
    share: float = Field(default=2e-4, gt=0, le=1)
    """How many, as a share of all trained tokens; at least one."""
    low: float = 1.0
    high: float = 5.0


class KLCovSelection(Section):
    """Add coefficient * |c - p| to the loss of the share of tokens with the largest covariance."""

    kind: Literal["kl_cov"] = "kl_cov"
    share: float = Field(default=2e-3, gt=0, le=1)
    coefficient: PositiveFloat = 1.0


SelectionConfig = Annotated[
    NoSelection | SecondMomentSelection | ClipCovSelection | KLCovSelection, Field(discriminator="kind")
]

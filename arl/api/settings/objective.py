"""The parts of an algorithm, as settings: the kinds of each part, and each kind's parameters.

arl.api.settings.algorithm explains the letters. Formulas and papers are in docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from arl.api.settings.sections import Section


class PairsAdvantage(Section):
    """A = 1 for the best episode of a group, -1 for the worst, for the dpo loss; the others train nothing. They are of
    the same role, and differ in reward: the sum of all their rewards, process rewards included. Of equal rewards the
    episode that was started first comes first."""

    kind: Literal["pairs"] = "pairs"


class LabelsAdvantage(Section):
    """A = 1 for desirable episodes, -1 for undesirable ones, for the kto loss. Episodes without a label train nothing.
    An episode's reward is the sum of all its rewards, process rewards included."""

    kind: Literal["labels"] = "labels"
    threshold: float | None = None
    """An episode is desirable if its reward is above this, and undesirable otherwise. Unset: the mean of its group;
    episodes at the mean have no label."""
    balanced: bool = False
    """Weigh each label by n / (2 n_label), for n labelled episodes in the batch and n_label with the same label (KTO's
    lambda). Both labels then have the same sum of weights, whatever the share of successes."""


class DPOLossConfig(Section):
    """-log sigmoid(beta h) of each pair, with h = the sum of c - reference over the better episode's trained tokens
    less that over the worse one's. It takes advantages of kind pairs."""

    kind: Literal["dpo"] = "dpo"
    beta: PositiveFloat = 0.1
    """How strongly the policy is held to the reference."""
    link: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """sigmoid: DPO. ipo: (h - 1 / (2 beta))^2. hinge: max(0, 1 - beta h), SLiC's."""


class KTOLossConfig(Section):
    """abs(A) sigmoid(-beta (h - z0)) of a desirable episode, abs(A) sigmoid(beta (h - z0)) of an undesirable one, with
    h the sum of c - reference over its trained tokens. It takes advantages of kind labels."""

    kind: Literal["kto"] = "kto"
    beta: PositiveFloat = 0.1
    """How quickly gains and losses saturate: the smaller, the further the policy may go from the reference."""


# Advantages -----------------------------------------------------------------------------------------------------------


class ReturnsAdvantage(Section):
    """A = (R - baseline) / scale, among the trajectories of a group with the same role."""

    kind: Literal["returns"] = "returns"
    baseline: Literal["none", "group_mean", "leave_one_out", "greedy", "length_weighted"] = "group_mean"
    """group_mean: GRPO. leave_one_out: the mean of the others (RLOO). greedy: the reward of one more episode, decoded
    greedily (ReMax). length_weighted: the mean, weighted by trained tokens (OPO). none: REINFORCE."""
    scale: Literal["none", "group_std", "batch_std"] = "group_std"
    """The divisor of R - baseline. batch_std: advantages are whitened over the batch's trained tokens (REINFORCE++),
    that is, (A - mean) / standard deviation."""
    separate_rewards: bool = False
    """Normalise each of the named `rewards` separately, add them up, and whiten over the batch's episodes (GDPO).
    `reward` is ignored."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """With separate_rewards: what the advantage of each named reward is multiplied with before they are added up. A
    name that is left out has 1."""
    token_discount: float = Field(default=1.0, ge=0, le=1)
    """The discount of later process rewards, per trained token in between. 0: a token gets its own reward alone."""
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """The discount of later process rewards, per turn in between. It multiplies with token_discount."""

    @model_validator(mode="after")
    def _weighs_separate_rewards(self) -> Self:
        if self.reward_weights and not self.separate_rewards:
            raise ValueError("reward_weights is set, but separate_rewards is not; set it, or weigh within `reward`")
        return self

    @property
    def is_relative(self) -> bool:
        """Whether the baseline comes from the peers. Without peers, or among equal ones, the advantage is exactly 0."""
        return self.baseline in ("group_mean", "leave_one_out", "length_weighted")


class PassAtKAdvantage(Section):
    """Rewards a group for one success in k, for rewards of 0 and 1. The analytic form needs no subgroups.

    A trajectory is a success if its rewards, process rewards included, add up to more than 0.5.
    """

    kind: Literal["pass_at_k"] = "pass_at_k"
    k: PositiveInt = 4
    """One of k answers has to be right. A group of k or fewer learns nothing: it has no two different subgroups."""


class MaxLikelihoodAdvantage(Section):
    """Rewards a group's successes by how rare they are, for rewards of 0 and 1 (MaxRL): with a share rho of successes
    A = (1 - rho) / rho, and -1 for the others.

    A trajectory is a success if its rewards, process rewards included, add up to more than 0.5.
    """

    kind: Literal["max_likelihood"] = "max_likelihood"


class RejectionAdvantage(Section):
    """A = 1 for trajectories with a reward above the threshold (RAFT). The others have A = 0, and train nothing.

    The reward is the sum of all the trajectory's rewards, process rewards included.
    """

    kind: Literal["rejection"] = "rejection"
    threshold: float = 0.0
    """Trajectories with a reward above this are trained."""


class GiGPOAdvantage(Section):
    """Group-relative over episodes, plus group-relative over turns taken in equal states."""

    kind: Literal["gigpo"] = "gigpo"
    turn_discount: float = Field(default=0.95, ge=0, le=1)
    """The discount of later turns' rewards, per turn in between. The outcome belongs to the last turn."""
    scale: Literal["none", "group_std"] = "group_std"
    """The divisor of both parts: their group's standard deviation, or 1."""


class GAEAdvantage(Section):
    """Generalised advantage estimation with a critic's values, whitened over the batch (PPO)."""

    kind: Literal["gae"] = "gae"
    level: Literal["token", "turn"] = "token"
    """The steps of the estimate. token: trained tokens. turn: whole turns, each with one advantage for all its tokens;
    the critic then learns the values of contexts in which a turn begins, and no others."""
    discount: float = Field(default=1.0, ge=0, le=1)
    """gamma, per step."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """lambda: 1 sums rewards up, 0 trusts the critic's next value."""


class DistillationAdvantage(Section):
    """A = teacher logprob - p. DistillationWorkflow gives the token_rewards, teacher logprob - b. Other rewards are
    ignored."""

    kind: Literal["distillation"] = "distillation"


AdvantageConfig = Annotated[
    ReturnsAdvantage
    | PassAtKAdvantage
    | MaxLikelihoodAdvantage
    | RejectionAdvantage
    | GiGPOAdvantage
    | GAEAdvantage
    | PairsAdvantage
    | LabelsAdvantage
    | DistillationAdvantage,
    Field(discriminator="kind"),
]

# Policy losses --------------------------------------------------------------------------------------------------------


CLIPS: Mapping[str, tuple[float | None, float | None]] = {
    "ppo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "gmpo": (0.4, 0.4),
    "cispo": (None, 4.0),
}
"""The default clip_low and clip_high of each kind."""


class ClippedLossConfig(Section):
    """Losses that hold a ratio between two bounds."""

    kind: Literal["ppo", "gspo", "gmpo", "cispo"] = "ppo"
    """ppo: max(-A r, -A clip(r)). gspo: the same with one ratio for each trajectory, exp(mean(c - p)). gmpo: the
    geometric mean of a trajectory's clipped ratios. cispo: -sg(clip(r)) A c, and every token keeps its gradient."""
    clip_low: float | None = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped to at least 1 - clip_low; for gmpo log r to at least -clip_low. Unset: no lower clip. The
    default is the kind's own: 3e-4 for gspo, 0.4 for gmpo, unset for cispo."""
    clip_high: float | None = Field(default=0.2, ge=0)
    """The ratio is clipped to at most 1 + clip_high; for gmpo log r to at most clip_high. Unset: no upper clip; ppo
    with neither is plain importance sampling, -A r. The kind's own: 4e-4 for gspo, 0.4 for gmpo, 4 for cispo."""
    dual_clip: float | None = Field(default=None, gt=1)
    """With kind ppo: for A < 0 the loss is at most dual_clip * |A|."""
    level: Literal["trajectory", "turn"] = "trajectory"
    """With kind gspo or gmpo: what has one ratio. turn: each turn of a trajectory has its own."""

    @model_validator(mode="before")
    @classmethod
    def _with_the_bounds_of_its_kind(cls, given: Any) -> object:
        settings = cast("dict[str, Any]", given) if isinstance(given, dict) else dict[str, Any]()
        if settings.get("kind") not in CLIPS:
            return cast("object", given)
        low, high = CLIPS[settings["kind"]]
        return {"clip_low": low, "clip_high": high, **settings}

    def _changed(self, *names: str) -> list[str]:
        low, high = CLIPS[self.kind]
        usual = {"kind": self.kind, "clip_low": low, "clip_high": high, "dual_clip": None, "level": "trajectory"}
        return [name for name in names if getattr(self, name) != usual[name]]

    @model_validator(mode="after")
    def _has_settings_of_its_kind(self) -> Self:
        if self.dual_clip is not None and self.kind != "ppo":
            raise ValueError(f"dual_clip is {self.dual_clip}, which is for kind=ppo; kind is {self.kind}")
        if self.level != "trajectory" and self.kind not in ("gspo", "gmpo"):
            raise ValueError(f"level is {self.level}, which is for kind=gspo and gmpo; kind is {self.kind}")
        return self


class ReinforceLossConfig(Section):
    """-A c. There is no ratio to p, so the gradient does not depend on how far c has moved."""

    kind: Literal["reinforce"] = "reinforce"


class SAPOLossConfig(Section):
    """-(4 / tau) sigmoid(tau (r - 1)) A: a soft gate instead of a clip, with tau 1 where A > 0 and 1.05 elsewhere."""

    kind: Literal["sapo"] = "sapo"


class TOPRLossConfig(Section):
    """-A c where A >= 0. Where A < 0 it is weighed by the trajectory's ratio, at most 1. aggregation=sequence_sum gives
    the paper's scale, a sum over tokens."""

    kind: Literal["topr"] = "topr"


class MirrorDescentLossConfig(Section):
    """-A sum(c) + tau / 2 sum(c - p)^2, sums over a trajectory: Kimi's regularised policy mirror descent.
    aggregation=sequence_sum gives the paper's scale; sequence_mean divides by a trajectory's tokens."""

    kind: Literal["mirror_descent"] = "mirror_descent"
    tau: PositiveFloat = 0.1
    """How strongly trajectories are pulled back."""


class DPPOLossConfig(Section):
    """-A r, without tokens that moved further than delta in total variation and would move on (DPPO-TV). The paper's p
    is the sampler: use proximal=bypassed."""

    kind: Literal["dppo_tv"] = "dppo_tv"
    delta: float = Field(default=0.15, gt=0, le=1)
    """The greatest |exp(c) - exp(p)|: the total variation between token and not-token."""


LossConfig = Annotated[
    ClippedLossConfig
    | ReinforceLossConfig
    | SAPOLossConfig
    | TOPRLossConfig
    | MirrorDescentLossConfig
    | DPPOLossConfig
    | DPOLossConfig
    | KTOLossConfig,
    Field(discriminator="kind"),
]

# Tokens treated apart, over the whole minibatch -----------------------------------------------------------------------


class SecondMomentSelection(Section):
    """Leave out the tokens with the largest (p - b)^2 until its mean is at most `limit` (M2PO). Only tokens that a clip
    could affect count: A > 0 and p > b, or A < 0 and p < b."""

    kind: Literal["second_moment"] = "second_moment"
    limit: PositiveFloat = 0.04
    """The largest mean of (p - b)^2 over the remaining tokens."""


class ClipCovSelection(Section):
    """Leave out random tokens with a covariance of logprob and advantage in [low, high]."""

    kind: Literal["clip_cov"] = "clip_cov"
    share: float = Field(default=2e-4, gt=0, le=1)
    """How many tokens, as a share of all trained tokens; at least one."""
    low: float = 1.0
    """The smallest covariance of a token that may be left out."""
    high: float = 5.0
    """The largest covariance of a token that may be left out."""


class KLCovSelection(Section):
    """Add coefficient * |c - p| to the loss of the share of tokens with the largest covariance."""

    kind: Literal["kl_cov"] = "kl_cov"
    share: float = Field(default=2e-3, gt=0, le=1)
    """How many tokens, as a share of all trained tokens; at least one."""
    coefficient: PositiveFloat = 1.0
    """How strongly these tokens are held."""


SelectionConfig = Annotated[SecondMomentSelection | ClipCovSelection | KLCovSelection, Field(discriminator="kind")]

# What stale tokens weigh ----------------------------------------------------------------------------------------------


class WeightPart(Section):
    """A factor of the behavior weight w, which multiplies each token's loss: exp(p - b), held between two bounds. A
    level alone, such as "token", is one without bounds."""

    level: Literal["token", "sequence", "geometric", "none"]
    """token: exp(p - b) of each token. sequence: the product over its trajectory's trained tokens. geometric: their
    geometric mean. none, as the only part: w is 1, whatever policy sampled the token."""
    lower: float | None = Field(default=None, gt=0)
    """A smaller weight is raised to this. Unset: no lower bound."""
    upper: float | None = Field(default=None, gt=0)
    """A larger weight is lowered to this: truncated importance sampling (TIS). Unset: no upper bound."""

    @model_validator(mode="before")
    @classmethod
    def _of_its_level(cls, given: Any) -> object:
        return {"level": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        _check_order(self.lower, self.upper)
        if self.level == "none" and self._changed("lower", "upper"):
            raise ValueError("level is none, whose weight is 1; it takes no bounds")
        return self


class RejectionPart(Section):
    """Bounds on exp(p - b). What lies outside has weight 0, and still counts in the denominators."""

    level: Literal["token", "sequence", "geometric"]
    """token: rejects each token whose exp(p - b) lies outside (IcePop). sequence: a trajectory, by the product over
    its trained tokens (MIS). geometric: a trajectory, by their geometric mean."""
    lower: float | None = Field(default=None, gt=0)
    """The smallest value that is kept. Unset: any."""
    upper: float | None = Field(default=None, gt=0)
    """The largest value that is kept. Unset: any."""
    veto: bool = False
    """With level token: one token outside rejects its whole trajectory."""
    outward: bool = False
    """With level token: rejects only what A pulls further out, above `upper` with A > 0 or below `lower` with A < 0, as
    PPO's clip does around the sampler's policy. Tokens that come back keep their weight."""

    @model_validator(mode="after")
    def _rejects_something(self) -> Self:
        _check_order(self.lower, self.upper)
        if self.lower is None and self.upper is None:
            raise ValueError("neither lower nor upper is set, so nothing is rejected; set one of them")
        if self.veto and self.level != "token":
            raise ValueError(f"veto is set, but level={self.level} rejects whole trajectories already; leave veto out")
        if self.outward and (self.level != "token" or self.veto):
            raise ValueError(
                "outward is set, which looks at the advantage of single tokens; use level=token without veto"
            )
        if self.outward and not (self.lower or 1) <= 1 <= (self.upper or 1):
            raise ValueError(
                f"outward is set with bounds {self.lower} and {self.upper}; 1, where p is b, must lie between them"
            )
        return self


def _check_order(lower: float | None, upper: float | None) -> None:
    if lower is not None and upper is not None and lower > upper:
        raise ValueError(f"lower is {lower}; it must be at most upper, which is {upper}")


# Penalties ------------------------------------------------------------------------------------------------------------


class KLConfig(Section):
    """A penalty on the distance to a reference policy, with d = c - reference logprob."""

    coefficient: float = Field(default=0.0, ge=0)
    """The factor of the KL. 0: no KL, and no reference policy is held."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. In the loss k1 teaches nothing, k2 has the divergence's gradient on
    fresh tokens, and k3 that of the reverse divergence."""
    place: Literal["loss", "reward"] = "loss"
    """loss: added to each token's loss. reward: subtracted from each token's reward, at p in place of c."""
    update_every: PositiveInt | None = None
    """Every so many batches the reference becomes the current policy. Unset: it stays the run's first model."""


class OverlongConfig(Section):
    """The treatment of trajectories that are too long. Length counts trained tokens, before any masking."""

    mask_truncated: bool = False
    """Do not train trajectories that a length limit ended. Their rewards count in the group's statistics."""
    max_tokens: PositiveInt | None = None
    """Longer trajectories lose `penalty` of their reward, before any statistic. Unset: no penalty."""
    buffer_tokens: NonNegativeInt = 0
    """The penalty rises linearly over this many tokens below max_tokens (DAPO)."""
    penalty: float = Field(default=1.0, ge=0)
    """Subtracted from the reward of a trajectory longer than max_tokens."""

    @model_validator(mode="after")
    def _rises_within_the_limit(self) -> Self:
        if self.max_tokens is None and self.buffer_tokens:
            raise ValueError(f"buffer_tokens is {self.buffer_tokens}, but max_tokens is not set; set it too")
        if self.max_tokens is None and self._changed("penalty"):
            raise ValueError(f"penalty is {self.penalty}, but max_tokens is not set; set it too")
        if self.max_tokens is not None and self.buffer_tokens > self.max_tokens:
            raise ValueError(f"buffer_tokens is {self.buffer_tokens}; it must be at most max_tokens, {self.max_tokens}")
        return self


# The critic -----------------------------------------------------------------------------------------------------------


class CriticConfig(Section):
    """A second model, which predicts returns. It uses `train`, except for the settings here."""

    model: str | None = None
    """A model directory or name. A reward model brings its head. Unset: the policy's model."""
    lr: PositiveFloat = 1e-5
    """The critic's learning rate."""
    warmup_batches: NonNegativeInt = 0
    """For so many batches the critic trains alone, and the policy does not change."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Values are clipped to within this of the values before the update, and the larger loss counts. Unset: no clip."""


# The reward model -----------------------------------------------------------------------------------------------------


class RewardModelConfig(Section):
    """An implicit process reward model (PRIME): a language model that learns from the batches' outcome rewards, between
    0 and 1, how likely an episode succeeds. beta log(its probability / its first model's) of a token is the token's
    process reward. It uses `train`, except for the settings here."""

    model: str | None = None
    """A model directory or name, of the policy's tokenizer. Its weights are the frozen reference, too. Unset: the
    policy's model."""
    lr: PositiveFloat = 1e-6
    """The reward model's learning rate."""
    beta: PositiveFloat = 0.05
    """The factor of log-ratios. A smaller one lets the reward model move further from its reference."""
    update: Literal["before", "after"] = "after"
    """Whether process rewards come from the reward model before or after it has learned from the batch.
    before: it learns first, at the price of one more forward pass (double forward). after: it is asked first."""

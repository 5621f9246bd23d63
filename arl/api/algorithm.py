"""What is learned from a batch, as settings: advantages, policy loss, corrections, penalties, and how they add up.

Letters: R reward, A advantage; c, p, b a token's current, proximal and behavior logprobs; r the ratio, w the behavior
weight. Formulas, papers and what each is for are in docs/algorithms.md. A preset fills in every field; what is given
beside it changes that field alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, cast

from pydantic import Field, ModelWrapValidatorHandler, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from arl.api.objective import (
    AdvantageConfig,
    CISPOLossConfig,
    ClipCovSelection,
    DistillationAdvantage,
    DPPOLossConfig,
    GAEAdvantage,
    GiGPOAdvantage,
    GMPOLossConfig,
    GSPOLossConfig,
    KLCovSelection,
    LossConfig,
    MirrorDescentLossConfig,
    NoSelection,
    PassAtKAdvantage,
    PPOLossConfig,
    ReinforceLossConfig,
    RejectionAdvantage,
    ReturnsAdvantage,
    SAPOLossConfig,
    SecondMomentSelection,
    SelectionConfig,
    TOPRLossConfig,
)
from arl.api.presets import PRESETS, unknown_preset
from arl.api.section import Section

__all__ = [
    "AdvantageConfig",
    "Aggregation",
    "AlgorithmConfig",
    "CISPOLossConfig",
    "ClipCovSelection",
    "CorrectionConfig",
    "CriticConfig",
    "DPPOLossConfig",
    "DistillationAdvantage",
    "GAEAdvantage",
    "GMPOLossConfig",
    "GSPOLossConfig",
    "GiGPOAdvantage",
    "KLConfig",
    "KLCovSelection",
    "LossConfig",
    "MirrorDescentLossConfig",
    "NoSelection",
    "OverlongConfig",
    "PPOLossConfig",
    "PassAtKAdvantage",
    "Proximal",
    "ReinforceLossConfig",
    "RejectionAdvantage",
    "ReturnsAdvantage",
    "SAPOLossConfig",
    "SecondMomentSelection",
    "SelectionConfig",
    "TOPRLossConfig",
    "over",
    "preset",
]


class CorrectionConfig(Section):
    """What becomes of the behavior weight w = exp(p - b), which decoupling multiplies each token's loss with."""

    kind: Literal["none", "truncate", "mask", "icepop"] = "truncate"
    """none: w as it is. truncate: min(w, upper) (TIS). mask: w where w <= upper, else 0 (MIS). icepop: w where
    lower <= w <= upper, else 0."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Whether w is each token's, the product over its trajectory's trained tokens, or their geometric mean."""
    upper: PositiveFloat = 5.0
    lower: float = Field(default=0.5, ge=0)
    veto: float | None = Field(default=None, gt=0, lt=1)
    """A trajectory with a token of exp(p - b) below this has weight 0. Unset: none is vetoed."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.kind == "icepop" and self.lower > self.upper:
            raise ValueError(f"lower is {self.lower}; it must be at most upper, which is {self.upper}")
        if self.kind == "none" and self.upper != type(self).model_fields["upper"].default:
            raise ValueError(f"upper is {self.upper}, but kind=none corrects nothing")
        if self.kind != "icepop" and self.lower != type(self).model_fields["lower"].default:
            raise ValueError(f"lower is {self.lower}, but kind={self.kind} has no lower bound; icepop has one")
        return self


class KLConfig(Section):
    """A penalty on the distance to a reference policy, with d = c - reference logprob."""

    coefficient: float = Field(default=0.0, ge=0)
    """0: none, and no reference policy is held."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d."""
    place: Literal["loss", "reward"] = "loss"
    """loss: added to each token's loss. reward: subtracted from each token's reward, at p in place of c."""
    unbiased: bool = False
    """In the loss: weigh the estimate with the ratio exp(c - b), so that its gradient is that of the divergence itself.
    Without it k1 teaches nothing, k2 is right on-policy, and k3's gradient is that of the divergence turned round."""
    reference: Literal["frozen", "moving"] = "frozen"
    """frozen: the model that the run began with. moving: it follows the trained one."""
    update_every: PositiveInt = 100
    """A moving reference moves each time so many batches were trained."""
    update_share: float = Field(default=1.0, gt=0, le=1)
    """How far towards the current weights: 1 all the way."""

    @model_validator(mode="after")
    def _a_frozen_reference_stands_still(self) -> Self:
        names = ("update_every", "update_share")
        moved = [name for name in names if getattr(self, name) != type(self).model_fields[name].default]
        if self.reference == "frozen" and moved:
            raise ValueError(f"{moved[0]} is set, but reference=frozen does not move; set reference=moving")
        return self


class OverlongConfig(Section):
    """What is done about trajectories that are too long. Length: trained tokens, before any masking."""

    mask_truncated: bool = False
    """Trajectories that a length limit ended are not trained; their rewards count in the group's statistics."""
    max_tokens: PositiveInt | None = None
    """Trajectories longer than this have `penalty` subtracted from their reward, before any statistic. Unset: none."""
    buffer_tokens: NonNegativeInt = 0
    """The penalty rises linearly over the last so many tokens below max_tokens (DAPO)."""
    penalty: float = Field(default=1.0, ge=0)

    @model_validator(mode="after")
    def _rises_within_the_limit(self) -> Self:
        if self.max_tokens is None and self.buffer_tokens:
            raise ValueError(f"buffer_tokens is {self.buffer_tokens}, below a max_tokens that is not set; set it too")
        if self.max_tokens is None and self.penalty != type(self).model_fields["penalty"].default:
            raise ValueError(f"penalty is {self.penalty}, for answers above a max_tokens that is not set; set it too")
        if self.max_tokens is not None and self.buffer_tokens > self.max_tokens:
            raise ValueError(f"buffer_tokens is {self.buffer_tokens}; it must be at most max_tokens, {self.max_tokens}")
        return self


class CriticConfig(Section):
    """The value model: train.optimizer and the rest of `train` hold for it too, but for what is set here."""

    model: str | None = None
    """A model directory or name; one of a reward model begins with its head. Unset: the policy's."""
    backbone: Literal["separate", "shared"] = "separate"
    """separate: a model of its own. shared: a value head on the policy's, trained by the same loss."""
    lr: PositiveFloat = 1e-5
    """The separate critic's learning rate."""
    warmup_batches: NonNegativeInt = 0
    """The critic trains alone for so many batches; the policy stands still meanwhile."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Values are clipped to within this of those before the update, and the worse of both losses counts."""
    coefficient: PositiveFloat = 0.5
    """Share of the value loss in a shared backbone's loss."""

    @model_validator(mode="after")
    def _a_shared_backbone_is_the_policys(self) -> Self:
        apart = ("model", "lr", "warmup_batches")
        changed = [name for name in apart if getattr(self, name) != type(self).model_fields[name].default]
        if self.backbone == "shared" and changed:
            raise ValueError(
                f"{changed[0]} is for a critic of its own; with backbone=shared the model, its learning rate and its "
                "steps are the policy's"
            )
        if self.backbone == "separate" and self.coefficient != type(self).model_fields["coefficient"].default:
            raise ValueError("coefficient is for backbone=shared; a separate critic has a loss and a step of its own")
        return self


Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "group_mean"]
Proximal = Literal["recomputed", "approximated", "bypassed"]


class AlgorithmConfig(Section):
    """Begins from a preset; each field given beside it replaces the preset's, and fields of sections one by one."""

    preset: str = "decoupled_ppo"
    """A name of `arl algorithms`."""
    advantage: AdvantageConfig
    loss: LossConfig
    selection: SelectionConfig
    correction: CorrectionConfig
    kl: KLConfig
    overlong: OverlongConfig
    critic: CriticConfig | None
    """Unset: none. GAE needs one."""
    proximal: Proximal
    """p. recomputed: by a forward pass when the batch is taken (with one minibatch by the one that trains: p = c).
    approximated: between b and c by their versions, without a forward pass. bypassed: p = b, so r = exp(c - b), w = 1.
    """
    aggregation: Aggregation
    """token_mean: each trained token of the minibatch weighs the same. sequence_mean: each trajectory does.
    sequence_sum: each token weighs 1 / (trajectories * sequence_tokens). group_mean: each group weighs the same."""
    sequence_tokens: PositiveInt
    """The constant of sequence_sum: the most tokens that a trajectory may have."""
    entropy: float = Field(ge=0)
    """Entropy bonus: this times the entropy is subtracted from each token's loss."""
    dynamic_sampling: bool
    """Reject groups whose episodes all have the same reward: they carry no gradient, and their place is refilled."""
    epochs: PositiveInt
    """How often each batch is gone through."""
    minibatches: PositiveInt
    """Optimizer steps per epoch: the batch's groups are split into this many minibatches."""

    @model_validator(mode="wrap")
    @classmethod
    def _over_the_preset(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(given, Mapping):
            return handler(given)
        settings = cast("Mapping[str, Any]", given)
        name = settings.get("preset", cls.model_fields["preset"].default)
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(unknown_preset(name))
        config = handler(over(PRESETS[name].settings, settings))
        # What the preset filled in is not what was given: another preset may fill it in otherwise.
        object.__setattr__(config, "__pydantic_fields_set__", set(settings))
        return config

    @property
    def num_updates(self) -> int:
        """Optimizer steps per batch."""
        return self.epochs * self.minibatches

    @property
    def needs_proximal_forward(self) -> bool:
        """Whether p has to be known before the first update on a batch."""
        recomputed = self.proximal == "recomputed" and self.num_updates > 1
        in_advantages = isinstance(self.advantage, DistillationAdvantage) or self.has_kl_in_reward
        return recomputed or (in_advantages and self.proximal == "recomputed") or self.selection.kind != "none"

    @property
    def has_kl_in_reward(self) -> bool:
        return self.kl.coefficient > 0 and self.kl.place == "reward"

    @property
    def is_group_relative(self) -> bool:
        """Whether a trajectory's advantage comes from others of its group, so that one alone learns nothing."""
        if isinstance(self.advantage, ReturnsAdvantage):
            return self.advantage.baseline in ("group_mean", "leave_one_out", "length_weighted")
        return isinstance(self.advantage, PassAtKAdvantage | GiGPOAdvantage)

    @property
    def needs_greedy_episode(self) -> bool:
        return isinstance(self.advantage, ReturnsAdvantage) and self.advantage.baseline == "greedy"

    @model_validator(mode="after")
    def _parts_make_sense_together(self) -> Self:
        for is_nonsense, reason in self._contradictions():
            if is_nonsense:
                raise ValueError(reason)
        return self

    def _contradictions(self) -> list[tuple[bool, str]]:
        """(whether it is so, why it makes no sense)"""
        kind, in_reward = self.advantage.kind, self.has_kl_in_reward
        in_loss = self.kl.coefficient > 0 and not in_reward
        is_bypassed, is_approximated = self.proximal == "bypassed", self.proximal == "approximated"
        is_separate = isinstance(self.advantage, ReturnsAdvantage) and self.advantage.separate_rewards
        unknown = "proximal=approximated knows p only during an update, not before the first; use proximal=recomputed"
        is_single = self.num_updates == 1
        unmoved = "but with one update per batch c - p is 0; use minibatches=2, or proximal=bypassed"
        no_weight = "with proximal=bypassed there is no weight exp(p - b)"
        teaches = f"with advantage.kind={kind} as it is set, groups of equal rewards teach something"
        return [
            (kind == "gae" and self.critic is None, "advantage.kind is gae, which needs a critic's values; set critic"),
            (
                kind != "gae" and self.critic is not None,
                f"critic is set, but advantage.kind={kind} does not ask it; use gae, or no critic",
            ),
            (
                is_bypassed and self.correction.kind != "none",
                f"correction.kind is {self.correction.kind}, but {no_weight}; use none, or proximal=recomputed",
            ),
            (is_bypassed and self.correction.veto is not None, f"correction.veto is set, but {no_weight} to look at"),
            (
                is_approximated and self.selection.kind != "none",
                f"selection.kind is {self.selection.kind}, and {unknown}",
            ),
            (
                self.selection.kind == "kl_cov" and is_single and not is_bypassed,
                f"selection.kind is kl_cov, which holds tokens back by c - p, {unmoved}",
            ),
            (
                self.loss.kind == "mirror_descent" and is_single and not is_bypassed,
                f"loss.kind is mirror_descent, which pulls back by c - p, {unmoved}",
            ),
            (
                is_approximated and is_single,
                "proximal is approximated, but with one update per batch p is c, which costs nothing; use recomputed",
            ),
            (is_approximated and kind == "distillation", f"advantage.kind is distillation, and {unknown}"),
            (
                in_loss and self.kl.estimator == "k1" and not self.kl.unbiased,
                (
                    "kl.estimator is k1 in the loss, whose gradient knows no reference; use k2 or k3, set "
                    "kl.unbiased, or use kl.place=reward"
                ),
            ),
            (
                in_reward and self.overlong.mask_truncated and self.is_group_relative,
                (
                    "kl.place is reward, but what overlong.mask_truncated leaves out has no KL, and would be "
                    "compared with those that have one; use kl.place=loss"
                ),
            ),
            (is_approximated and in_reward, f"kl.place is reward, and {unknown}, or kl.place=loss"),
            (
                in_reward and kind in ("pass_at_k", "rejection", "gigpo", "distillation"),
                f"kl.place is reward, but advantage.kind={kind} compares rewards as they are; use kl.place=loss",
            ),
            (
                in_reward and self.kl.unbiased,
                "kl.unbiased is about the gradient of a KL in the loss, but kl.place is reward",
            ),
            (
                in_reward and is_separate,
                "kl.place is reward, but advantage.separate_rewards scales its coefficient away; use kl.place=loss",
            ),
            (self.dynamic_sampling and not self.is_group_relative, f"dynamic_sampling is set, but {teaches}"),
            (
                self.dynamic_sampling and in_reward,
                "dynamic_sampling is set, but with kl.place=reward a group of equal rewards is not equal",
            ),
            (
                is_separate and self.needs_greedy_episode,
                "advantage.separate_rewards needs the group's own rewards; a greedy baseline has one reward alone",
            ),
        ]


def preset(name: str, **changes: Any) -> AlgorithmConfig:
    """The preset of that name with fields changed: preset("dapo", loss={"clip_high": 0.3}, epochs=2)."""
    return AlgorithmConfig.model_validate({"preset": name, **changes})


def over(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` laid over `base`, section by section; one of another kind than the base's, or an object, stands alone."""
    merged = {**base, **given}
    for name in base.keys() & given.keys():
        below, above = base[name], given[name]
        if isinstance(below, Mapping) and isinstance(above, Mapping):
            below, above = cast("Mapping[str, Any]", below), cast("Mapping[str, Any]", above)
            merged[name] = over(below, above) if above.get("kind", below.get("kind")) == below.get("kind") else above
    return merged

"""An algorithm as settings: advantages, policy loss, weights, penalties, and how token losses add up.

Letters: R reward, A advantage; c, p, b a token's current, proximal and behavior logprobs; r the ratio, w the behavior
weight. Formulas, papers and the purpose of each part are in docs/algorithms.md. A preset fills in every field; a field
given beside it changes that field alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Literal, Self, cast

from pydantic import Field, ModelWrapValidatorHandler, PositiveInt, ValidationError, model_validator

from arl.api.settings.objective import (
    AdvantageConfig,
    ClippedLossConfig,
    CriticConfig,
    DistillationAdvantage,
    GAEAdvantage,
    GiGPOAdvantage,
    KLConfig,
    KLCovSelection,
    LabelsAdvantage,
    LossConfig,
    MaxLikelihoodAdvantage,
    OverlongConfig,
    PairsAdvantage,
    PassAtKAdvantage,
    RejectionPart,
    ReturnsAdvantage,
    RewardModelConfig,
    SelectionConfig,
    WeightPart,
)
from arl.api.settings.presets import BASE, PRESETS, unknown_preset
from arl.api.settings.sections import Section, config_error, laid_over

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "group_mean"]
Proximal = Literal["recomputed", "approximated", "bypassed"]


class AlgorithmConfig(Section):
    """Begins from a preset. Each field given beside it replaces the preset's, in sections too."""

    preset: str = "decoupled_ppo"
    """The preset that the other settings begin from; docs/algorithms.md lists them."""
    advantage: AdvantageConfig
    """How rewards become advantages."""
    loss: LossConfig
    """The policy's loss, a function of advantages and ratios."""
    selection: SelectionConfig | None
    """Tokens that the loss treats apart. Unset: none."""
    weights: tuple[WeightPart, ...]
    """The factors of w, which multiplies each token's loss: {"level": "token", "lower": 0.1, "upper": 5} is exp(p - b)
    held between 0.1 and 5. Empty, with proximal=bypassed: no weight."""
    rejections: tuple[RejectionPart, ...]
    """Bounds on exp(p - b), outside which a token or trajectory has weight 0: {"level": "geometric", "lower": 0.99,
    "upper": 1.01}; all of them hold. Empty: nothing is rejected."""
    kl: KLConfig
    overlong: OverlongConfig
    critic: CriticConfig | None
    """Unset: none. GAE needs one."""
    reward_model: RewardModelConfig | None
    """An implicit process reward model, trained beside the policy. Unset: none."""
    proximal: Proximal
    """The source of p. recomputed: a forward pass when the batch is taken; with one update per batch the training pass
    itself, so p = c. approximated: between b and c by their versions, without a forward pass. bypassed: p = b, so
    r = exp(c - b) and w = 1."""
    aggregation: Aggregation
    """token_mean: each trained token of the minibatch weighs the same. sequence_mean: each episode does, once for each
    role. sequence_sum: each token weighs 1 / (episodes * sequence_tokens). group_mean: each group weighs the same."""
    sequence_tokens: PositiveInt
    """The constant of sequence_sum: the most tokens that a trajectory may have."""
    entropy: float = Field(ge=0)
    """The entropy bonus: this times the entropy is subtracted from each token's loss."""
    dynamic_sampling: bool
    """Reject groups with equal rewards in all episodes. They carry no gradient, and new groups take their place."""
    epochs: PositiveInt
    """How many times each batch is trained."""
    minibatches: PositiveInt
    """Optimizer steps per epoch: the batch's groups are split into this many minibatches."""

    @model_validator(mode="wrap")
    @classmethod
    def _over_the_preset(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(given, str):
            if given not in PRESETS:
                raise ValueError(unknown_preset(given))
            raise ValueError(
                f"{given!r} was given for a whole section; write preset({given!r}), in a file {{preset: {given}}}, or "
                f"--algorithm.preset {given}"
            )
        if not isinstance(given, Mapping):
            return handler(given)
        settings = cast("Mapping[str, Any]", given)
        name = settings.get("preset", cls.model_fields["preset"].default)
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(unknown_preset(name))
        config = handler(laid_over({"preset": name, **PRESETS[name].settings}, settings))
        # The preset's fields do not count as given: another preset may fill them in differently.
        object.__setattr__(config, "__pydantic_fields_set__", set(settings))
        return config

    @property
    def trained_models(self) -> tuple[str, ...]:
        """The models that a batch trains, by role: the policy, and the critic or reward model beside it."""
        beside = {"critic": self.critic, "reward_model": self.reward_model}
        return ("policy", *(role for role, model in beside.items() if model is not None))

    @property
    def num_updates(self) -> int:
        """Optimizer steps per batch."""
        return self.epochs * self.minibatches

    @property
    def needs_proximal_forward(self) -> bool:
        """Whether p must be known before the first update on a batch."""
        recomputed = self.proximal == "recomputed" and self.num_updates > 1
        in_advantages = isinstance(self.advantage, DistillationAdvantage) or self.has_kl_in_reward
        in_batch = self.selection is not None or self.loss.kind == "kto"  # also where p is bypassed
        return recomputed or (in_advantages and self.proximal == "recomputed") or in_batch

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy is held."""
        return self.kl.coefficient > 0 or self.compares_episodes

    @property
    def compares_episodes(self) -> bool:
        """Whether the loss is one of whole episodes, or of pairs of them, and not a sum over tokens."""
        return self.loss.kind in ("dpo", "kto")

    @property
    def has_critic_of_turns(self) -> bool:
        """Whether the critic values the contexts in which turns begin, and no others."""
        return isinstance(self.advantage, GAEAdvantage) and self.advantage.level == "turn"

    @property
    def has_ratios_of_turns(self) -> bool:
        """Whether the loss has one ratio for each turn."""
        return isinstance(self.loss, ClippedLossConfig) and self.loss.level == "turn"

    @property
    def has_kl_in_reward(self) -> bool:
        return self.kl.coefficient > 0 and self.kl.place == "reward"

    @property
    def is_group_relative(self) -> bool:
        """Whether a trajectory's advantage depends on others of its group, so that a single one learns nothing."""
        if isinstance(self.advantage, ReturnsAdvantage):
            return self.advantage.is_relative
        if isinstance(self.advantage, LabelsAdvantage):
            return self.advantage.threshold is None
        return isinstance(self.advantage, PassAtKAdvantage | MaxLikelihoodAdvantage | GiGPOAdvantage | PairsAdvantage)

    @property
    def needs_greedy_episode(self) -> bool:
        return isinstance(self.advantage, ReturnsAdvantage) and self.advantage.baseline == "greedy"

    @model_validator(mode="after")
    def _parts_make_sense_together(self) -> Self:
        for reason in chain(
            self._advantage_contradictions(),
            self._comparison_contradictions(),
            self._proximal_contradictions(),
            self._weight_contradictions(),
            self._kl_contradictions(),
        ):
            raise ValueError(reason)
        return self

    def _advantage_contradictions(self) -> Iterator[str]:
        kind = self.advantage.kind
        if kind == "gae" and self.critic is None:
            yield "advantage.kind is gae, which needs a critic's values; set critic"
        if kind != "gae" and self.critic is not None:
            yield f"critic is set, but advantage.kind={kind} does not use it; use gae, or no critic"
        if self.reward_model and kind != "returns":
            yield f"reward_model is set, but advantage.kind={kind} does not use its process rewards; use returns"
        if self.reward_model and self._has_separate_rewards:
            yield "reward_model learns from `reward`, which advantage.separate_rewards ignores; leave one of them out"
        if self._has_separate_rewards and self.needs_greedy_episode:
            yield "advantage.separate_rewards needs the group's own rewards; a greedy baseline has only one reward"
        if self.dynamic_sampling and not self.is_group_relative:
            yield (
                f"dynamic_sampling is set, but with advantage.kind={kind} as it is set, groups of equal rewards teach "
                "something"
            )

    def _comparison_contradictions(self) -> Iterator[str]:
        """Of losses that are one number for a whole episode or pair."""
        kind, needed = self.advantage.kind, {"dpo": "pairs", "kto": "labels"}
        for loss, advantage in needed.items():
            if (self.loss.kind == loss) != (kind == advantage):
                yield f"loss.kind is {self.loss.kind}, advantage.kind {kind}; {loss} and {advantage} need each other"
        if not self.compares_episodes:
            return
        unit = "pair" if self.loss.kind == "dpo" else "episode"
        if self.aggregation != "sequence_mean":
            yield (
                f"aggregation is {self.aggregation}, but loss.kind={self.loss.kind} is one number for each {unit}, "
                "whatever its length; use aggregation=sequence_mean"
            )
        if self.selection is not None:
            yield (
                f"selection.kind is {self.selection.kind}, which chooses among losses of tokens, but "
                f"loss.kind={self.loss.kind} has none; leave selection out"
            )
        for name, parts in (("weights", self.weights), ("rejections", self.rejections)):
            if "token" in [part.level for part in parts]:
                yield (
                    f"{name} has a part of level token, but loss.kind={self.loss.kind} is one number for each {unit}; "
                    "use level sequence or geometric, which then look at all of its tokens, or none"
                )

    def _proximal_contradictions(self) -> Iterator[str]:
        if self.proximal == "approximated":
            yield from self._approximated_contradictions()
        if self.proximal != "recomputed" or self.num_updates > 1:
            return
        # With one update per batch c equals p at the only gradient, and r is 1.
        unmoved = "but with one update per batch c - p is 0; use minibatches=2, or proximal=bypassed"
        if isinstance(self.selection, KLCovSelection):
            yield f"selection.kind is kl_cov, which holds tokens back by c - p, {unmoved}"
        if self.loss.kind == "mirror_descent":
            yield f"loss.kind is mirror_descent, which pulls back by c - p, {unmoved}"
        for name, bound in self._chosen("loss").items() if not self.compares_episodes else ():
            if bound is not None:
                yield f"loss.{name} is {bound}, which holds tokens back by c - p, {unmoved}"

    def _approximated_contradictions(self) -> Iterator[str]:
        unknown = "proximal=approximated knows p only during an update, not before the first; use proximal=recomputed"
        if self.selection is not None:
            yield f"selection.kind is {self.selection.kind}, and {unknown}"
        if self.advantage.kind == "distillation":
            yield f"advantage.kind is distillation, and {unknown}"
        if self.loss.kind == "kto":
            yield f"loss.kind is kto, whose reference point is a KL at p, and {unknown}"
        if self.has_kl_in_reward:
            yield f"kl.place is reward, and {unknown}, or kl.place=loss"
        if self.num_updates == 1:
            yield "proximal is approximated, but with one update per batch p is c, which costs nothing; use recomputed"

    def _weight_contradictions(self) -> Iterator[str]:
        levels = [part.level for part in self.weights]
        if self.proximal == "bypassed":
            of = "with proximal=bypassed there is no exp(p - b)"
            if levels:
                also = " and rejections=[]" if self.rejections else ""
                yield f"weights has a part of level {levels[0]}, but {of} to weigh by; set weights=[]{also}"
            if self.rejections:
                level = self.rejections[0].level
                yield f"rejections has a part of level {level}, but {of} to look at; set rejections=[]"
        if not levels and self.proximal != "bypassed":
            yield (
                f"weights is empty, but with proximal={self.proximal} a token counts by exp(p - b); use "
                'weights=["token"] for that number without bounds, ["none"] to give every token the weight 1'
            )
        if "none" in levels and len(levels) > 1:
            yield "weights has a part of level none beside others; it means that w is 1, so it stands alone"
        for level in (level for level in dict.fromkeys(levels) if levels.count(level) > 1):
            yield f"weights has two parts of level {level}, whose product would be its square; leave one out"
        usual = (BASE["sequence_tokens"], PRESETS[self.preset].settings["sequence_tokens"])
        if self.aggregation != "sequence_sum" and self.sequence_tokens not in usual:
            yield (
                f"sequence_tokens is {self.sequence_tokens}, but aggregation={self.aggregation} does not divide by it; "
                "use aggregation=sequence_sum"
            )

    def _kl_contradictions(self) -> Iterator[str]:
        kl = self.kl
        if kl.coefficient == 0:
            for name, value in self._chosen("kl").items():
                if name == "update_every" and self.compares_episodes:
                    continue
                yield f"kl.{name} is {value}, but kl.coefficient is 0, so no reference is held; set kl.coefficient"
        elif kl.place == "reward":
            yield from self._kl_in_reward_contradictions()
        elif kl.estimator == "k1":
            yield (
                "kl.estimator is k1 in the loss, whose gradient ignores the reference; use k2 or k3, or kl.place=reward"
            )

    def _kl_in_reward_contradictions(self) -> Iterator[str]:
        kind = self.advantage.kind
        if kind in ("pass_at_k", "max_likelihood", "rejection", "gigpo", "pairs", "labels", "distillation"):
            yield f"kl.place is reward, but advantage.kind={kind} compares rewards as they are; use kl.place=loss"
        if self._has_separate_rewards:
            yield "kl.place is reward, but advantage.separate_rewards scales its coefficient away; use kl.place=loss"
        if self.overlong.mask_truncated and self.is_group_relative:
            yield (
                "kl.place is reward, but what overlong.mask_truncated leaves out has no KL, and would be compared with "
                "those that have one; use kl.place=loss"
            )
        if self.dynamic_sampling:
            yield "dynamic_sampling is set, but with kl.place=reward a group of equal rewards is not equal"

    @property
    def _has_separate_rewards(self) -> bool:
        return isinstance(self.advantage, ReturnsAdvantage) and self.advantage.separate_rewards

    def _chosen(self, section: str) -> dict[str, object]:
        """The section's settings that the user chose: neither the preset's values nor the defaults.

        A preset's own settings may have no effect, such as the rest of its KL beside coefficient=0.
        """
        part: Section = getattr(self, section)
        of_preset = PRESETS[self.preset].settings[section]
        values = {name: getattr(part, name) for name in part._changed(*type(part).model_fields)}
        return {name: value for name, value in values.items() if value != of_preset.get(name)}


def preset(name: str, **changes: Any) -> AlgorithmConfig:
    """The preset of that name with fields changed: preset("dapo", loss={"clip_high": 0.3}, epochs=2).

    Raises ConfigError, which names the wrong value and the allowed ones.
    """
    try:
        return AlgorithmConfig.model_validate({"preset": name, **changes})
    except ValidationError as error:
        raise config_error(AlgorithmConfig, error) from None

"""The losses of reinforcement learning: the policy's, built from orthogonal parts, and the critic's.

    policy = w (surrogate(c, p, A) + the selection's term) + coefficient * KL(c || reference) - entropy * H

Losses of pairs and of whole episodes (arl.algorithm.losses.preferences) take the surrogate's place.
c current, p proximal, b behavior logprobs; A advantage; w behavior weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from arl.algorithm.losses.preferences import preference
from arl.algorithm.losses.surrogates import MAX_LOG_RATIO, ROUNDING, SURROGATES, PolicyTokens, Trajectories, clamped
from arl.api.settings.algorithm import AlgorithmConfig
from arl.api.settings.objective import DPOLossConfig, KLCovSelection, KTOLossConfig, RejectionPart, WeightPart
from arl.api.train_engine import PackedTokens, TokenLosses, TokenOutputs

Estimator = Literal["k1", "k2", "k3"]

STALENESS_BUCKETS = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, None))
"""The buckets of the metrics by staleness: first and last staleness of each. The last bucket has no end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A TokenLoss for every AlgorithmConfig. Metrics, over all trained tokens:

    ratio, ratio_max             exp(c - p) of each token
    trajectory_ratio, .._max     the one ratio of its trajectory (or turn) that gspo, gmpo and topr bound instead
    clip_fraction                share of tokens that the surrogate's trust region holds back; each says how
    behavior_weight, .._max      w, bounded, and 0 for rejected tokens
    behavior_weight_zero         share of tokens that a rejection took out
    behavior_kl_proximal         estimate of KL(b || p), where p is known
    behavior_kl_current          estimate of KL(b || c)
    effective_sample_size        of the weights w; of exp(c - b) where p is bypassed
    entropy                      of the sampling distribution
    kl_reference                 k3 estimate of KL(c || reference), if there is a reference policy
    selected                     share of tokens that the selection chose, with a selection
    staleness_K/...              ratio, clip_fraction, behavior_kl_proximal, behavior_kl_current and entropy of the
                                 tokens of staleness K (`3-4`, .., `17+`), and their share of all: tokens
    """

    config: AlgorithmConfig
    proximal: Literal["recomputed", "current", "approximated", "bypassed"]
    """The source of p. recomputed: tokens.proximal_logprobs. current: c, detached; before a batch's first optimizer
    step recomputing gives the same. approximated: from c, b and versions. bypassed: p = b, so r = exp(c - b) and w = 1.
    """
    version: int
    """The version of the weights with which the batch was taken."""
    max_staleness: int
    """The run's bound, which sets the buckets of the metrics by staleness."""
    keeps_tokens: bool = False
    """Keep each token's current_logprobs, proximal_logprobs (where known), weights (w), clipped and entropy."""

    @classmethod
    def of(
        cls, config: AlgorithmConfig, *, version: int = 0, max_staleness: int = 0, keeps_tokens: bool = False
    ) -> PolicyLoss:
        is_current = config.proximal == "recomputed" and not config.needs_proximal_forward
        return cls(
            config=config,
            proximal="current" if is_current else config.proximal,
            version=version,
            max_staleness=max_staleness,
            keeps_tokens=keeps_tokens,
        )

    def __call__(self, outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
        config, current, behavior = self.config, outputs.logprobs, tokens.behavior_logprobs
        proximal = self._proximal_logprobs(current, tokens)
        whole = parts = Trajectories.of(tokens.sequence_ids)
        if config.has_ratios_of_turns:
            parts = Trajectories.of_turns(tokens.sequence_ids, tokens.turn_starts)
        terms = PolicyTokens(current=current, proximal=proximal, advantages=tokens.advantages, trajectories=parts)
        if isinstance(config.loss, DPOLossConfig | KTOLossConfig):
            policy, whole = preference(current, tokens, config.loss), Trajectories.of_units(tokens.unit_ids)
        else:
            policy = SURROGATES[config.loss.kind](terms, config.loss)
        of_trajectory = policy.trajectory_ratio
        weight = behavior_weight(proximal - behavior, tokens.advantages, whole, config.weights, config.rejections)
        loss = weight * self._selected(policy.loss, terms, tokens)
        if config.kl.coefficient > 0 and config.kl.place == "loss":
            distance = kl_estimate(current - tokens.reference_logprobs, config.kl.estimator)
            loss = loss + config.kl.coefficient * distance
        if config.entropy > 0:
            loss = loss - config.entropy * outputs.entropy
        # A bypassed p may be known all the same.
        known = tokens.proximal_logprobs if self.proximal == "bypassed" else proximal
        is_known = self.proximal != "bypassed" or config.needs_proximal_forward
        from_reference = current.detach() - tokens.reference_logprobs
        values = {
            "ratio": terms.ratio.detach(),
            "clip_fraction": policy.is_clipped.to(current.dtype),
            **({"behavior_kl_proximal": divergence_from_sampler(known - behavior)} if is_known else {}),
            "behavior_kl_current": divergence_from_sampler(current.detach() - behavior),
            "entropy": outputs.entropy.detach(),
        }
        kept = {
            "current_logprobs": current.detach(),
            **({"proximal_logprobs": known} if is_known else {}),
            "weights": weight,
            "clipped": values["clip_fraction"],
            "entropy": values["entropy"],
        }
        return TokenLosses(
            loss=loss,
            kept=kept if self.keeps_tokens else {},
            means={
                **values,
                "behavior_weight": weight,
                "behavior_weight_zero": (weight == 0).to(weight.dtype),
                **({} if of_trajectory is None else {"trajectory_ratio": of_trajectory}),
                **({"kl_reference": kl_estimate(from_reference, "k3")} if config.needs_reference else {}),
                **({"selected": tokens.selected.to(current.dtype)} if config.selection else {}),
            },
            maxima={
                "ratio_max": values["ratio"],
                "behavior_weight_max": weight,
                **({} if of_trajectory is None else {"trajectory_ratio_max": of_trajectory}),
            },
            weighted=policy.weighted,
            quotients={**policy.quotients, **self._by_staleness(values, tokens.versions)},
            sample_sizes={"effective_sample_size": values["ratio"] if self.proximal == "bypassed" else weight},
        )

    def _proximal_logprobs(self, current: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
        """approximated: log-linear between b and c by their versions (A-3PO, 2512.06547), without a forward pass.

            p = b + a (c - b)        a = (v_p - v_b) / (v_c - v_b)

        v_b is the token's own version, v_p = `version`, v_c = v_p + 1 the version that the batch's training makes. A
        token of staleness 0 has p = b.
        """
        behavior = tokens.behavior_logprobs
        if self.proximal == "current":
            return current.detach()
        if self.proximal == "bypassed":
            return behavior
        if self.proximal == "recomputed":
            return tokens.proximal_logprobs
        staleness = (self.version - tokens.versions).clamp(min=0).to(behavior.dtype)
        return behavior + staleness / (staleness + 1) * (current.detach() - behavior)

    def _selected(self, loss: torch.Tensor, terms: PolicyTokens, tokens: PackedTokens) -> torch.Tensor:
        """M2PO and Clip-Cov: no loss for selected tokens. KL-Cov: `coefficient` |c - p| more."""
        selection = self.config.selection
        if isinstance(selection, KLCovSelection):
            distance = terms.log_ratio.abs()
            # Before the first update c - p is rounding between two forward passes. Its sign means nothing.
            distance = torch.where(distance < ROUNDING, distance.detach(), distance)
            return loss + selection.coefficient * distance * tokens.selected
        return loss if selection is None else loss * ~tokens.selected

    def _by_staleness(
        self, values: Mapping[str, torch.Tensor], versions: torch.Tensor
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        if self.max_staleness == 0:
            return {}
        quotients: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        staleness, dtype = self.version - versions, values["ratio"].dtype
        for first, last in STALENESS_BUCKETS:
            if first > self.max_staleness:
                break
            is_inside = (staleness >= first) & (staleness <= (self.max_staleness if last is None else last))
            inside = is_inside.to(dtype)
            name = f"staleness_{first}" + ("+" if last is None else f"-{last}" if last > first else "")
            quotients[f"{name}/tokens"] = (inside, torch.ones_like(inside))
            quotients |= {f"{name}/{metric}": (value * inside, inside) for metric, value in values.items()}
        return quotients


def behavior_weight(
    log_weight: torch.Tensor,
    advantages: torch.Tensor,
    trajectories: Trajectories,
    weights: Sequence[WeightPart],
    rejections: Sequence[RejectionPart],
) -> torch.Tensor:
    """w float[M], detached, from log_weight = p - b and advantages A: the weight of decoupled PPO (2110.00641).

        level: token      x = exp(p - b)
               sequence   x = exp(sum(p - b)), the product over the trajectory's trained tokens
               geometric  x = exp(mean(p - b))
               none       x = 1
        w = product of clip(x, lower, upper) over `weights`    truncated importance sampling (IMPALA, 1802.01561)
        w = 0 where lower <= x <= upper fails for any of `rejections`    masks: IcePop (2510.18855), MIS; with veto, for
                                                                         any token of the trajectory; with
                                                                         outward, only where A (p - b) > 0

    A token of weight 0 still counts in the denominators of loss_weights.
    """
    log_weight = log_weight.detach()
    weight = torch.ones_like(log_weight)

    def at_level(level: str) -> torch.Tensor:
        if level == "sequence":
            return trajectories.sums(log_weight)
        return trajectories.means(log_weight) if level == "geometric" else log_weight

    for part in weights:
        if part.level != "none":
            weight = weight * _held(torch.exp(clamped(at_level(part.level))), part)
    for part in rejections:
        # Not clamped: bounds may lie far out, and an infinite value is outside.
        value = torch.exp(at_level(part.level))
        is_outside = _held(value, part) != value
        if part.outward:
            is_outside &= advantages * log_weight > 0
        if part.veto:
            is_outside = trajectories.sums(is_outside.to(weight.dtype)) > 0
        weight = weight * ~is_outside
    return weight


def _held(values: torch.Tensor, part: WeightPart | RejectionPart) -> torch.Tensor:
    """The values between the part's bounds."""
    if part.lower is None and part.upper is None:
        return values
    return values.clamp(part.lower, part.upper)


def kl_estimate(log_ratio: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """k1, k2 or k3 of d = log_ratio, float[M].

    Beyond +-MAX_LOG_RATIO k2 continues as a straight line. Below -MAX_LOG_RATIO k3 is constant.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return F.huber_loss(log_ratio, torch.zeros_like(log_ratio), reduction="none", delta=MAX_LOG_RATIO)
    # d >= 20 needs no bound, because exp(-d) only vanishes. It must keep the gradient that pulls it back.
    d = log_ratio.clamp(min=-MAX_LOG_RATIO)
    return torch.expm1(-d) + d


def divergence_from_sampler(log_ratio: torch.Tensor) -> torch.Tensor:
    """k3 from the other side: the mean of exp(x) - 1 - x, x = log(. / b), over tokens from b estimates KL(b || .)."""
    x = clamped(log_ratio)
    return torch.expm1(x) - x


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Clipped value loss (PPO's implementation; 2403.17031, section "value clipping"):

        max((V - G)^2, (clip(V, V0 - value_clip, V0 + value_clip) - G)^2) / 2

    V is the value now, V0 the value before any update on the batch, G the return.
    """

    value_clip: float | None

    def __call__(self, outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
        values, returns = outputs.values, tokens.returns
        unclipped = (values - returns).square()
        clipped = unclipped
        if self.value_clip is not None:
            # V0 + clip(V - V0) would differ from V by rounding where nothing is clipped, and count as clipped.
            near = values.clamp(tokens.values - self.value_clip, tokens.values + self.value_clip)
            clipped = (near - returns).square()
        error = (values - returns).detach()
        return TokenLosses(
            loss=torch.maximum(unclipped, clipped) / 2,
            means={
                "value": values.detach(),
                "value_error": error.abs(),
                "value_clip_fraction": (clipped > unclipped).detach().float(),
            },
        )

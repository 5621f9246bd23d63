"""Slow references of the losses: scalars, loops and the math module, after the papers' formulas.

A loss is a function of `current`, the logprobs of one trajectory's trained tokens, and of `fixed`, their values where
the derivative is taken. Whatever the papers put under a stop-gradient is computed from `fixed`. So
`gradient`, which moves `current`, differentiates what they differentiate.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from arl.api.settings.algorithm import AlgorithmConfig
from arl.api.settings.objective import (
    ClipCovSelection,
    KLCovSelection,
    RejectionPart,
    SecondMomentSelection,
    WeightPart,
)
from arl.api.train_engine import PackedTokens

Logprobs = Sequence[float]
Signs = Sequence[int]
TokenForm = Callable[[Logprobs, Logprobs, Logprobs, Logprobs, Any], list[float]]
"""The loss of each token from current, fixed and proximal logprobs, advantages, and the loss's settings."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The trained tokens of one trajectory."""

    current: Logprobs
    proximal: Logprobs
    behavior: Logprobs
    reference: Logprobs
    advantages: Logprobs
    versions: Sequence[int]
    selected: Sequence[bool]
    weight: float
    """loss_weights of each of them."""
    later_turns: Sequence[int] = ()
    """Where turns begin, beside the first."""

    @property
    def turns(self) -> list[slice]:
        begins = [0, *self.later_turns]
        return [slice(*pair) for pair in itertools.pairwise([*begins, len(self.current)])]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


# Surrogates, token by token -------------------------------------------------------------------------------------------


def ppo(current: Logprobs, _fixed: Logprobs, proximal: Logprobs, advantages: Logprobs, config) -> list[float]:
    losses = []
    for c, p, a in zip(current, proximal, advantages, strict=True):
        r = math.exp(c - p)
        clipped = r
        if config.clip_high is not None:
            clipped = min(clipped, 1 + config.clip_high)
        if config.clip_low is not None:
            clipped = max(clipped, 1 - config.clip_low)
        objective = min(a * r, a * clipped)
        if config.dual_clip is not None and a < 0:
            objective = max(objective, config.dual_clip * a)
        losses.append(-objective)
    return losses


def reinforce(current: Logprobs, _fixed: Logprobs, _proximal: Logprobs, advantages: Logprobs, _config) -> list[float]:
    return [-a * c for c, a in zip(current, advantages, strict=True)]


def gspo(current: Logprobs, proximal: Logprobs, a: float, _signs: Signs, config) -> float:
    s = math.prod(math.exp(c - p) for c, p in zip(current, proximal, strict=True)) ** (1 / len(current))
    return -min(s * a, clip(s, 1 - config.clip_low, 1 + config.clip_high) * a)


def gmpo(current: Logprobs, proximal: Logprobs, a: float, signs: Signs, config) -> float:
    product = 1.0
    for c, p, sign in zip(current, proximal, signs, strict=True):
        ratio = math.exp(c - p)
        clipped = clip(ratio, math.exp(-config.clip_low), math.exp(config.clip_high))
        product *= min(ratio**sign, clipped**sign) ** sign
    return -a * product ** (1 / len(current))


def of_mean(whole: Callable[[Logprobs, Logprobs, float, Signs, Any], float]) -> TokenForm:
    """A loss that is a mean over the trajectory's n tokens, as each token has it by its own advantage: the value of
    the whole, and n times its slope by the token's own logprob."""

    def form(current: Logprobs, fixed: Logprobs, proximal: Logprobs, advantages: Logprobs, config) -> list[float]:
        signs, losses = [1 if a >= 0 else -1 for a in advantages], []
        for t, a in enumerate(advantages):
            value = whole(fixed, proximal, a, signs, config)
            moved = whole([*fixed[:t], current[t], *fixed[t + 1 :]], proximal, a, signs, config)
            losses.append(value + len(fixed) * (moved - value))
        return losses

    return form


def cispo(current: Logprobs, fixed: Logprobs, proximal: Logprobs, advantages: Logprobs, config) -> list[float]:
    losses = []
    for c, f, p, a in zip(current, fixed, proximal, advantages, strict=True):
        weight = min(math.exp(f - p), 1 + config.clip_high)
        if config.clip_low is not None:
            weight = max(weight, 1 - config.clip_low)
        losses.append(-weight * a * c)
    return losses


def sapo(current: Logprobs, _fixed: Logprobs, proximal: Logprobs, advantages: Logprobs, _config) -> list[float]:
    losses = []
    for c, p, a in zip(current, proximal, advantages, strict=True):
        tau = 1.0 if a > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (math.exp(c - p) - 1)))
        losses.append(-4 / tau * gate * a)
    return losses


def topr(current: Logprobs, fixed: Logprobs, proximal: Logprobs, advantages: Logprobs, _config) -> list[float]:
    ratio = math.prod(math.exp(f - p) for f, p in zip(fixed, proximal, strict=True))
    return [-(1.0 if a >= 0 else min(ratio, 1.0)) * a * c for c, a in zip(current, advantages, strict=True)]


def mirror_descent(current: Logprobs, fixed: Logprobs, proximal: Logprobs, advantages: Logprobs, config) -> list[float]:
    total = sum(f - p for f, p in zip(fixed, proximal, strict=True))
    penalty = config.tau / 2 * total**2 / len(fixed)
    return [-a * c + penalty + config.tau * total * (c - f) for c, f, a in zip(current, fixed, advantages, strict=True)]


def dppo_tv(current: Logprobs, fixed: Logprobs, proximal: Logprobs, advantages: Logprobs, config) -> list[float]:
    losses = []
    for c, f, p, a in zip(current, fixed, proximal, advantages, strict=True):
        r, variation = math.exp(f - p), abs(math.exp(f) - math.exp(p))
        is_masked = variation > config.delta and ((a > 0 and r > 1) or (a < 0 and r < 1))
        losses.append(0.0 if is_masked else -a * math.exp(c - p))
    return losses


TOKEN_FORMS: dict[str, TokenForm] = {
    "ppo": ppo,
    "reinforce": reinforce,
    "gspo": of_mean(gspo),
    "gmpo": of_mean(gmpo),
    "cispo": cispo,
    "sapo": sapo,
    "topr": topr,
    "mirror_descent": mirror_descent,
    "dppo_tv": dppo_tv,
}


# The parts around them ------------------------------------------------------------------------------------------------


def behavior_weights(
    proximal: Logprobs,
    behavior: Logprobs,
    advantages: Sequence[float],
    parts: Sequence[WeightPart],
    rejections: Sequence[RejectionPart],
) -> list[float]:
    ratios = [math.exp(p - b) for p, b in zip(proximal, behavior, strict=True)]
    whole = math.prod(ratios)
    levels = {
        "token": ratios,
        "sequence": [whole] * len(ratios),
        "geometric": [whole ** (1 / len(ratios))] * len(ratios),
        "none": [1.0] * len(ratios),
    }
    weights = []
    for t in range(len(ratios)):
        weight = 1.0
        for part in parts:
            factor = levels[part.level][t]
            if part.lower is not None and factor < part.lower:
                factor = part.lower
            if part.upper is not None and factor > part.upper:
                factor = part.upper
            weight *= factor
        weights.append(weight)
    for part in rejections:
        low = 0.0 if part.lower is None else part.lower
        high = math.inf if part.upper is None else part.upper
        is_kept = [low <= value <= high for value in levels[part.level]]
        if part.outward:
            # Too likely and made likelier, or too unlikely and made less likely.
            is_kept = [
                not ((value > high and a > 0) or (value < low and a < 0))
                for value, a in zip(ratios, advantages, strict=True)
            ]
        for t in range(len(ratios)):
            if not is_kept[t] or (part.veto and not all(is_kept)):
                weights[t] = 0.0
    return weights


def kl(c: float, ref: float, estimator: str) -> float:
    d = c - ref
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]


def proximal_logprobs(tokens: Tokens, fixed: Logprobs, kind: str, version: int) -> list[float]:
    if kind == "recomputed":
        return list(tokens.proximal)
    if kind == "bypassed":
        return list(tokens.behavior)
    if kind == "current":
        return list(fixed)
    result = []
    for c, b, v in zip(fixed, tokens.behavior, tokens.versions, strict=True):
        a = (version - v) / (version + 1 - v)
        result.append(b + a * (c - b))
    return result


def policy_loss(
    tokens: Tokens, current: Logprobs, fixed: Logprobs, config: AlgorithmConfig, proximal: str, version: int
) -> float:
    """sum(loss_weights * loss) over the trajectory, with entropies of 2."""
    anchor = proximal_logprobs(tokens, fixed, proximal, version)
    parts = tokens.turns if getattr(config.loss, "level", "trajectory") == "turn" else [slice(None)]
    rows = (current, fixed, anchor, tokens.advantages)
    surrogate = [
        loss for part in parts for loss in TOKEN_FORMS[config.loss.kind](*(row[part] for row in rows), config.loss)
    ]
    weights = behavior_weights(anchor, tokens.behavior, tokens.advantages, config.weights, config.rejections)
    total = 0.0
    for t, c in enumerate(current):
        policy = surrogate[t]
        if tokens.selected[t] and isinstance(config.selection, SecondMomentSelection | ClipCovSelection):
            policy = 0.0
        elif tokens.selected[t] and isinstance(config.selection, KLCovSelection):
            policy += config.selection.coefficient * abs(c - anchor[t])
        loss = weights[t] * policy - config.entropy * 2.0
        if config.kl.coefficient and config.kl.place == "loss":
            loss += config.kl.coefficient * kl(c, tokens.reference[t], config.kl.estimator)
        total += tokens.weight * loss
    return total


def gradient(loss: Callable[[Logprobs], float], at: Logprobs) -> list[float]:
    """Central differences."""
    step, slopes = 1e-5, []
    for t in range(len(at)):
        above, below = list(at), list(at)
        above[t] += step
        below[t] -= step
        slopes.append((loss(above) - loss(below)) / (2 * step))
    return slopes


# Batches of them ------------------------------------------------------------------------------------------------------


def random_batch(seed: int) -> list[Tokens]:
    """Trajectories of 1 to 6 trained tokens."""
    rng = random.Random(seed)
    batch = []
    for length in (1, 4, 2, 6, 1, 3, 5, 4):
        behavior = [-rng.uniform(0.05, 3) for _ in range(length)]
        proximal = [b + rng.gauss(0, 0.3) for b in behavior]
        tokens = Tokens(
            current=[p + rng.gauss(0, 0.4) for p in proximal],
            proximal=proximal,
            behavior=behavior,
            reference=[b + rng.gauss(0, 0.5) for b in behavior],
            advantages=[rng.gauss(0, 1) for _ in range(length)],
            versions=[rng.randrange(3, 8) for _ in range(length)],
            selected=[rng.random() < 0.4 for _ in range(length)],
            weight=rng.uniform(0.1, 1),
            later_turns=range(2, length, 2),
        )
        batch.append(tokens)
    return batch


def joined(batch: Sequence[Tokens], name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor([value for tokens in batch for value in getattr(tokens, name)], dtype=dtype)


def packed(batch: Sequence[Tokens], dtype: torch.dtype = torch.float64) -> PackedTokens:
    """The batch as one microbatch, in which every second sequence has no trained token."""
    ids = [2 * i for i, tokens in enumerate(batch) for _ in tokens.current]
    weights = [tokens.weight for tokens in batch for _ in tokens.current]
    starts = [t in (0, *tokens.later_turns) for tokens in batch for t in range(len(tokens.current))]
    return PackedTokens(
        behavior_logprobs=joined(batch, "behavior", dtype),
        proximal_logprobs=joined(batch, "proximal", dtype),
        reference_logprobs=joined(batch, "reference", dtype),
        advantages=joined(batch, "advantages", dtype),
        selected=joined(batch, "selected", torch.bool),
        turn_starts=torch.tensor(starts, dtype=torch.bool),
        loss_weights=torch.tensor(weights, dtype=dtype),
        versions=joined(batch, "versions", torch.int64),
        sequence_ids=torch.tensor(ids, dtype=torch.int64),
    )

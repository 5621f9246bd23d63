"""The losses once more, slowly: scalars, loops and the math module, written from the papers' formulas.

A loss is a function of `current`, the logprobs of one trajectory's trained tokens, and of `fixed`: the same numbers as
they stand where the derivative is taken. What the papers put under a stop-gradient is computed from `fixed`, so that
moving `current` and asking again, as `gradient` does, differentiates what they differentiate.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from arl.algorithm.losses.surrogates import Trajectories
from arl.api.algorithm import AlgorithmConfig
from arl.api.engine import PackedTokens
from arl.api.objective import ClipCovSelection, CorrectionConfig, KLCovSelection, LossConfig, SecondMomentSelection

Logprobs = Sequence[float]


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


def gspo_token(current: Logprobs, fixed: Logprobs, proximal: Logprobs, advantages: Logprobs, config) -> list[float]:
    s = math.exp(sum(f - p for f, p in zip(fixed, proximal, strict=True)) / len(fixed))
    losses = []
    for c, f, a in zip(current, fixed, advantages, strict=True):
        s_t = s * math.exp(c) / math.exp(f)
        losses.append(-min(s_t * a, clip(s_t, 1 - config.clip_low, 1 + config.clip_high) * a))
    return losses


def gmpo_token(current: Logprobs, fixed: Logprobs, proximal: Logprobs, advantages: Logprobs, config) -> list[float]:
    def clipped(logprobs: Logprobs) -> list[float]:
        # min(r^sgn, clip(r)^sgn)^sgn, in logarithms
        result = []
        for c, p, a in zip(logprobs, proximal, advantages, strict=True):
            sign = 1 if a >= 0 else -1
            d = c - p
            result.append(sign * min(sign * d, sign * clip(d, -config.clip_low, config.clip_high)))
        return result

    at_fixed = clipped(fixed)
    mean = math.exp(sum(at_fixed) / len(at_fixed))
    return [-a * mean * math.exp(m - f) for a, m, f in zip(advantages, clipped(current), at_fixed, strict=True)]


def cispo(current: Logprobs, fixed: Logprobs, proximal: Logprobs, advantages: Logprobs, config) -> list[float]:
    losses = []
    for c, f, p, a in zip(current, fixed, proximal, advantages, strict=True):
        weight = min(math.exp(f - p), 1 + config.clip_high)
        if config.clip_low is not None:
            weight = max(weight, 1 - config.clip_low)
        losses.append(-weight * a * c)
    return losses


def sapo(current: Logprobs, _fixed: Logprobs, proximal: Logprobs, advantages: Logprobs, config) -> list[float]:
    losses = []
    for c, p, a in zip(current, proximal, advantages, strict=True):
        tau = config.tau_positive if a > 0 else config.tau_negative
        gate = 1 / (1 + math.exp(-tau * (math.exp(c - p) - 1)))
        losses.append(-4 / tau * gate * a)
    return losses


def topr_token(current: Logprobs, fixed: Logprobs, proximal: Logprobs, advantages: Logprobs, _config) -> list[float]:
    ratio = math.prod(math.exp(f - p) for f, p in zip(fixed, proximal, strict=True))
    return [-(1.0 if a >= 0 else min(ratio, 1.0)) * a * c for c, a in zip(current, advantages, strict=True)]


def mirror_token(current: Logprobs, fixed: Logprobs, proximal: Logprobs, advantages: Logprobs, config) -> list[float]:
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


TokenForm = Callable[[Logprobs, Logprobs, Logprobs, Logprobs, LossConfig], list[float]]
TOKEN_FORMS: dict[str, TokenForm] = {
    "ppo": ppo,
    "reinforce": reinforce,
    "gspo": gspo_token,
    "gmpo": gmpo_token,
    "cispo": cispo,
    "sapo": sapo,
    "topr": topr_token,
    "mirror_descent": mirror_token,
    "dppo_tv": dppo_tv,
}


# Losses of whole trajectories, as their papers have them: one advantage, and only what they hold fixed is ------------


def gspo(current: Logprobs, _fixed: Logprobs, proximal: Logprobs, a: float, config) -> float:
    s = math.prod(math.exp(c - p) for c, p in zip(current, proximal, strict=True)) ** (1 / len(current))
    return -min(s * a, clip(s, 1 - config.clip_low, 1 + config.clip_high) * a)


def gmpo(current: Logprobs, _fixed: Logprobs, proximal: Logprobs, a: float, config) -> float:
    product, sign = 1.0, 1 if a >= 0 else -1
    for c, p in zip(current, proximal, strict=True):
        ratio = math.exp(c - p)
        clipped = clip(ratio, math.exp(-config.clip_low), math.exp(config.clip_high))
        product *= min(ratio**sign, clipped**sign) ** sign
    return -a * product ** (1 / len(current))


def topr(current: Logprobs, fixed: Logprobs, proximal: Logprobs, a: float, _config) -> float:
    weight = 1.0 if a >= 0 else min(math.exp(sum(fixed) - sum(proximal)), 1.0)
    return -weight * a * sum(current)


def mirror_descent(current: Logprobs, _fixed: Logprobs, proximal: Logprobs, a: float, config) -> float:
    return -a * sum(current) + config.tau / 2 * (sum(current) - sum(proximal)) ** 2


WholeForm = Callable[[Logprobs, Logprobs, Logprobs, float, LossConfig], float]
MEANS_OVER_A_TRAJECTORY: dict[str, WholeForm] = {"gspo": gspo, "gmpo": gmpo}
SUMS_OVER_A_TRAJECTORY: dict[str, WholeForm] = {"topr": topr, "mirror_descent": mirror_descent}


# The parts around them ------------------------------------------------------------------------------------------------


def behavior_weights(proximal: Logprobs, behavior: Logprobs, config: CorrectionConfig) -> list[float]:
    ratios = [math.exp(p - b) for p, b in zip(proximal, behavior, strict=True)]
    if config.level == "sequence":
        weights = [math.prod(ratios)] * len(ratios)
    elif config.level == "geometric":
        weights = [math.prod(ratios) ** (1 / len(ratios))] * len(ratios)
    else:
        weights = ratios
    if config.kind == "truncate":
        weights = [min(w, config.upper) for w in weights]
    elif config.kind == "mask":
        weights = [w if config.lower <= w <= config.upper else 0.0 for w in weights]
    if config.veto is not None and min(ratios) < config.veto:
        weights = [0.0] * len(weights)
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
    surrogate = TOKEN_FORMS[config.loss.kind](current, fixed, anchor, tokens.advantages, config.loss)
    weights = behavior_weights(anchor, tokens.behavior, config.correction)
    total = 0.0
    for t, c in enumerate(current):
        policy = surrogate[t]
        if tokens.selected[t] and isinstance(config.selection, SecondMomentSelection | ClipCovSelection):
            policy = 0.0
        elif tokens.selected[t] and isinstance(config.selection, KLCovSelection):
            policy += config.selection.coefficient * abs(c - anchor[t])
        loss = weights[t] * policy - config.entropy * 2.0
        if config.kl.coefficient and config.kl.place == "loss":
            ratio = 1.0
            if config.kl.unbiased:
                ratio = math.exp((fixed[t] if config.kl.estimator == "k2" else c) - tokens.behavior[t])
            loss += config.kl.coefficient * ratio * kl(c, tokens.reference[t], config.kl.estimator)
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


def random_batch(seed: int, *, one_advantage: bool = False, moved: float = 0.4, stale: float = 0.3) -> list[Tokens]:
    """Trajectories of 1 to 6 trained tokens; moved and stale: how far c is from p, and p from b."""
    rng = random.Random(seed)
    batch = []
    for length in (1, 4, 2, 6, 1, 3, 5, 4):
        behavior = [-rng.uniform(0.05, 3) for _ in range(length)]
        proximal = [b + rng.gauss(0, stale) for b in behavior]
        advantages = [rng.gauss(0, 1) for _ in range(length)]
        tokens = Tokens(
            current=[p + rng.gauss(0, moved) for p in proximal],
            proximal=proximal,
            behavior=behavior,
            reference=[b + rng.gauss(0, 0.5) for b in behavior],
            advantages=advantages[:1] * length if one_advantage else advantages,
            versions=[rng.randrange(3, 8) for _ in range(length)],
            selected=[rng.random() < 0.4 for _ in range(length)],
            weight=rng.uniform(0.1, 1),
        )
        batch.append(tokens)
    return batch


def weighed(batch: Sequence[Tokens], *, by_length: bool) -> list[Tokens]:
    """Every trajectory weighs 1, or each of its tokens does."""
    return [replace(tokens, weight=1 / len(tokens.current) if by_length else 1.0) for tokens in batch]


def joined(batch: Sequence[Tokens], name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor([value for tokens in batch for value in getattr(tokens, name)], dtype=dtype)


def packed(batch: Sequence[Tokens], dtype: torch.dtype = torch.float64) -> PackedTokens:
    """The batch as one microbatch, in which every second sequence has no trained token."""
    ids = [2 * i for i, tokens in enumerate(batch) for _ in tokens.current]
    weights = [tokens.weight for tokens in batch for _ in tokens.current]
    return PackedTokens(
        behavior_logprobs=joined(batch, "behavior", dtype),
        proximal_logprobs=joined(batch, "proximal", dtype),
        reference_logprobs=joined(batch, "reference", dtype),
        advantages=joined(batch, "advantages", dtype),
        selected=joined(batch, "selected", torch.bool),
        loss_weights=torch.tensor(weights, dtype=dtype),
        versions=joined(batch, "versions", torch.int64),
        sequence_ids=torch.tensor(ids, dtype=torch.int64),
    )


def trajectories_of(batch: Sequence[Tokens]) -> Trajectories:
    return Trajectories.of(packed(batch).sequence_ids)

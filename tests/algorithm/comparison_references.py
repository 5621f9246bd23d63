"""Slow references of DPO and KTO: pairs, labels and z0 from one group at a time, losses as the papers write them."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from arl.api.settings.objective import DPOLossConfig, KTOLossConfig, LabelsAdvantage, PairsAdvantage

Numbers = Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Rated:
    """An episode of a group: its index there, its reward, and whether a token of it is trained."""

    index: int
    reward: float
    is_trained: bool


def signs_of(episodes: Sequence[Rated], settings: PairsAdvantage | LabelsAdvantage) -> dict[int, float]:
    """episode index -> 1, -1 or 0, before any weight."""
    signs = {e.index: 0.0 for e in episodes}
    if isinstance(settings, LabelsAdvantage):
        rewards = [e.reward for e in episodes]
        bound = statistics.mean(rewards) if settings.threshold is None else settings.threshold
        for e in episodes:
            if e.is_trained and not (settings.threshold is None and math.isclose(e.reward, bound, rel_tol=1e-12)):
                signs[e.index] = 1.0 if e.reward > bound else -1.0
        return signs
    for best, worst in pairs_of(episodes):
        signs[best.index], signs[worst.index] = 1.0, -1.0
    return signs


def pairs_of(episodes: Sequence[Rated]) -> list[tuple[Rated, Rated]]:
    """At most one."""
    left = [e for e in episodes if e.is_trained]
    if len({e.reward for e in left}) < 2:
        return []
    best = min((e for e in left if e.reward == max(o.reward for o in left)), key=lambda e: e.index)
    worst = max((e for e in left if e.reward == min(o.reward for o in left)), key=lambda e: e.index)
    return [(best, worst)]


def lambdas(signs: Sequence[float], settings: LabelsAdvantage) -> tuple[float, float]:
    """lambda_D and lambda_U, from the signs of all labelled episodes."""
    good, bad = sum(s > 0 for s in signs), sum(s < 0 for s in signs)
    half = (good + bad) / 2
    return (half / max(good, 1), half / max(bad, 1)) if settings.balanced else (1.0, 1.0)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def dpo(better: Numbers, better_reference: Numbers, worse: Numbers, worse_reference: Numbers, config: DPOLossConfig):
    """Of one pair, from the logprobs of all trained tokens of each episode."""
    h = (sum(better) - sum(better_reference)) - (sum(worse) - sum(worse_reference))
    if config.link == "ipo":
        return (h - 1 / (2 * config.beta)) ** 2
    if config.link == "hinge":
        return max(0.0, 1 - config.beta * h)
    return -math.log(sigmoid(config.beta * h))


def kto(current: Numbers, reference: Numbers, advantage: float, z0: float, config: KTOLossConfig) -> float:
    """lambda_y - v(x, y) of one episode."""
    h = sum(current) - sum(reference)
    value = sigmoid(config.beta * (h - z0)) if advantage > 0 else sigmoid(config.beta * (z0 - h))
    return abs(advantage) - abs(advantage) * value


def z0(log_ratios: Sequence[Numbers]) -> float:
    """From p - reference of each compared episode's trained tokens."""
    return max(0.0, statistics.mean(sum(row) for row in log_ratios)) if log_ratios else 0.0


def turns_of(places: Sequence[int], starts: Sequence[int]) -> list[list[int]]:
    """The trained places of a trajectory by turns. starts: where its turns begin; none: unbroken runs are turns."""
    if not places:
        return []
    turns = [[places[0]]]
    for before, place in itertools.pairwise(places):
        if any(before < start <= place for start in starts) or (not starts and place != before + 1):
            turns.append([])
        turns[-1].append(place)
    return turns

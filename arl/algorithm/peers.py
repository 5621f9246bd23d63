"""Who is compared with whom, and the rewards that are compared."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from arl.algorithm.batch import Batch, flat
from arl.api.algorithm import KLConfig, OverlongConfig
from arl.api.types import Group, TrainSequence, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The trajectories of a group with the same role, as many as there are: who is compared with whom.

    Agents of different roles have rewards of their own, and a group from which episodes were dropped is normalised by
    those that remain. places: where each lies in the flat batch. episodes: for each episode, which of the trajectories
    are its own. One that branched has several, and counts once: in every statistic it is their mean. outcomes: each
    trajectory's reward less the penalty for its length; overlong: those penalties. Those that are masked out train
    nothing, but count in here as the others do.
    """

    group: Group
    role: str
    places: tuple[int, ...]
    episodes: tuple[tuple[int, ...], ...]
    trajectories: tuple[Trajectory, ...]
    sequences: tuple[TrainSequence, ...]
    overlong: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.places)

    @property
    def outcomes(self) -> list[float]:
        return [t.reward - p for t, p in zip(self.trajectories, self.overlong, strict=True)]

    @property
    def totals(self) -> list[float]:
        """The outcome of each and all process rewards of its episode, added up: a branch has those of the others too,
        as if the episode had not branched."""
        outcomes, totals = self.outcomes, [0.0] * len(self)
        for members in self.episodes:
            trajectories = [self.trajectories[i] for i in members]
            process = [r for t in trajectories for r in (*(turn.reward for turn in t.turns), *(t.token_rewards or ()))]
            for i in members:
                totals[i] = math.fsum((outcomes[i], *process))
        return totals

    def of_episodes(self, values: Sequence[float]) -> list[float]:
        """For each episode the mean of its trajectories' values."""
        return [mean([values[i] for i in members]) for members in self.episodes]

    def summed(self, values: Sequence[float]) -> list[float]:
        """For each trajectory the sum over those of its episode."""
        sums = [0.0] * len(self)
        for members in self.episodes:
            total = math.fsum(values[i] for i in members)
            for i in members:
                sums[i] = total
        return sums


def peers_of(groups: Sequence[Group], batch: Batch, overlong: OverlongConfig) -> Iterator[Peers]:
    sequences, first = flat(batch), 0
    for group in groups:
        places: dict[str, list[int]] = defaultdict(list)
        for i, trajectory in enumerate(group.trajectories):
            places[trajectory.role].append(i)
        for role, members in places.items():
            trajectories = tuple(group.trajectories[i] for i in members)
            episodes: dict[int, list[int]] = defaultdict(list)
            for place, i in enumerate(members):
                episodes[group.episode_indices[i]].append(place)
            yield Peers(
                group=group,
                role=role,
                episodes=tuple(map(tuple, episodes.values())),
                places=tuple(first + i for i in members),
                trajectories=trajectories,
                sequences=tuple(sequences[first + i] for i in members),
                overlong=tuple(length_penalty(t.num_trained_tokens, overlong) for t in trajectories),
            )
        first += len(group.trajectories)


def mean(values: Sequence[float]) -> float:
    """Exact where all are equal: the rounded mean of equal numbers may be another."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def length_penalty(num_tokens: int, config: OverlongConfig) -> float:
    """What is subtracted from the reward of a trajectory with so many trained tokens (DAPO, 2503.14476, eq. 13).

    0 up to max_tokens - buffer_tokens, from there rising linearly to `penalty` at max_tokens, and `penalty` beyond.
    """
    if config.max_tokens is None:
        return 0.0
    over = num_tokens - (config.max_tokens - config.buffer_tokens)
    if over <= 0:
        return 0.0
    return config.penalty * min(over / config.buffer_tokens, 1.0) if config.buffer_tokens else config.penalty


def kl_penalties(sequences: Sequence[TrainSequence], kl: KLConfig) -> list[torch.Tensor] | None:
    """What the KL takes off each token's reward, float64[T], 0 where nothing is trained; None: it is no part of it.

    coefficient * k(d) with d = proximal - reference logprob, and k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, with d at
    least -20, so that one token that the policy all but excludes does not outweigh everything. A trajectory that is
    masked out has none: no logprobs were computed for it.
    """
    if kl.coefficient == 0 or kl.place == "loss":
        return None
    return [torch.where(s.loss_mask, kl.coefficient * _estimate(s, kl.estimator), 0.0) for s in sequences]


def _estimate(sequence: TrainSequence, estimator: str) -> torch.Tensor:
    distance = sequence.proximal_logprobs.double() - sequence.reference_logprobs.double()
    if estimator == "k1":
        return distance
    return distance**2 / 2 if estimator == "k2" else torch.expm1(-(d := distance.clamp(min=-20.0))) + d


# Mean and standard deviation, the same to the last bit in whatever order the numbers come.


EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean, and the sample standard deviation (n - 1), 0 for fewer than two and where only rounding differs."""

    mean: float
    std: float

    @property
    def divisor(self) -> float:
        """What to divide by to get unit variance: nothing is scaled up where there is no spread."""
        return self.std + EPSILON if self.std > 0 else 1.0


def spread_of(numbers: Sequence[float]) -> Spread:
    if not numbers or _are_equal(min(numbers), max(numbers)):
        return Spread(min(numbers, default=0.0), 0.0)
    # fsum is exact, so the result does not depend on the order in which episodes finished.
    mean = math.fsum(numbers) / len(numbers)
    squares = math.fsum((n - mean) * (n - mean) for n in numbers)
    return Spread(mean, math.sqrt(squares / (len(numbers) - 1)))


def _are_equal(low: float, high: float) -> bool:
    """Whether numbers from low to high differ by rounding alone.

    Compared before subtracting: the rounded mean of equal numbers may differ from each of them, and a difference in
    the last bit of a large one is not small.
    """
    return high - low <= 4 * math.ulp(max(abs(low), abs(high)))


def pooled_spread(parts: Sequence[torch.Tensor], *, each_part_once: bool = False) -> Spread:
    """The spread of all numbers of some 1-D tensors, whose order does not matter; empty ones count nowhere.

    each_part_once: a tensor weighs the same however long it is, as if it were one number.
    """
    parts = [part for part in parts if len(part)]
    if not parts:
        return Spread(0.0, 0.0)
    low, high = min(float(part.min()) for part in parts), max(float(part.max()) for part in parts)
    count = len(parts) if each_part_once else sum(map(len, parts))
    if _are_equal(low, high):
        return Spread(low, 0.0)

    def total(values: Sequence[torch.Tensor]) -> float:
        return math.fsum(float(v.mean() if each_part_once else v.sum()) for v in values)

    mean = total(parts) / count
    squares = total([(part - mean) ** 2 for part in parts])
    return Spread(mean, math.sqrt(squares / (count - 1)) if count > 1 else 0.0)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One 1-D tensor of all numbers, the same in whatever order the parts come."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts)).sort().values


def whitened(
    values: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], once: Sequence[Hashable] | None = None
) -> list[torch.Tensor]:
    """(values - mean) / (std + 1e-6) over everything that is masked in, and 0 elsewhere.

    Numbers that are all equal, and one that is alone, become 0 exactly. once: for each sequence of what it is a part;
    for mean and std those with the same weigh as much together as others do, however many numbers are masked in.
    """
    parts = [v[m] for v, m in zip(values, masks, strict=True)]
    if once is not None:
        whole: defaultdict[Hashable, list[torch.Tensor]] = defaultdict(list)
        for part, of in zip(parts, once, strict=True):
            whole[of].append(part)
        parts = [joined(members) for members in whole.values()]
    spread = pooled_spread(parts, each_part_once=once is not None)
    if spread.std == 0:
        return [torch.zeros_like(v) for v in values]
    return [torch.where(m, (v - spread.mean) / spread.divisor, 0.0) for v, m in zip(values, masks, strict=True)]

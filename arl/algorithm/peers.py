"""Who is compared with whom, the rewards that are compared, and their mean and spread."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from arl.algorithm.batch import Batch
from arl.api.algorithm import KLConfig, OverlongConfig
from arl.api.types import Group, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The trajectories of a group with the same role, however many there are.

    Agents of different roles have rewards of their own, and a group from which episodes were dropped is normalised by
    those that remain. Trajectories that are masked out train nothing, but count in here as the others do.
    """

    group: Group
    role: str
    members: tuple[int, ...]
    """Places of the trajectories in the batch."""
    episodes: tuple[tuple[int, ...], ...]
    """For each episode, which of the peers are its own. One that branched has several, and counts once: in every
    statistic it is their mean."""
    trajectories: tuple[Trajectory, ...]
    overlong: tuple[float, ...]
    """Each trajectory's penalty for its length."""

    def __len__(self) -> int:
        return len(self.members)

    @property
    def outcomes(self) -> list[float]:
        """Each trajectory's reward less the penalty for its length."""
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


def peers_of(batch: Batch, overlong: OverlongConfig) -> list[Peers]:
    members: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for i, (group, trajectory) in enumerate(zip(batch.group, batch.trajectories, strict=True)):
        members[group, trajectory.role].append(i)
    peers: list[Peers] = []
    for (group, role), places in members.items():
        episodes: defaultdict[int, list[int]] = defaultdict(list)
        for peer, i in enumerate(places):
            episodes[batch.episode[i]].append(peer)
        trajectories = tuple(batch.trajectories[i] for i in places)
        peers.append(
            Peers(
                group=batch.groups[group],
                role=role,
                members=tuple(places),
                episodes=tuple(map(tuple, episodes.values())),
                trajectories=trajectories,
                overlong=tuple(length_penalty(t.num_trained_tokens, overlong) for t in trajectories),
            )
        )
    return peers


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


def kl_penalties(batch: Batch, kl: KLConfig) -> torch.Tensor | None:
    """What the KL takes off each token's reward, float64[T], 0 where nothing is trained; None: no KL in the reward.

    coefficient * k(d) with d = proximal - reference logprob, and k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, with d at
    least -20, so that one token that the policy all but excludes does not outweigh everything. A trajectory that is
    masked out has none: no logprobs were computed for it.
    """
    if kl.coefficient == 0 or kl.place == "loss":
        return None
    estimate = batch.proximal_logprobs.double() - batch.reference_logprobs.double()
    if kl.estimator == "k2":
        estimate = estimate**2 / 2
    elif kl.estimator == "k3":
        estimate = torch.expm1(-(d := estimate.clamp(min=-20.0))) + d
    return torch.where(batch.loss_mask, kl.coefficient * estimate, 0.0)


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


def mean(values: Sequence[float]) -> float:
    """Exact where all are equal: the rounded mean of equal numbers may be another."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def spread_of(numbers: Sequence[float]) -> Spread:
    if not numbers or _are_equal(min(numbers), max(numbers)):
        return Spread(min(numbers, default=0.0), 0.0)
    # fsum is exact, so the result does not depend on the order in which episodes finished.
    middle = math.fsum(numbers) / len(numbers)
    squares = math.fsum((n - middle) * (n - middle) for n in numbers)
    return Spread(middle, math.sqrt(squares / (len(numbers) - 1)))


def _are_equal(low: float, high: float) -> bool:
    """Whether numbers from low to high differ by rounding alone.

    Compared before subtracting: the rounded mean of equal numbers may differ from each of them, and a difference in
    the last bit of a large one is not small.
    """
    return high - low <= 4 * math.ulp(max(abs(low), abs(high)))


def whitened(batch: Batch, values: torch.Tensor, *, by_episode: bool = False) -> torch.Tensor:
    """(values - mean) / (std + 1e-6) of float64[T] values over the trained tokens, and 0 elsewhere.

    Numbers that are all equal, and one that is alone, become 0 exactly. by_episode: for mean and std each episode
    weighs as much as another, however many tokens it trains.
    """
    trained, weights = values[batch.loss_mask], torch.ones(int(batch.loss_mask.sum()), dtype=torch.float64)
    if by_episode:
        episodes = torch.tensor(batch.episode, dtype=torch.int64)[batch.owners[batch.loss_mask]]
        weights = weights / episodes.bincount()[episodes]
    count = round(math.fsum(weights.tolist()))
    if count < 2 or _are_equal(float(trained.min()), float(trained.max())):
        return torch.zeros_like(values)
    # fsum is exact here too.
    middle = math.fsum((weights * trained).tolist()) / count
    squares = math.fsum((weights * (trained - middle) ** 2).tolist())
    divisor = Spread(middle, math.sqrt(squares / (count - 1))).divisor
    return torch.where(batch.loss_mask, (values - middle) / divisor, 0.0)

"""Peers: the trajectories that are compared with each other, their rewards, and the mean and spread of these."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from arl.algorithm.batch import Batch
from arl.api.settings.objective import KLConfig, OverlongConfig
from arl.api.types import Group, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The n trajectories of a group with the same role: roles have different rewards, and are compared apart.

    Masked-out trajectories train nothing, but count here like others.
    """

    group: Group
    role: str
    members: tuple[int, ...]
    """Places of the trajectories in the batch."""
    episodes: tuple[tuple[int, ...], ...]
    """For each episode the indices of its peers. A branched episode has several, and counts once, as their mean."""
    trajectories: tuple[Trajectory, ...]
    overlong: tuple[float, ...]
    """Each trajectory's penalty for its length."""

    def __len__(self) -> int:
        return len(self.members)

    @property
    def outcomes(self) -> list[float]:
        """[n] Each reward less the penalty for length."""
        return [t.reward - p for t, p in zip(self.trajectories, self.overlong, strict=True)]

    @property
    def totals(self) -> list[float]:
        """[n] Each outcome plus all process rewards of the episode, those of its other branches included."""
        outcomes, totals = self.outcomes, [0.0] * len(self)
        for members in self.episodes:
            trajectories = [self.trajectories[i] for i in members]
            process = [r for t in trajectories for r in t.process_rewards]
            for i in members:
                totals[i] = math.fsum((outcomes[i], *process))
        return totals

    def of_episodes(self, values: Sequence[float]) -> list[float]:
        """For each episode the mean of its peers' values."""
        if len(self.episodes) == len(self):
            return list(values)
        return [mean([values[i] for i in members]) for members in self.episodes]

    def summed(self, values: Sequence[float]) -> list[float]:
        """[n] For each of the peers the sum over its episode's."""
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
    """The penalty on the reward of a trajectory with num_tokens trained tokens (DAPO, 2503.14476, eq. 13).

    It is 0 up to max_tokens - buffer_tokens, rises linearly to `penalty` at max_tokens, and stays there.
    """
    if config.max_tokens is None:
        return 0.0
    over = num_tokens - (config.max_tokens - config.buffer_tokens)
    if over <= 0:
        return 0.0
    return config.penalty * min(over / config.buffer_tokens, 1.0) if config.buffer_tokens else config.penalty


def kl_penalties(batch: Batch, kl: KLConfig) -> torch.Tensor | None:
    """The KL penalty on each token's reward, float64[T], 0 where nothing is trained; None: no KL in the reward.

    coefficient * k(d) with d = proximal - reference logprob, and k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. In k3 d is
    at least -20: a token that the policy almost excludes must not outweigh all others.
    """
    if kl.coefficient == 0 or kl.place == "loss":
        return None
    estimate = batch.proximal_logprobs.double() - batch.reference_logprobs.double()
    if kl.estimator == "k2":
        estimate = estimate**2 / 2
    elif kl.estimator == "k3":
        estimate = torch.expm1(-(d := estimate.clamp(min=-20.0))) + d
    return torch.where(batch.loss_mask, kl.coefficient * estimate, 0.0)


# Mean and standard deviation. fsum is exact, so the order of the numbers does not change a bit of them.


EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


@dataclass(frozen=True, slots=True)
class Spread:
    mean: float
    std: float
    """The sample standard deviation (n - 1). 0 for fewer than two numbers, and for numbers that differ by rounding."""

    @property
    def divisor(self) -> float:
        """The divisor that gives unit variance; 1 without spread, so that nothing is scaled up."""
        return self.std + EPSILON if self.std > 0 else 1.0


def mean(values: Sequence[float]) -> float:
    """The mean, exact for equal numbers: their rounded mean may differ from them."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def spread_of(numbers: Sequence[float]) -> Spread:
    if not numbers or _are_equal(min(numbers), max(numbers)):
        return Spread(min(numbers, default=0.0), 0.0)
    middle = math.fsum(numbers) / len(numbers)
    squares = math.fsum((n - middle) * (n - middle) for n in numbers)
    return Spread(middle, math.sqrt(squares / (len(numbers) - 1)))


def _are_equal(low: float, high: float) -> bool:
    """Whether numbers from low to high differ by rounding alone, in their last bits."""
    return high - low <= 4 * math.ulp(max(abs(low), abs(high)))


def whitened(batch: Batch, values: torch.Tensor, *, by_episode: bool = False) -> torch.Tensor:
    """(values - mean) / (std + 1e-6) of float64[T] values over the trained tokens of each task, and 0 elsewhere.

    Equal numbers, and a single number, become exactly 0. by_episode: all episodes weigh the same in mean and std.
    """
    tasks = {group.task: number for number, group in enumerate(batch.groups)}
    if len(tasks) < 2:
        return _whitened(batch, values, batch.loss_mask, by_episode=by_episode)
    owned = batch.repeated(torch.tensor([tasks[batch.groups[group].task] for group in batch.group]))
    found = torch.zeros_like(values)
    for number in tasks.values():
        mask = batch.loss_mask & (owned == number)
        found = torch.where(mask, _whitened(batch, values, mask, by_episode=by_episode), found)
    return found


def _whitened(batch: Batch, values: torch.Tensor, mask: torch.Tensor, *, by_episode: bool) -> torch.Tensor:
    """Over the tokens in the mask."""
    trained, weights = values[mask], torch.ones(int(mask.sum()), dtype=torch.float64)
    if by_episode:
        episodes = torch.tensor(batch.episode, dtype=torch.int64)[batch.owners[mask]]
        weights = weights / episodes.bincount()[episodes]
    count = round(math.fsum(weights.tolist()))
    if count < 2 or _are_equal(float(trained.min()), float(trained.max())):
        return torch.zeros_like(values)
    middle = math.fsum((weights * trained).tolist()) / count
    squares = math.fsum((weights * (trained - middle) ** 2).tolist())
    divisor = Spread(middle, math.sqrt(squares / (count - 1))).divisor
    return torch.where(mask, (values - middle) / divisor, 0.0)

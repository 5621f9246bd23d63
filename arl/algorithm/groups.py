"""Peers: the trajectories that are compared with each other, their rewards, the mean and spread of these, and the pairs
and labels that DPO and KTO make of them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from arl.algorithm.batch import Batch
from arl.api.settings.algorithm import AlgorithmConfig
from arl.api.settings.objective import KLConfig, LabelsAdvantage, OverlongConfig, PairsAdvantage
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
    if config.max_tokens is None or (over := num_tokens - (config.max_tokens - config.buffer_tokens)) <= 0:
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


@dataclass(frozen=True, slots=True)
class Spread:
    mean: float
    std: float
    """The sample standard deviation (n - 1). 0 for fewer than two numbers, and for numbers that differ by rounding."""

    @property
    def divisor(self) -> float:
        """The divisor that gives unit variance, std + 1e-6; 1 without spread, so that nothing is scaled up."""
        return self.std + 1e-6 if self.std > 0 else 1.0


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
    owned = batch.repeated(torch.tensor([tasks[batch.groups[group].task] for group in batch.group], dtype=torch.int64))
    found = torch.zeros_like(values)
    for number in tasks.values():
        mask = batch.loss_mask & (owned == number)
        trained, weights = values[mask], torch.ones(int(mask.sum()), dtype=torch.float64)
        if by_episode:
            episodes = torch.tensor(batch.episode, dtype=torch.int64)[batch.owners[mask]]
            weights = weights / episodes.bincount()[episodes]
        count = round(math.fsum(weights.tolist()))
        if count < 2 or _are_equal(float(trained.min()), float(trained.max())):
            continue
        middle = math.fsum((weights * trained).tolist()) / count
        squares = math.fsum((weights * (trained - middle) ** 2).tolist())
        divisor = Spread(middle, math.sqrt(squares / (count - 1))).divisor
        found = torch.where(mask, (values - middle) / divisor, found)
    return found


# Comparisons: the pairs and labels of DPO and KTO, and KTO's z0
#
# An episode's reward is the mean over its trajectories (of a role) of R plus all its process rewards. Episodes without
# trained tokens are in no pair and have no label, but their rewards count in their group's mean.


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """An episode among its peers."""

    reward: float
    index: int
    """Its index in the group. Episodes of equal rewards are ranked by it: it says nothing of their quality."""
    members: tuple[int, ...]
    """The places in the batch of its trajectories."""
    is_trained: bool


def compared(batch: Batch, config: AlgorithmConfig) -> Batch:
    """The batch with advantages of kind pairs or labels, with units, and without the other episodes' trained tokens.

    It needs no forward pass, so what is not compared need not be forwarded. Doing it again changes nothing.
    """
    advantages, units = [0.0] * len(batch), [-1] * len(batch)
    counts = batch.counts
    everyone = [(one, standings_of(one, batch, counts)) for one in peers_of(batch, config.overlong)]
    if isinstance(config.advantage, PairsAdvantage):
        pairs = [pair for _, standings in everyone if (pair := pair_of(standings))]
        chosen = [(unit, s, a) for unit, pair in enumerate(pairs) for s, a in zip(pair, (1.0, -1.0), strict=True)]
    else:
        assert isinstance(config.advantage, LabelsAdvantage)
        chosen = [(unit, *labelled) for unit, labelled in enumerate(weighed_labels(everyone, config.advantage))]
    for unit, standing, advantage in chosen:
        for i in standing.members:
            advantages[i], units[i] = advantage, unit
    of_tokens = batch.over_tokens(advantages)
    mask = batch.loss_mask & (of_tokens != 0)
    return replace(batch, advantages=torch.where(mask, of_tokens, 0.0).float(), loss_mask=mask, units=tuple(units))


def standings_of(peers: Peers, batch: Batch, counts: Sequence[int]) -> list[Standing]:
    """counts: Batch.counts."""
    first = batch.group.index(batch.group[peers.members[0]])
    rewards = peers.of_episodes(peers.totals)
    members = [tuple(peers.members[i] for i in episode) for episode in peers.episodes]
    return [
        Standing(
            reward=reward,
            index=peers.group.episode_indices[own[0] - first],
            members=own,
            is_trained=any(counts[i] for i in own),
        )
        for own, reward in zip(members, rewards, strict=True)
    ]


def pair_of(standings: Sequence[Standing]) -> tuple[Standing, Standing] | None:
    """The best and the worst episode; None if their rewards are equal."""
    ranked = sorted((s for s in standings if s.is_trained), key=lambda s: (-s.reward, s.index))
    if len(ranked) < 2 or spread_of((ranked[0].reward, ranked[-1].reward)).std == 0:
        return None
    return ranked[0], ranked[-1]


def weighed_labels(
    everyone: Sequence[tuple[Peers, list[Standing]]], settings: LabelsAdvantage
) -> Iterator[tuple[Standing, float]]:
    """The labelled episodes with A, above 0 for desirable ones, weighed among those of the same task (KTO, 2402.01306).

    balanced: A = +-n / (2 n_label), so that lambda_D n_D / (lambda_U n_U) is 1, where the paper wants 1 to 3/2 (in its
    first version to 4/3). The weights of all n episodes add up to n.
    """
    signs: list[tuple[str, Standing, int]] = []
    for peers, standings in everyone:
        bound = mean([s.reward for s in standings]) if settings.threshold is None else settings.threshold
        for s in standings:
            is_at_mean = settings.threshold is None and spread_of((s.reward, bound)).std == 0  # up to rounding
            if s.is_trained and not is_at_mean:
                signs.append((peers.group.task, s, 1 if s.reward > bound else -1))
    counts = Counter((task, sign) for task, _, sign in signs)
    for task, standing, sign in signs:
        is_weighed = settings.balanced
        weight = (counts[task, 1] + counts[task, -1]) / (2 * counts[task, sign]) if is_weighed else 1.0
        yield standing, sign * weight


def reference_points(batch: Batch) -> torch.Tensor:
    """float32[T]: KTO's z0 (2402.01306) of each token's task, an estimate of KL(p || reference).

        z0 = max(0, mean over the compared episodes of sum(p - reference) over their trained tokens)

    The paper's data is not the policy's, so it estimates z0 from answers to other prompts. Here the policy has sampled
    the episodes itself, and the mean log-ratio of all of them is the KL, without bias. Labels by the group's mean leave
    some out, which are not forwarded: then it is of the others. For older tokens the mean is KL(sampler || reference)
    - KL(sampler || p). It is one number for the whole batch, from before any update, however that is split.
    """
    log_ratio = batch.proximal_logprobs.double() - batch.reference_logprobs.double()
    sums = batch.sums(torch.where(batch.loss_mask, log_ratio, 0.0))
    of_tasks = defaultdict[str, list[float]](list)
    episodes = defaultdict[str, set[int]](set)
    for place, total, count, episode in zip(batch.group, sums, batch.counts, batch.episode, strict=True):
        if count:
            of_tasks[batch.groups[place].task].append(total)
            episodes[batch.groups[place].task].add(episode)
    points = {task: max(math.fsum(totals) / len(episodes[task]), 0.0) for task, totals in of_tasks.items()}
    return batch.over_tokens([points.get(batch.groups[place].task, 0.0) for place in batch.group]).float()


def comparison_metrics(batch: Batch, config: AlgorithmConfig) -> dict[str, float]:
    """Of a compared batch: its pairs or labelled episodes, and the groups that gave none; nothing for other batches."""
    if not config.compares_episodes:
        return {}
    used = {place for place, count in zip(batch.group, batch.counts, strict=True) if count}
    metrics = {"uncompared_groups": 1 - len(used) / max(len(batch.groups), 1)}
    signs = batch.sums(batch.advantages.double())
    trained = {unit: a > 0 for unit, a, n in zip(batch.units, signs, batch.counts, strict=True) if n}
    if isinstance(config.advantage, PairsAdvantage):
        return {**metrics, "pairs": float(len(trained))}
    desirable = {"desirable": sum(trained.values()) / len(trained)} if trained else {}
    return {**metrics, "labelled_episodes": float(len(trained)), **desirable}

"""Which episodes DPO and KTO compare, and with what: pairs and labels from the rewards of a group, and KTO's z0.

An episode's reward is the mean over its trajectories (of a role) of R plus all its process rewards. Episodes without
trained tokens are in no pair and have no label, but their rewards count in their group's mean.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from arl.algorithm.batch import Batch
from arl.algorithm.groups import Peers, mean, peers_of, spread_of
from arl.api.settings.algorithm import AlgorithmConfig
from arl.api.settings.objective import LabelsAdvantage, PairsAdvantage


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """An episode among its peers."""

    reward: float
    index: int
    """Its index in the group. Episodes of equal rewards are ranked by it: it says nothing of their quality."""
    members: tuple[int, ...]
    """The places in the batch of its trajectories."""
    is_trained: bool


Labelled = tuple[Standing, float]
"""An episode with its advantage: above 0 if it is desirable, below if not."""


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
        labelled = weighed_labels(everyone, config.advantage)
        chosen = [(unit, standing, advantage) for unit, (standing, advantage) in enumerate(labelled)]
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


def weighed_labels(everyone: Sequence[tuple[Peers, list[Standing]]], settings: LabelsAdvantage) -> list[Labelled]:
    """The labelled episodes with A, weighed among those of the same task (KTO, 2402.01306).

    balanced: A = +-n / (2 n_label), so that lambda_D n_D / (lambda_U n_U) is 1, where the paper wants 1 to 3/2 (in its
    first version to 4/3). The weights of all n episodes add up to n.
    """
    signs = [(peers.group.task, s, sign) for peers, own in everyone for s, sign in labels_of(own, settings)]
    counts = Counter((task, sign) for task, _, sign in signs)
    labelled: list[Labelled] = []
    for task, standing, sign in signs:
        is_weighed = settings.balanced
        weight = (counts[task, 1] + counts[task, -1]) / (2 * counts[task, sign]) if is_weighed else 1.0
        labelled.append((standing, sign * weight))
    return labelled


def labels_of(standings: Sequence[Standing], settings: LabelsAdvantage) -> Iterator[tuple[Standing, int]]:
    """1 for desirable episodes, -1 for undesirable ones."""
    rewards = [s.reward for s in standings]
    bound = mean(rewards) if settings.threshold is None else settings.threshold
    for s in (s for s in standings if s.is_trained):
        if settings.threshold is None and spread_of((s.reward, bound)).std == 0:
            continue  # at the mean, up to rounding
        yield s, 1 if s.reward > bound else -1


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

"""Metrics of batches and totals of runs, computed from records alone. evaluator.py has those of evaluations."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, pstdev

from arl.api.engine import PublishStats
from arl.api.types import Group, Trajectory
from arl.rollout.episode import episode_reward, rewards_by_role

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class RunTotals:
    """Totals of a run over all its starts, kept in checkpoints. The rollout controller keeps its own counters."""

    wall_s: float = 0.0
    """Training time in seconds."""
    max_staleness_seen: int = 0
    """The largest staleness of a trained token so far."""


def episode_rewards(groups: Sequence[Group]) -> list[float]:
    """One reward for each episode. With several trajectories it is the mean over the roles."""
    return [episode_reward(episode) for episode in _episodes(groups)]


def _episodes(groups: Sequence[Group]) -> list[list[Trajectory]]:
    episodes: list[list[Trajectory]] = []
    for group in groups:
        by_episode: dict[int, list[Trajectory]] = {}
        for index, trajectory in zip(group.episode_indices, group.trajectories, strict=True):
            by_episode.setdefault(index, []).append(trajectory)
        episodes += by_episode.values()
    return episodes


def batch_metrics(
    groups: Sequence[Group],
    version: int,
    replayed: Sequence[Group] = (),
    is_trained: Sequence[Sequence[bool]] | None = None,
) -> dict[str, float]:
    """Staleness of the trained tokens at the trainer's `version`, lengths, the workflow's metrics and reward parts.

    replayed: groups of earlier batches, trained beside the new ones. They count in the staleness alone.
    is_trained: for each of `groups`, then of `replayed`, whether the algorithm trained each trajectory; None: all.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    taken = [*trajectories, *(trajectory for group in replayed for trajectory in group.trajectories)]
    chosen = [True] * len(taken) if is_trained is None else [*chain.from_iterable(is_trained)]
    sizes = [t.num_trained_tokens * is_in for t, is_in in zip(taken, chosen, strict=True)]
    trained = [t for t, size in zip(taken, sizes, strict=True) if size]
    num_tokens = sum(t.num_trained_tokens for t in trained)
    found = {
        "staleness/mean": (version * num_tokens - sum(map(_sum_of_versions, trained))) / max(num_tokens, 1),
        "staleness/max": version - min((t.oldest_version or 0 for t in trained), default=version),
        "replayed_groups": len(replayed),
        "equal_groups": fmean(map(_is_equal, groups)),
        "truncated": fmean(t.is_truncated for t in trajectories),
        "branches": fmean(len(own) - len({t.role for t in own}) for own in _episodes(groups)),
        "length/tokens": fmean(len(t.token_ids) for t in trajectories),
        "length/tokens_max": max(len(t.token_ids) for t in trajectories),
        "length/trained_tokens": fmean(sizes[: len(trajectories)]),
        **_lengths_by_outcome(groups, sizes),
        **mean_metrics(trajectories),
        **mean_rewards(_episodes(groups)),
    }
    for name in dict.fromkeys(group.task for group in groups if group.task):
        own = [group for group in groups if group.task == name]
        found |= {
            f"task/{name}/reward": fmean(episode_rewards(own)),
            f"task/{name}/share": len(own) / len(groups),
            f"task/{name}/equal_groups": fmean(map(_is_equal, own)),
        }
    return found


def _lengths_by_outcome(groups: Iterable[Group], sizes: Iterable[int]) -> dict[str, float]:
    """Trained tokens of the episodes above, and of those below, their group's mean reward: each group's mean, averaged
    over the groups with both. Within a group, for hard examples may have longer episodes, won or lost.

    sizes: the trained tokens of each trajectory. Episodes without any count in their group's mean reward alone.
    """
    winning, losing, left = list[float](), list[float](), iter(sizes)
    for group in groups:
        tokens = Counter[int]()
        for index, size in zip(group.episode_indices, left, strict=False):
            tokens[index] += size
        rewards = [episode_reward(episode) for episode in _episodes([group])]
        middle = fmean(rewards)
        above, below = [
            [n for n, reward in zip(tokens.values(), rewards, strict=True) if n and sign * (reward - middle) > 0]
            for sign in (1, -1)
        ]
        if above and below:
            winning.append(fmean(above))
            losing.append(fmean(below))
    return {"length/winning_tokens": fmean(winning), "length/losing_tokens": fmean(losing)} if winning else {}


def _sum_of_versions(trajectory: Trajectory) -> int:
    """Over the trained tokens, which are of one version in most trajectories."""
    if trajectory.oldest_version == trajectory.newest_version:
        return (trajectory.oldest_version or 0) * trajectory.num_trained_tokens
    return int(trajectory.versions[trajectory.loss_mask].sum())


def reward_metrics(rewards: Sequence[float]) -> dict[str, float]:
    """Statistics of a batch's episode rewards."""
    return {
        "reward": fmean(rewards),
        "reward_std": pstdev(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
    }


def _is_equal(group: Group) -> bool:
    """Whether the outcomes are equal within each role."""
    return len({(t.role, t.reward) for t in group.trajectories}) == len({t.role for t in group.trajectories})


def mean_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`episode/NAME`: each workflow metric, averaged over the trajectories that have it."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values.setdefault(f"episode/{name}", []).append(value)
    return {name: fmean(numbers) for name, numbers in values.items()}


def mean_rewards(episodes: Iterable[Sequence[Trajectory]]) -> dict[str, float]:
    """`reward/NAME`: each named part of the reward, averaged over an episode's trajectories that have it, then over
    episodes."""
    values: dict[str, list[float]] = {}
    for trajectories in episodes:
        for name in dict.fromkeys(name for t in trajectories for name in t.rewards):
            own = fmean(t.rewards[name] for t in trajectories if name in t.rewards)
            values.setdefault(f"reward/{name}", []).append(own)
    return {name: fmean(numbers) for name, numbers in values.items()}


def role_rewards(episodes: Iterable[Sequence[Trajectory]]) -> dict[str, float]:
    """`role/NAME/reward`: the reward of each role in an episode, averaged over the episodes that have it. Nothing if
    all trajectories have one role."""
    values: dict[str, list[float]] = {}
    for trajectories in episodes:
        for role, reward in rewards_by_role(trajectories).items():
            values.setdefault(f"role/{role}/reward", []).append(reward)
    return {name: fmean(numbers) for name, numbers in values.items()} if len(values) > 1 else {}


def publish_metrics(published: PublishStats | None) -> dict[str, float]:
    """The metrics of the newest complete publish, which may be of an earlier version."""
    if published is None:
        return {}
    return {
        "weights/version": published.version,
        "weights/snapshot_s": published.snapshot_s,
        "weights/transfer_s": published.transfer_s,
        "weights/pause_s": published.pause_s,
        "weights/bytes": published.num_bytes,
        **({"turns/resume_s": published.resume_s} if published.resume_s else {}),
    }

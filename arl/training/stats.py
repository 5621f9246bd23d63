"""Numbers about batches and runs, from records alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from statistics import fmean, pstdev

from arl.api.engine import PublishStats
from arl.api.types import Group, Trajectory
from arl.rollout.episode import episode_reward


@dataclass(slots=True, kw_only=True)
class RunTotals:
    """What a run adds up over its starts, beside what the rollout controller counts; kept in checkpoints."""

    wall_s: float = 0.0
    max_staleness_seen: int = 0


def episode_rewards(groups: Sequence[Group]) -> list[float]:
    """One reward for each episode: the mean over its roles, where it returned several trajectories."""
    return [episode_reward(episode) for episode in _episodes(groups)]


def _episodes(groups: Sequence[Group]) -> list[list[Trajectory]]:
    """The trajectories of each episode."""
    episodes: list[list[Trajectory]] = []
    for group in groups:
        by_episode: dict[int, list[Trajectory]] = {}
        for index, trajectory in zip(group.episode_indices, group.trajectories, strict=True):
            by_episode.setdefault(index, []).append(trajectory)
        episodes += by_episode.values()
    return episodes


def batch_metrics(
    groups: Sequence[Group], version: int, replayed: Sequence[Group] = (), *, mask_truncated: bool = False
) -> dict[str, float]:
    """Staleness of the trained tokens against the trainer's `version`, lengths, and what the workflow named: its
    metrics and the parts of its reward.

    replayed: groups that were trained beside the new ones. Their tokens have a staleness; all else was said of them
    when they were new. mask_truncated: truncated trajectories are not trained.
    """

    def is_trained(trajectory: Trajectory) -> bool:
        return not (mask_truncated and trajectory.is_truncated)

    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    all_trained = [*trajectories, *(trajectory for group in replayed for trajectory in group.trajectories)]
    staleness = [version - v for t in filter(is_trained, all_trained) for v in compress(t.versions, t.loss_mask)]
    return {
        "staleness/mean": fmean(staleness) if staleness else 0.0,
        "staleness/max": max(staleness, default=0),
        "replayed_groups": len(replayed),
        "equal_groups": fmean(map(_is_equal, groups)),
        "truncated": fmean(t.is_truncated for t in trajectories),
        "branches": fmean(len(own) - len({t.role for t in own}) for own in _episodes(groups)),
        "length/tokens": fmean(len(t.token_ids) for t in trajectories),
        "length/tokens_max": max(len(t.token_ids) for t in trajectories),
        "length/trained_tokens": fmean(t.num_trained_tokens * is_trained(t) for t in trajectories),
        **mean_metrics(trajectories),
        **mean_rewards(_episodes(groups)),
    }


def reward_metrics(rewards: Sequence[float]) -> dict[str, float]:
    """Of a batch's episodes."""
    return {
        "reward": fmean(rewards),
        "reward_std": pstdev(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
    }


def _is_equal(group: Group) -> bool:
    """Whether the outcomes of each role are all equal."""
    return len({(t.role, t.reward) for t in group.trajectories}) == len({t.role for t in group.trajectories})


def mean_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`episode/NAME`: each workflow metric, averaged over the trajectories that have it."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values.setdefault(f"episode/{name}", []).append(value)
    return {name: fmean(numbers) for name, numbers in values.items()}


def mean_rewards(episodes: Iterable[Sequence[Trajectory]]) -> dict[str, float]:
    """`reward/NAME`: each named part of the reward, averaged over the episodes that have it; an episode's own is the
    mean over its trajectories that have it."""
    values: dict[str, list[float]] = {}
    for trajectories in episodes:
        for name in dict.fromkeys(name for t in trajectories for name in t.rewards):
            own = fmean(t.rewards[name] for t in trajectories if name in t.rewards)
            values.setdefault(f"reward/{name}", []).append(own)
    return {name: fmean(numbers) for name, numbers in values.items()}


def publish_metrics(published: PublishStats | None) -> dict[str, float]:
    """Of the newest publish that is complete, which with overlap is that of an earlier version."""
    if published is None:
        return {}
    return {
        "weights/version": published.version,
        "weights/snapshot_s": published.snapshot_s,
        "weights/transfer_s": published.transfer_s,
        "weights/pause_s": published.pause_s,
        "weights/bytes": published.num_bytes,
    }

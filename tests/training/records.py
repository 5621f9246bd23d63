"""Trajectories, groups and steps for the tests of what is made of them."""

from typing import Any

from arl.api.types import Group, StepStats, Trajectory


def trajectory(reward: float = 1.0, versions: tuple[int, ...] = (-1, 3, 4), **fields: Any) -> Trajectory:
    """Three tokens, of which the last two were sampled."""
    values = {"token_ids": (5, 6, 7), "loss_mask": (0, 1, 1), "behavior_logprobs": (0.0, -0.5, -0.25), **fields}
    return Trajectory(versions=versions, reward=reward, **values)


def group(*trajectories: Trajectory, number: int = 7, episodes: tuple[int, ...] | None = None, **fields: Any) -> Group:
    indices = episodes or tuple(range(len(trajectories)))
    return Group(
        group_id=number, example_id=(0, 2), stamp=0, trajectories=trajectories, episode_indices=indices, **fields
    )


def stats(version: int) -> StepStats:
    metrics = {"version": version, "time_s": version * 1.5, "reward": 0.5, "samples_per_s": 8.0, "loss": 0.25}
    return StepStats(
        version=version,
        reward=0.5,
        num_episodes=2,
        mean_staleness=1.0,
        max_staleness_seen=2,
        wait_s=0.1,
        train_s=0.2,
        metrics=metrics | {"staleness/max": 2, "staleness/mean": 1.0},
    )

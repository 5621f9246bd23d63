"""Trajectories, groups and steps for the tests of what is made of them."""

from typing import Any

from arl.api.types import Group, StepStats, Trajectory


def trajectory(versions: tuple[int, ...] = (3, 4), reward: float = 0.0, **changes: Any) -> Trajectory:
    """A prompt token, then one sampled token for each version."""
    n = len(versions)
    plain = {"token_ids": (1,) * (n + 1), "loss_mask": (0,) + (1,) * n, "behavior_logprobs": (0.0,) + (-1.0,) * n}
    return Trajectory(**{**plain, "versions": (-1, *versions), "reward": reward, **changes})


def grouped(*trajectories: Trajectory, number: int = 0, stamp: int = 0, **changes: Any) -> Group:
    """A group of one episode for each trajectory, unless `episode_indices` says otherwise."""
    plain = {"example_id": (0, number), "episode_indices": tuple(range(len(trajectories)))}
    return Group(group_id=number, stamp=stamp, trajectories=trajectories, **{**plain, **changes})


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

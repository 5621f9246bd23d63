"""Advantages belong to a group and a role, whatever the order in which episodes finished."""

import dataclasses
import statistics

import pytest
import torch

from arl.algorithm.advantages import grpo_advantages, to_sequences
from arl.api.errors import TrajectoryError
from arl.api.types import Group, Trajectory


def trajectory(reward: float, role: str = "agent", temperature: float = 1.0) -> Trajectory:
    return Trajectory(
        token_ids=(5, 6, 7, 8),
        loss_mask=(0, 1, 0, 1),
        behavior_logprobs=(0.0, -0.5, 0.0, -1.5),
        versions=(-1, 3, -1, 4),
        reward=reward,
        role=role,
        temperature=temperature,
    )


def group(*trajectories: Trajectory, group_id: int = 0) -> Group:
    return Group(
        group_id=group_id,
        example_id=(0, group_id),
        stamp=0,
        trajectories=trajectories,
        episode_indices=tuple(range(len(trajectories))),
    )


REWARDS = [0.1, 1.0, 0.7, 0.0, 0.3]


def test_an_advantage_is_the_reward_in_sample_standard_deviations_from_the_groups_mean():
    mean, std = statistics.mean(REWARDS), statistics.stdev(REWARDS)
    (advantages,) = grpo_advantages([group(*map(trajectory, REWARDS))], scale_by_std=True)
    assert advantages == pytest.approx([(r - mean) / (std + 1e-6) for r in REWARDS], abs=1e-12)


def test_without_scaling_an_advantage_is_the_distance_from_the_mean():
    (advantages,) = grpo_advantages([group(*map(trajectory, REWARDS))], scale_by_std=False)
    assert advantages == pytest.approx([r - statistics.mean(REWARDS) for r in REWARDS], abs=1e-12)


def test_permuting_a_group_permutes_its_advantages_bit_for_bit():
    order = [3, 0, 4, 2, 1]
    (there,) = grpo_advantages([group(*(trajectory(r) for r in REWARDS))], scale_by_std=True)
    (here,) = grpo_advantages([group(*(trajectory(REWARDS[i]) for i in order))], scale_by_std=True)
    assert here == [there[i] for i in order]


def test_groups_of_different_sizes_do_not_see_each_other():
    big, small = group(*map(trajectory, REWARDS)), group(trajectory(1.0), trajectory(0.0), group_id=1)
    together = grpo_advantages([big, small], scale_by_std=True)
    assert together == [grpo_advantages([g], scale_by_std=True)[0] for g in (big, small)]
    assert grpo_advantages([small, big], scale_by_std=True) == together[::-1]


@pytest.mark.parametrize("scale_by_std", [True, False])
@pytest.mark.parametrize("rewards", [[0.7], [0.1, 0.1, 0.1], [1e9 + 0.1] * 7])
def test_an_episode_alone_or_among_equals_has_advantage_zero_exactly(rewards: list[float], scale_by_std: bool):
    assert grpo_advantages([group(*map(trajectory, rewards))], scale_by_std) == [[0.0] * len(rewards)]


def test_each_role_of_a_group_has_a_baseline_of_its_own():
    mixed = group(
        trajectory(1.0, "solver"), trajectory(9.0, "critic"), trajectory(0.0, "solver"), trajectory(9.0, "critic")
    )
    (advantages,) = grpo_advantages([mixed], scale_by_std=False)
    assert advantages == [0.5, 0.0, -0.5, 0.0]


def test_sequences_carry_their_trajectory_and_its_advantage_on_trained_tokens():
    first, second = trajectory(1.0), trajectory(0.0, temperature=0.5)
    [[_, sequence]] = to_sequences([group(first, second)], [[2.0, -3.0]])
    assert sequence.token_ids.tolist() == [5, 6, 7, 8]
    assert sequence.loss_mask.tolist() == [False, True, False, True]
    assert sequence.behavior_logprobs.tolist() == [0.0, -0.5, 0.0, -1.5]
    assert sequence.advantages.tolist() == [0.0, -3.0, 0.0, -3.0]
    assert sequence.versions.tolist() == [-1, 3, -1, 4]
    assert sequence.temperature == 0.5
    assert (sequence.token_ids.dtype, sequence.loss_mask.dtype) == (torch.int64, torch.bool)
    assert sequence.advantages.dtype == sequence.behavior_logprobs.dtype == torch.float32


def test_rewards_per_token_are_refused_where_they_would_be_lost():
    rewarded = dataclasses.replace(trajectory(1.0), token_rewards=(0.0, 0.5, 0.0, 0.5))
    with pytest.raises(TrajectoryError, match="add its token_rewards up"):
        grpo_advantages([group(rewarded)], scale_by_std=True)

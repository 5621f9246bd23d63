"""Advantages from groups of trajectories, and the training sequences that carry them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from arl.api.errors import TrajectoryError
from arl.api.types import Group, TrainSequence, Trajectory

_EPSILON = 1e-6


def grpo_advantages(groups: Sequence[Group], scale_by_std: bool) -> list[list[float]]:
    """For each group, the advantage of each of its trajectories, in the order of `group.trajectories`.

    GRPO (Shao et al. 2024, DeepSeekMath 2402.03300, section 4.1.2):

        A_i = (R_i - mean(R)) / (std(R) + 1e-6)       without scale_by_std (Dr.GRPO, 2503.20783): A_i = R_i - mean(R)

    R are the returns of the group's trajectories of the same role, as many as there are: agents of different roles
    have rewards of their own, and a group from which episodes were dropped is normalised by those that remain. std is
    the sample standard deviation (n - 1), as in verl, TRL and OpenRLHF. A trajectory that is alone in its role, or
    whose role's rewards are all equal, has advantage 0 exactly.

    Raises TrajectoryError if a trajectory has rewards per token, which would be lost.
    """
    if any(trajectory.token_rewards is not None for group in groups for trajectory in group.trajectories):
        raise TrajectoryError("GRPO gives a trajectory one advantage; add its token_rewards up into its reward")
    return [_of_group(group.trajectories, scale_by_std) for group in groups]


def to_sequences(groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> list[list[TrainSequence]]:
    """For each group the training sequences of its trajectories, advantages broadcast over their trained tokens.

    `advantages` is shaped as grpo_advantages gives it. Proximal logprobs begin as the behavior ones and loss weights
    as 0: `dataclasses.replace` puts recomputed ones and the minibatch's shares in their place.
    """
    return [
        [_sequence(trajectory, advantage) for trajectory, advantage in zip(group.trajectories, values, strict=True)]
        for group, values in zip(groups, advantages, strict=True)
    ]


def _of_group(trajectories: Sequence[Trajectory], scale_by_std: bool) -> list[float]:
    members: dict[str, list[int]] = defaultdict(list)
    for index, trajectory in enumerate(trajectories):
        members[trajectory.role].append(index)
    advantages = [0.0] * len(trajectories)
    for indices in members.values():
        values = _normalised([trajectories[i].reward for i in indices], scale_by_std)
        for index, value in zip(indices, values, strict=True):
            advantages[index] = value
    return advantages


def _normalised(rewards: Sequence[float], scale_by_std: bool) -> list[float]:
    # Compared before subtracting: the rounded mean of equal rewards may differ from each of them.
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    # fsum is exact, so the result does not depend on the order in which episodes finished.
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not scale_by_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + _EPSILON) for c in centred]


def _sequence(trajectory: Trajectory, advantage: float) -> TrainSequence:
    loss_mask = torch.tensor(trajectory.loss_mask, dtype=torch.bool)
    behavior = torch.tensor(trajectory.behavior_logprobs, dtype=torch.float32)
    return TrainSequence(
        token_ids=torch.tensor(trajectory.token_ids, dtype=torch.int64),
        loss_mask=loss_mask,
        behavior_logprobs=behavior,
        proximal_logprobs=behavior,
        advantages=loss_mask * advantage,
        loss_weights=torch.zeros(len(loss_mask)),
        versions=torch.tensor(trajectory.versions, dtype=torch.int64),
        temperature=trajectory.temperature,
    )

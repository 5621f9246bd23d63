"""Groups of trajectories as training sequences, and back to one flat list."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from arl.api.algorithm import OverlongConfig
from arl.api.types import Group, TrainSequence, Trajectory

Batch = list[list[TrainSequence]]
"""For each group the training sequences of its trajectories, in the order of `group.trajectories`."""


def to_sequences(groups: Sequence[Group], overlong: OverlongConfig) -> Batch:
    """The training sequences of each group's trajectories, with what the sampler said of them and nothing else yet.

    With overlong.mask_truncated, those that a length limit ended train no token, and count in no denominator.
    """
    return [[_sequence(t, n, overlong) for t, n in zip(g.trajectories, _episodes(g), strict=True)] for g in groups]


def flat(batch: Sequence[Sequence[TrainSequence]]) -> list[TrainSequence]:
    return [sequence for group in batch for sequence in group]


def regrouped(sequences: Sequence[TrainSequence], like: Sequence[Sequence[TrainSequence]]) -> Batch:
    """`sequences`, which are as many as `like` holds, in groups of its sizes."""
    rest = iter(sequences)
    return [[next(rest) for _ in group] for group in like]


def _episodes(group: Group) -> list[int]:
    """For each trajectory a number that those of the same episode and role have in common."""
    numbers: dict[tuple[int, str], int] = {}
    pairs = zip(group.episode_indices, group.trajectories, strict=True)
    return [numbers.setdefault((episode, t.role), len(numbers)) for episode, t in pairs]


def _sequence(trajectory: Trajectory, episode: int, overlong: OverlongConfig) -> TrainSequence:
    loss_mask = torch.tensor(trajectory.loss_mask, dtype=torch.bool)
    if overlong.mask_truncated and trajectory.is_truncated:
        loss_mask = torch.zeros_like(loss_mask)
    behavior = torch.tensor(trajectory.behavior_logprobs, dtype=torch.float32)
    return TrainSequence(
        token_ids=torch.tensor(trajectory.token_ids, dtype=torch.int64),
        loss_mask=loss_mask,
        behavior_logprobs=behavior,
        proximal_logprobs=behavior,
        versions=torch.tensor(trajectory.versions, dtype=torch.int64),
        temperature=trajectory.temperature,
        episode=episode,
    )

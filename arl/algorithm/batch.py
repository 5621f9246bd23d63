"""Groups of trajectories as training sequences, and back to one flat list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from arl.api.algorithm import Aggregation, OverlongConfig
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


# How token losses become one number: each token's share of a minibatch's loss.


def weigh_tokens(
    minibatch: Sequence[Sequence[TrainSequence]], aggregation: Aggregation, *, sequence_tokens: int = 1
) -> list[TrainSequence]:
    """The sequences of all groups with loss_weights, so that the minibatch's loss is sum(loss_weights * token loss).

    With N trained tokens in the minibatch, n_i of them in an episode's sequences of one role, N_g in group g, and
    counting only episodes (S, apart for each role) and groups (G) that have any:

        token_mean (DAPO, 2503.14476, eq. 8):                    1 / N
        sequence_mean (GRPO, 2402.03300, eq. 3):                 1 / (S n_i)
        sequence_sum (Dr.GRPO, 2503.20783, section 3.2):         1 / (S sequence_tokens)
        group_mean (each group a token mean of its own):         1 / (G N_g)

    The denominators are the whole minibatch's, so the loss is the same however it is split into microbatches or over
    ranks: call this before any split. Untrained tokens weigh 0; an episode without trained tokens counts nowhere,
    and a minibatch of such episodes has loss 0.
    """
    counts = [_trained_tokens(group) for group in minibatch]
    totals = [sum(group.values()) for group in counts]
    num_episodes = sum(count > 0 for group in counts for count in group.values())
    num_groups = sum(total > 0 for total in totals)
    weighed: list[TrainSequence] = []
    for group, group_counts, total in zip(minibatch, counts, totals, strict=True):
        for place, sequence in enumerate(group):
            share = {
                "token_mean": sum(totals),
                "sequence_mean": num_episodes * group_counts[_episode(sequence, place)],
                "sequence_sum": num_episodes * sequence_tokens,
                "group_mean": num_groups * total,
            }[aggregation]
            weights = sequence.loss_mask.to(torch.float32) / max(share, 1)
            weighed.append(replace(sequence, loss_weights=weights))
    return weighed


def _trained_tokens(group: Sequence[TrainSequence]) -> Counter[tuple[int, int]]:
    """Of each episode of the group."""
    counts: Counter[tuple[int, int]] = Counter()
    for place, sequence in enumerate(group):
        counts[_episode(sequence, place)] += int(sequence.loss_mask.sum())
    return counts


def _episode(sequence: TrainSequence, place: int) -> tuple[int, int]:
    """What sequences of one episode and role have in common; one that has no episode is one of its own."""
    return (sequence.episode, -1 if sequence.episode >= 0 else place)

"""Which trajectories and failed episodes experiment trackers get: of different examples, chosen for interest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from arl.api.images import text_with_marks
from arl.api.tracking import TrackedTrajectory, expected_column
from arl.api.types import Group, Trajectory
from arl.rollout.episode import Episode
from arl.rollout.episode_events import Candidate, FirstFailures, shown, told
from arl.rollout.group import episode_name

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""
_Finished = tuple[Candidate, Trajectory]
_Key = Callable[[_Finished], tuple[float, ...]]

_REASONS: tuple[tuple[str, _Key], ...] = (
    ("highest reward", lambda one: (one[1].total_reward, one[0].distance)),
    ("lowest reward", lambda one: (-one[1].total_reward, one[0].distance)),
    ("longest", lambda one: (len(one[1].token_ids),)),
    ("least like its group", lambda one: (one[0].distance,)),
)
"""Why one is chosen, and what then is largest. Rewards that tie are decided by the second number."""
_ANY, _FAILED = "any", "failed"


def choose(candidates: Sequence[Candidate], number: int) -> list[tuple[Candidate, str]]:
    """Up to `number` finished candidates of different examples, each with why it was chosen.

    The reasons take turns; of candidates that tie, the first one is chosen. A reason is passed over where the best
    candidate left is no better than the worst of all. Once all reasons are, the first ones left are chosen, for "any".
    """
    everyone = [(one, one.trajectory) for one in candidates if one.trajectory is not None]
    least = {why: min((key(one)[0] for one in everyone), default=0.0) for why, key in _REASONS}
    chosen: list[tuple[Candidate, str]] = []
    left, turns = everyone, [*_REASONS]
    while left and len(chosen) < number:
        why, key = turns.pop(0) if turns else (_ANY, lambda one: (0.0,))
        best = max(left, key=key)
        if why != _ANY:
            if key(best)[0] == least[why]:
                continue
            turns.append((why, key))
        chosen.append((best[0], why))
        left = [one for one in left if (one[0].task, one[0].example_id) != (best[0].task, best[0].example_id)]
    return chosen


def of_step(
    groups: Sequence[Group],
    advantages: Sequence[float | None],
    failed: Sequence[Candidate],
    number: int,
    decode: Decode | None,
) -> list[TrackedTrajectory]:
    """Up to `number` of a batch's trajectories, and of the episodes that failed. advantages: of the trajectories."""
    candidates = [*_candidates(groups, advantages)]
    chosen = [*choose(candidates, number), *((one, _FAILED) for one in failed[:number])]
    return [_tracked(one, why, decode) for one, why in chosen]


def of_evaluation(episodes: Sequence[Episode], number: int, decode: Decode | None) -> list[TrackedTrajectory]:
    """Up to `number` of an evaluation's trajectories, and of its failed episodes. episodes: in the examples' order."""
    finished, failures = list[Candidate](), FirstFailures()
    for index, episode in enumerate(episodes):
        one = Candidate(name=episode.name, example_id=(0, index), example={}, trajectory=episode.seen)
        finished += [replace(one, trajectory=trajectory) for trajectory in episode.trajectories]
        if episode.error is not None:
            failures.note(replace(one, error=told(episode.error)))
    chosen = [*choose(finished, number), *((one, _FAILED) for one in failures.take()[:number])]
    examples = (shown(episodes[one.example_id[1]].example) for one, _ in chosen)
    return [
        _tracked(replace(one, example=example), why, decode)
        for (one, why), example in zip(chosen, examples, strict=True)
    ]


def _candidates(groups: Sequence[Group], advantages: Sequence[float | None]) -> Iterator[Candidate]:
    left = iter(advantages)
    for group in groups:
        rewards = defaultdict[str, list[float]](list)
        for trajectory in group.trajectories:
            rewards[trajectory.role].append(trajectory.total_reward)
        means = {role: fmean(own) if len({*own}) > 1 else own[0] for role, own in rewards.items()}  # equal: exactly
        for index, trajectory in zip(group.episode_indices, group.trajectories, strict=True):
            yield Candidate(
                name=episode_name(group.group_id, index),
                example_id=group.example_id,
                task=group.task,
                example=group.example,
                group_id=group.group_id,
                index=index,
                trajectory=trajectory,
                advantage=next(left),
                distance=abs(trajectory.total_reward - means[trajectory.role]),
            )


def _tracked(one: Candidate, why: str, decode: Decode | None) -> TrackedTrajectory:
    trajectory, column = one.trajectory, expected_column(one.example)
    text = ""
    if decode and trajectory is not None:
        text = text_with_marks(trajectory.token_ids.tolist(), trajectory.images, decode)
    return TrackedTrajectory(
        why=why,
        name=one.name,
        example_id=one.example_id,
        task=one.task,
        group_id=one.group_id,
        episode=one.index,
        role=trajectory.role if trajectory else "",
        reward=None if trajectory is None or one.error else trajectory.total_reward,
        rewards=trajectory.rewards if trajectory else {},
        metrics=trajectory.metrics if trajectory else {},
        advantage=one.advantage,
        num_tokens=len(trajectory.token_ids) if trajectory else 0,
        num_trained_tokens=trajectory.num_trained_tokens if trajectory else 0,
        oldest_version=trajectory.oldest_version if trajectory else None,
        newest_version=trajectory.newest_version if trajectory else None,
        is_truncated=bool(trajectory and trajectory.is_truncated),
        error=one.error,
        example=one.example,
        expected="" if column is None else str(one.example[column]),
        text=text,
    )

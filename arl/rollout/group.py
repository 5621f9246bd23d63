"""A group while it runs: its episodes, which of them are kept, and whether they make a group to train on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from statistics import fmean

from arl.api.config import RolloutConfig
from arl.api.types import Group, Trajectory
from arl.rollout.buffer import Slot
from arl.rollout.episode import Episode, rewards_by_role
from arl.rollout.ledger import Issue, Outcome
from arl.rollout.watches import Fruitless, Reason

# Which episodes of a group to train, where more have finished than are wanted.


def most_varied(rewards: Sequence[float], count: int) -> list[int]:
    """The indices, ascending, of `count` of the rewards with the largest variance among them (PODS, 2504.13818).

    The best choice is one of the count + 1 that take the k lowest and the count - k highest: the variance is convex in
    each of its members, so that exchanging one for an outer neighbour, on one side or the other, never makes it
    smaller. Exact arithmetic, so that equal rewards are equal: of those the smaller index counts as the lower, and of
    equally good choices the one with the most low ones is made.
    """
    ascending = sorted(range(len(rewards)), key=lambda i: (rewards[i], i))
    exact = [Fraction(rewards[i]) for i in ascending]
    sums = [Fraction(0), *accumulate(exact)]
    squares = [Fraction(0), *accumulate(value * value for value in exact)]

    def spread(num_lowest: int) -> Fraction:
        """count^2 times the variance."""
        high = len(exact) - (count - num_lowest)
        total = sums[num_lowest] + sums[-1] - sums[high]
        return count * (squares[num_lowest] + squares[-1] - squares[high]) - total * total

    best = max(range(count, -1, -1), key=spread)
    high = len(ascending) - (count - best)
    return sorted(ascending[:best] + ascending[high:])


GREEDY = -1
"""The index of the episode that is decoded greedily, as a baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """Which groups can be trained on, beside what rollout's settings say.

    keep: the user's filter; a group for which it is false is rejected. drop_equal_rewards: reject groups of which
    advantages would see no difference. compares_parts: advantages look at a trajectory's named rewards apart (GDPO).
    compares_turns: they compare turns taken in equal states (GiGPO).
    compares_tokens: they are token_rewards alone (distillation).
    has_baseline: one more episode of each group is decoded greedily, for its reward alone (ReMax).
    """

    keep: Callable[[Group], bool] | None = None
    drop_equal_rewards: bool = False
    compares_parts: bool = False
    compares_turns: bool = False
    compares_tokens: bool = False
    has_baseline: bool = False


@dataclass(kw_only=True, eq=False)
class GroupRun:
    """One example's episodes, from admission until there is a group, or a reason why there is none.

    episodes: by index, None until ended. greedy: that of the baseline, likewise. in_order: indices of those that
    finished, the first to finish first. tasks: of the episodes that were begun. launched: all have places, or none will
    get one. decided: nothing that may still run changes what becomes of the group. is_cut: it kept the trainer waiting.
    """

    slot: Slot
    issue: Issue
    config: RolloutConfig
    rules: GroupRules
    episodes: list[Episode | None] = field(init=False)
    greedy: Episode | None = None
    in_order: list[int] = field(default_factory=list[int])
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict[int, "asyncio.Task[None]"])
    launched: asyncio.Event = field(default_factory=asyncio.Event)
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    scope: asyncio.Timeout | None = None
    is_cut: bool = False

    def __post_init__(self) -> None:
        self.episodes = [None] * (self.config.group_size + self.config.extra_episodes)

    @property
    def indices(self) -> list[int]:
        """Of the episodes to run, in the order in which they get places; the others may not need to wait for theirs."""
        return [GREEDY] * self.rules.has_baseline + list(range(len(self.episodes)))

    @property
    def is_full(self) -> bool:
        """Whether it waits for none of its sampled episodes any more, though some may be running."""
        return self.config.keep_episodes == "first" and len(self.in_order) >= self.config.group_size

    @property
    def num_finished(self) -> int:
        return len(self.in_order)

    @property
    def num_failed(self) -> int:
        return sum(e is not None and e.error is not None for e in self.episodes)

    @property
    def num_rejected(self) -> int:
        return sum(e is not None and e.is_rejected for e in self.episodes)

    @property
    def kept(self) -> list[int]:
        """The indices of the episodes to train, ascending: at most group_size of those that finished."""
        size = self.config.group_size
        if self.config.keep_episodes == "first" or self.num_finished <= size:
            return sorted(self.in_order[:size])
        finished = sorted(self.in_order)
        rewards = [_return(self._finished(index)) for index in finished]
        return [finished[position] for position in most_varied(rewards, size)]

    @property
    def reward(self) -> float | None:
        """The mean over all episodes that finished, kept or not; None where none did."""
        return fmean(self._finished(index).reward for index in self.in_order) if self.in_order else None

    def ended(self, index: int, episode: Episode) -> None:
        """Note how an episode ended; the one that makes the group full cancels those that still run."""
        if index == GREEDY:
            self.greedy = episode
        else:
            self.episodes[index] = episode
        if index != GREEDY and episode.is_finished:
            self.in_order.append(index)
            if self.is_full and self.num_finished == self.config.group_size:
                self._cancel_all_but(index, GREEDY)
        if self.is_full and (self.greedy or not self.rules.has_baseline):
            self.decided.set()

    def cut(self) -> None:
        """Cancel its episodes, those that have not begun too."""
        self.is_cut = True
        if self.scope:
            self.scope.reschedule(asyncio.get_running_loop().time())

    def judge(self) -> Group | Fruitless:
        """The group to train on, or why there is none."""
        if self.is_cut:
            return self._fruitless(Outcome.DROPPED, Reason.STRAGGLED)
        enough = min(self.config.min_group_size, self.config.group_size)
        if self.num_finished < enough:
            if self.num_finished + self.num_failed >= enough:
                return self._fruitless(Outcome.DROPPED, Reason.FAILED)
            return self._fruitless(Outcome.REJECTED, Reason.RETURNED_NONE)
        if self.rules.has_baseline and (self.greedy is None or not self.greedy.is_finished):
            is_rejected = self.greedy is not None and self.greedy.is_rejected
            return self._fruitless(Outcome.REJECTED if is_rejected else Outcome.DROPPED, Reason.NO_BASELINE)
        group = self._group()
        if missing := why_not_comparable(group, self.rules):
            return self._fruitless(Outcome.DROPPED, Reason.NOT_COMPARABLE, missing)
        if self.rules.drop_equal_rewards and has_equal_rewards(group, self.rules):
            return self._fruitless(Outcome.REJECTED, Reason.EQUAL_REWARDS)
        if self.rules.keep is not None and not self.rules.keep(group):
            return self._fruitless(Outcome.REJECTED, Reason.FILTERED)
        return group

    def _fruitless(self, outcome: Outcome, reason: Reason, detail: str = "") -> Fruitless:
        return Fruitless(outcome=outcome, reason=reason, detail=detail, reward=self.reward)

    def _cancel_all_but(self, *indices: int) -> None:
        for index, task in self.tasks.items():
            if index not in indices:
                task.cancel()

    def _finished(self, index: int) -> Episode:
        episode = self.episodes[index]
        assert episode is not None
        return episode

    def _group(self) -> Group:
        """Trajectories in the order of their episodes."""
        members = [(index, t) for index in self.kept for t in self._finished(index).trajectories]
        return Group(
            group_id=self.issue.group_id,
            example_id=self.issue.example_id,
            stamp=self.slot.stamp,
            trajectories=tuple(t for _, t in members),
            episode_indices=tuple(index for index, _ in members),
            greedy_rewards=rewards_by_role(self.greedy.trajectories) if self.greedy else {},
        )


def why_not_comparable(group: Group, rules: GroupRules) -> str | None:
    """What advantages would miss in the group, though it is whole; None: nothing."""
    for trajectory in group.trajectories:
        if rules.has_baseline and trajectory.role not in group.greedy_rewards:
            return f"the greedy episode, its baseline, returned no trajectory of role {trajectory.role!r}"
        if rules.compares_tokens and trajectory.token_rewards is None:
            return (
                f"its trajectories of role {trajectory.role!r} have no token_rewards, which "
                "algorithm.advantage.kind=distillation takes; DistillationWorkflow gives them"
            )
        names = next(t.rewards.keys() for t in group.trajectories if t.role == trajectory.role)
        if rules.compares_parts and (not names or trajectory.rewards.keys() != names):
            return (
                f"its trajectories of role {trajectory.role!r} have the named rewards {sorted(names)} and "
                f"{sorted(trajectory.rewards)}, and algorithm.advantage.separate_rewards needs the same ones of all"
            )
    return None


def has_equal_rewards(group: Group, rules: GroupRules) -> bool:
    """Whether advantages see no difference between the trajectories of each role.

    They see outcome rewards and, where rules say so, named ones. Process rewards make a difference wherever there are
    some, since where they lie counts; and with turns compared, how far each was from a common outcome other than 0.
    """
    trajectories = group.trajectories
    parts = [tuple(sorted(t.rewards.items())) if rules.compares_parts else () for t in trajectories]
    seen = {(t.role, t.reward, part) for t, part in zip(trajectories, parts, strict=True)}
    if len(seen) > len({t.role for t in trajectories}) or any(map(_has_process_rewards, trajectories)):
        return False
    turns = [(t.role, turn.state) for t in trajectories if t.reward for turn in t.turns if turn.state is not None]
    return not rules.compares_turns or len(turns) == len(set(turns))


def _has_process_rewards(trajectory: Trajectory) -> bool:
    return any(trajectory.token_rewards or ()) or any(turn.reward for turn in trajectory.turns)


def _return(episode: Episode) -> float:
    """Its reward, and the process rewards of a role's trajectories, which each turn has in one of them alone."""
    trajectories = episode.trajectories
    process = math.fsum(t.total_reward - t.reward for t in trajectories)
    return episode.reward + process / len({t.role for t in trajectories})

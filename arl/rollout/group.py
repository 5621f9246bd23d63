"""The life of a group: its episodes run, and are judged: is there something to train on?"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import fsum, isclose
from statistics import fmean
from typing import Any

from arl.api.settings.run import RolloutConfig
from arl.api.types import Group, Trajectory
from arl.rollout.buffer import Slot
from arl.rollout.episode import Episode, rewards_by_role
from arl.rollout.ledger import GroupOutcome, Issue

GREEDY = -1
"""The index of the episode that is decoded greedily, as a baseline."""


def episode_name(group_id: int, index: int) -> str:
    """An episode's name in the event log."""
    return f"{group_id}.greedy" if index == GREEDY else f"{group_id}.{index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """The rules for groups that can be trained on, besides those of the rollout section."""

    group_size: int | None = None
    """Episodes of each example, if not rollout.group_size."""

    keep: Callable[[Group], bool] | None = None
    """The user's filter: a group for which it is false is rejected."""
    drop_equal_rewards: bool = False
    """Reject a group whose rewards show the advantages no difference."""
    compares_parts: bool = False
    """Advantages look at a trajectory's named rewards one by one (GDPO)."""
    compares_totals: bool = False
    """Advantages compare episodes by the sum of all their rewards (pairs and labels)."""
    compares_turns: bool = False
    """Advantages compare turns that were taken in equal states (GiGPO)."""
    compares_tokens: bool = False
    """Advantages are token_rewards alone (distillation)."""
    has_baseline: bool = False
    """One more episode of each group is decoded greedily, for its reward alone (ReMax)."""


class Reason(Enum):
    """Why a group is not trained: a description of such groups, and what to do about them."""

    RETURNED_NONE = (
        "too many of their episodes returned None",
        "see why arun_episode returns None: it is for examples that turn out useless, not for wrong answers",
    )
    FAILED = (
        "too many of their episodes failed",
        "see the errors above; rollout.min_group_size and rollout.extra_episodes say how many of a group may fail",
    )
    NO_BASELINE = (
        "their greedy episode failed or returned None",
        "see why greedy episodes do not finish; algorithm.advantage.baseline needs them",
    )
    NOT_COMPARABLE = (
        "advantages cannot compare them",
        "let arun_episode return what algorithm.advantage needs, or choose another algorithm",
    )
    EQUAL_REWARDS = (
        "the rewards of each, process rewards included, are equal",
        "take examples that are sometimes solved, raise rollout.group_size, or unset algorithm.dynamic_sampling",
    )
    FILTERED = ("the filter given as keep refused them", "see what keep refuses")
    STRAGGLED = (
        "they kept the trainer waiting",
        "see whether rollout.drop_stragglers_after_s is shorter than a usual episode",
    )

    def __init__(self, description: str, advice: str) -> None:
        self.description = description
        self.advice = advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Fruitless:
    """A group that is not trained."""

    outcome: GroupOutcome
    """The outcome of its example."""
    reason: Reason
    detail: str = ""
    """More about the reason, if more is known."""
    reward: float | None = None
    """The mean over its episodes that finished."""


class GroupRun:
    """One group, from admission until its last episode has ended. `run` is called once.

    play: runs the episode of an index. places: each episode takes one while it runs. example: its columns, long ones
    cut.
    """

    def __init__(
        self,
        slot: Slot,
        issue: Issue,
        config: RolloutConfig,
        rules: GroupRules,
        places: asyncio.Semaphore,
        play: Callable[[GroupRun, int], Awaitable[Episode]],
        example: Mapping[str, Any],
    ) -> None:
        self.slot = slot
        self.issue = issue
        self.example = example
        self._group_size = rules.group_size or config.group_size
        self.episodes: list[Episode | None] = [None] * (self._group_size + config.extra_episodes)
        self.launched = asyncio.Event()
        self.is_cut = False
        self.is_judged = False
        self.is_trainable = False
        """It was judged to be a group to train on."""
        self.lengths: dict[int, tuple[int, bool]] = {}
        """For each episode that ended: the tokens that it received, and whether it ended by itself."""
        self._config = config
        self._rules = rules
        self._places = places
        self._play = play
        self._decided = asyncio.Event()
        self._greedy: Episode | None = None
        self._finished: dict[int, Episode] = {}  # in the order in which they did
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self, take: Callable[[GroupRun, Group | Fruitless], Awaitable[None]]) -> None:
        """Run the episodes. As soon as it is decided, call `take` with the group, or with why there is none.

        Returns when all episodes have ended. `launched` is set once no episode of the group waits for a place.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run_episodes())
            await self._decided.wait()
            await take(self, self._judged())

    def cut(self) -> None:
        """Cancel every episode and start no other. The group is decided, although episodes may be slow to end."""
        self.is_cut = True
        self._cancel_all_but()
        self._decided.set()

    @property
    def is_full(self) -> bool:
        """Whether enough sampled episodes have finished."""
        return len(self._finished) >= self._group_size

    @property
    def num_failed(self) -> int:
        return sum(e is not None and e.error is not None for e in self.episodes)

    @property
    def num_rejected(self) -> int:
        return sum(e is not None and e.is_rejected for e in self.episodes)

    @property
    def kept(self) -> list[int]:
        """The indices of the episodes to train, ascending: the first group_size that finished."""
        return sorted(list(self._finished)[: self._group_size])

    @property
    def rewards(self) -> list[float]:
        """Of all episodes that finished, kept or not."""
        return [episode.reward for episode in self._finished.values()]

    async def _run_episodes(self) -> None:
        try:
            async with asyncio.TaskGroup() as episodes:
                for index in [GREEDY] * self._rules.has_baseline + list(range(len(self.episodes))):
                    await self._places.acquire()
                    if self.is_full or self.is_cut:
                        self._places.release()
                        break
                    self._tasks[index] = episodes.create_task(self._run_episode(index))
                    self._tasks[index].add_done_callback(lambda _: self._places.release())
                self.launched.set()
        finally:
            self._tasks.clear()  # what cancelled tasks refer to, this group too, would be left to the garbage collector
        self._decided.set()

    async def _run_episode(self, index: int) -> None:
        """The one that makes the group full cancels those that still run."""
        episode = await self._play(self, index)
        if index == GREEDY:
            self._greedy = episode
        else:
            self.episodes[index] = episode
            if episode.is_finished:
                self._finished[index] = episode
                if len(self._finished) == self._group_size:
                    self._cancel_all_but(index, GREEDY)
        if self.is_full and (self._greedy or not self._rules.has_baseline):
            self._decided.set()

    def _cancel_all_but(self, *indices: int) -> None:
        for index, task in self._tasks.items():
            if index not in indices:
                task.cancel()

    def _judged(self) -> Group | Fruitless:
        if self.is_cut:
            return self._fruitless(GroupOutcome.DROPPED, Reason.STRAGGLED)
        enough = min(self._config.min_group_size, self._group_size)
        if len(self._finished) < enough:
            if len(self._finished) + self.num_failed >= enough:
                return self._fruitless(GroupOutcome.DROPPED, Reason.FAILED)
            return self._fruitless(GroupOutcome.REJECTED, Reason.RETURNED_NONE)
        if self._rules.has_baseline and (self._greedy is None or not self._greedy.is_finished):
            is_rejected = self._greedy is not None and self._greedy.is_rejected
            return self._fruitless(GroupOutcome.REJECTED if is_rejected else GroupOutcome.DROPPED, Reason.NO_BASELINE)
        members = [(index, t) for index in self.kept for t in self._finished[index].trajectories]
        group = Group(
            group_id=self.issue.group_id,
            example_id=self.issue.example_id,
            stamp=self.slot.stamp,
            trajectories=tuple(t for _, t in members),
            episode_indices=tuple(index for index, _ in members),
            greedy_rewards=rewards_by_role(self._greedy.trajectories) if self._greedy else {},
            example=self.example,
            task=self.issue.task,
        )
        if missing := why_not_comparable(group, self._rules):
            return self._fruitless(GroupOutcome.DROPPED, Reason.NOT_COMPARABLE, missing)
        if self._rules.drop_equal_rewards and has_equal_rewards(group, self._rules):
            return self._fruitless(GroupOutcome.REJECTED, Reason.EQUAL_REWARDS)
        try:
            is_kept = self._rules.keep is None or self._rules.keep(group)
        except (SystemExit, KeyboardInterrupt) as error:  # they would stop the event loop before anything is saved
            raise RuntimeError(f"the filter given as keep raised {error!r}") from error
        return group if is_kept else self._fruitless(GroupOutcome.REJECTED, Reason.FILTERED)

    def _fruitless(self, outcome: GroupOutcome, reason: Reason, detail: str = "") -> Fruitless:
        reward = fmean(self.rewards) if self._finished else None
        return Fruitless(outcome=outcome, reason=reason, detail=detail, reward=reward)


def why_not_comparable(group: Group, rules: GroupRules) -> str | None:
    """Describes what advantages need and the group lacks; None if it lacks nothing."""
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

    They see outcome rewards and, if the rules say so, named ones. Any process reward is a difference, since its place
    counts. If turns are compared, so is a turn's distance from an outcome other than 0. If totals are compared, only
    their difference counts: an episode's outcome, the mean over its trajectories, plus all its process rewards.
    """
    if rules.compares_totals:
        members = defaultdict[str, dict[int, list[Trajectory]]](dict)
        for index, trajectory in zip(group.episode_indices, group.trajectories, strict=True):
            members[trajectory.role].setdefault(index, []).append(trajectory)
        for episodes in members.values():
            totals = [
                fmean(t.reward for t in own) + fsum(r for t in own for r in t.process_rewards)
                for own in episodes.values()
            ]
            if not isclose(min(totals), max(totals), rel_tol=2**-50):  # more than rounding
                return False
        return True
    trajectories = group.trajectories
    parts = [tuple(sorted(t.rewards.items())) if rules.compares_parts else () for t in trajectories]
    seen = {(t.role, t.reward, part) for t, part in zip(trajectories, parts, strict=True)}
    if len(seen) > len({t.role for t in trajectories}) or any(any(t.process_rewards) for t in trajectories):
        return False
    turns = [(t.role, turn.state) for t in trajectories if t.reward for turn in t.turns if turn.state is not None]
    return not rules.compares_turns or len(turns) == len(set(turns))

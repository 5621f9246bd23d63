"""The buffer between rollouts and training. It keeps every trained token, replayed ones too, within max_staleness.

    rollout loop --admit--> RUNNING --finish--> FINISHED --take_batch--> TAKEN --published--> gone
                               |
                               +----release----> gone   (rejected or dropped)

| who waits | for | woken by |
|---|---|---|
| admit | fewer than (max_staleness + 1) * batch_size groups charged | published, release |
| take_batch | a batch whose removal leaves no group that must miss its deadline | finish, release |
| wait_for_stragglers | a running group that keeps take_batch waiting too long | any of these, and the clock |

docs/staleness.md argues that the first two conditions bound staleness, and that waiting always ends. Replay keeps
groups that were trained, and adds them to later batches while they are fresh enough.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from math import inf
from operator import attrgetter

from arl.api.errors import StalenessError
from arl.api.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A group's place in the buffer."""

    number: int
    """Its place in the order of admission, from 0."""
    stamp: int
    """The version that was published at admission."""


class _Stage(Enum):
    RUNNING = "running"
    FINISHED = "finished"
    TAKEN = "taken"


@dataclass(slots=True, kw_only=True)
class _Entry:
    slot: Slot
    deadline: int
    """The last version whose batch may hold it."""
    stage: _Stage = _Stage.RUNNING
    group: Group | None = None
    trained_in: int | None = None


@dataclass(slots=True, kw_only=True)
class _SameDeadline:
    """The running groups of one deadline."""

    admitted: dict[int, float] = field(default_factory=dict[int, float])
    """When each was admitted, by the number of its slot."""
    blocking_since: float | None
    """When this deadline began to keep take_batch waiting. A group admitted later blocks from its admission on."""


class ReplayBuffer:
    """Groups between admission and publication. All methods belong to one event loop.

    A group is charged from admission until weights trained on it are published, or until it is released. One rollout
    loop admits and one trainer takes. version: of the first batch. Only `untrained` and `restore` look at all groups.
    A change costs the logarithm of their number; while take_batch waits for stragglers, it also costs a term for each
    deadline, of which there are about max_staleness.
    """

    def __init__(self, batch_size: int, max_staleness: int, version: int = 0) -> None:
        if batch_size < 1 or max_staleness < 0:
            raise ValueError(f"batch_size is {batch_size} and max_staleness {max_staleness}; give at least 1 and 0")
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._version: int = version
        self._published = version
        self._next_number = 0
        self._entries: dict[int, _Entry] = {}
        self._running: dict[int, _SameDeadline] = {}
        self._finished: list[tuple[int, int]] = []
        """A heap: (deadline, number of the slot)."""
        self._num_finished: Counter[int] = Counter()
        """Deadline -> the number of finished groups."""
        self._taken: dict[int, list[int]] = {}
        """The version that a batch was taken for -> the numbers of its slots."""
        self._is_taking = False
        self._blocked_until: float = -inf
        """Running groups with this deadline or an earlier one keep take_batch waiting: all, if too few have ended."""
        self._changed = asyncio.Condition()

    @property
    def capacity(self) -> int:
        """How many groups may be charged at once."""
        return (self._max_staleness + 1) * self._batch_size

    @property
    def num_charged(self) -> int:
        return len(self._entries)

    @property
    def num_running(self) -> int:
        return sum(len(running.admitted) for running in self._running.values())

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    async def admit(self) -> Slot:
        """Wait for room, and charge one group for it, stamped with the version published now."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_charged < self.capacity)
            slot = Slot(number=self._next_number, stamp=self._published)
            self._next_number += 1
            deadline, now = slot.stamp + self._max_staleness, asyncio.get_running_loop().time()
            self._entries[slot.number] = _Entry(slot=slot, deadline=deadline)
            if deadline not in self._running:
                self._running[deadline] = _SameDeadline(blocking_since=now if deadline <= self._blocked_until else None)
            self._running[deadline].admitted[slot.number] = now
            self._notify()
            return slot

    async def finish(self, slot: Slot, group: Group) -> None:
        """Hand over the group that ran in `slot`. All of its tokens were sampled after its admission."""
        oldest = group.oldest_version
        if oldest < slot.stamp:
            raise ValueError(
                f"group {group.group_id} holds a token of version {oldest}, but was admitted at version {slot.stamp}"
            )
        async with self._changed:
            entry = self._ended(slot)
            entry.group = group
            entry.deadline = oldest + self._max_staleness
            self._finish(entry)
            self._notify()

    async def release(self, slot: Slot) -> None:
        """Free the place of a running group that is rejected or dropped."""
        async with self._changed:
            del self._entries[self._ended(slot).slot.number]
            self._notify()

    def untrained(self, version: int) -> list[Group]:
        """Finished groups that no batch before `version` has trained, for a checkpoint of that version."""
        waiting = (
            entry.group
            for entry in self._entries.values()
            if entry.group and (entry.trained_in is None or entry.trained_in >= version)
        )
        return sorted(waiting, key=_admission)

    def restore(self, groups: Iterable[Group]) -> list[Group]:
        """Put a checkpoint's groups back before any is admitted; return those that no batch could now hold in time."""
        kept: list[Group] = []
        unusable: list[Group] = []
        for group in sorted(groups, key=lambda group: group.oldest_version):
            batches_left = group.oldest_version + self._max_staleness - self._version + 1
            (kept if len(kept) < batches_left * self._batch_size else unusable).append(group)
        for group in sorted(kept, key=_admission):
            slot = Slot(number=self._next_number, stamp=group.stamp)
            self._next_number += 1
            deadline = group.oldest_version + self._max_staleness
            self._entries[slot.number] = _Entry(slot=slot, deadline=deadline, group=group)
            self._finish(self._entries[slot.number])
        return unusable

    async def take_batch(self, version: int) -> list[Group]:
        """Wait for, and remove, batch_size finished groups: the batch for `version`, the next in sequence.

        Takes the earliest deadlines first, and returns the groups in order of admission, which is that of their ids.
        Raises StalenessError if a token is too old, which only a defect here can cause.
        """
        if version != self._version:
            raise ValueError(f"take_batch was called for version {version}; the next batch is for {self._version}")
        async with self._changed:
            self._is_taking = True
            self._notify()
            try:
                await self._changed.wait_for(lambda: self._blocked_until == -inf)
                batch = [self._take_earliest() for _ in range(self._batch_size)]
                self._taken[version] = [entry.slot.number for entry in batch]
                self._version += 1
            finally:
                self._is_taking = False
                self._notify()
        groups = sorted((entry.group for entry in batch if entry.group), key=_admission)
        check_staleness(groups, version, self._max_staleness)
        return groups

    async def published(self, version: int) -> None:
        """Note that every serving server holds `version`: stamp later groups with it, and uncharge trained ones."""
        async with self._changed:
            if not self._published <= version <= self._version:
                raise ValueError(
                    f"version {version} cannot be published after {self._published}, with {self._version} trained"
                )
            self._published = version
            for trained_in in [taken for taken in self._taken if taken < version]:
                for number in self._taken.pop(trained_in):
                    del self._entries[number]
            self._notify()

    async def wait_for_stragglers(self, after_s: float) -> list[Slot]:
        """Wait until running groups have kept the trainer waiting for `after_s` seconds, and return their slots."""
        clock = asyncio.get_running_loop()
        async with self._changed:
            while True:
                overdue, next_due = self._overdue(clock.time(), after_s)
                if overdue:
                    return [self._entries[number].slot for number in sorted(overdue)]
                try:
                    async with asyncio.timeout_at(next_due):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    def _overdue(self, now: float, after_s: float) -> tuple[list[int], float | None]:
        """The numbers of slots that have kept the trainer waiting for `after_s`, and when the next one will have."""
        overdue: list[int] = []
        next_due: float | None = None
        for running in self._running.values():
            if running.blocking_since is None:
                continue
            for number, admitted in running.admitted.items():  # in order of admission
                due = max(running.blocking_since, admitted) + after_s
                if due > now:
                    next_due = due if next_due is None else min(next_due, due)
                    break
                overdue.append(number)
        return overdue, next_due

    def _ended(self, slot: Slot) -> _Entry:
        """The entry of a group that has just stopped running."""
        entry = self._entries.get(slot.number)
        if entry is None or entry.stage is not _Stage.RUNNING:
            raise ValueError(f"slot {slot.number} is not running: it was finished or released before")
        running = self._running[entry.deadline]
        del running.admitted[slot.number]
        if not running.admitted:
            del self._running[entry.deadline]
        return entry

    def _finish(self, entry: _Entry) -> None:
        entry.stage = _Stage.FINISHED
        heappush(self._finished, (entry.deadline, entry.slot.number))
        self._num_finished[entry.deadline] += 1

    def _take_earliest(self) -> _Entry:
        """Take the finished group with the earliest deadline; of several, the one admitted first."""
        deadline, number = heappop(self._finished)
        self._num_finished[deadline] -= 1
        if not self._num_finished[deadline]:
            del self._num_finished[deadline]
        entry = self._entries[number]
        entry.stage = _Stage.TAKEN
        entry.trained_in = self._version
        return entry

    def _first_overfull(self) -> int | None:
        """The look-ahead test: the first deadline by which more groups stay behind than later batches can hold.

        After the batch for version t, the batches for t+1..d hold (d - t) * batch_size groups; all groups with a
        deadline up to d must fit into them.
        """
        to_take, left_behind = self._batch_size, 0
        for deadline in sorted(self._running.keys() | self._num_finished.keys()):
            taken = min(to_take, self._num_finished[deadline])
            to_take -= taken
            running = self._running.get(deadline)
            left_behind += self._num_finished[deadline] - taken + (len(running.admitted) if running else 0)
            if left_behind > max(0, (deadline - self._version) * self._batch_size):
                return deadline
        return None

    def _notify(self) -> None:
        """After each mutation, with the lock held: bring the stragglers' clocks up to date and wake every waiter."""
        blocked_until: float = -inf
        if self._is_taking and len(self._finished) < self._batch_size:
            blocked_until = inf
        elif self._is_taking and (overfull := self._first_overfull()) is not None:
            blocked_until = overfull
        if blocked_until != self._blocked_until:
            self._blocked_until, now = blocked_until, asyncio.get_running_loop().time()
            for deadline, running in self._running.items():
                if deadline > blocked_until:
                    running.blocking_since = None
                elif running.blocking_since is None:
                    running.blocking_since = now
        self._changed.notify_all()


def check_staleness(groups: Iterable[Group], version: int, max_staleness: int) -> None:
    """Raise StalenessError if a batch for `version` holds a token that is too old."""
    for group in groups:
        if version - group.oldest_version > max_staleness:
            raise StalenessError(
                f"group {group.group_id} holds a token of version {group.oldest_version} in the batch for version "
                f"{version}; max_staleness is {max_staleness}. This is a defect of arl's buffers"
            )


_admission = attrgetter("group_id")
"""The order of batches. A group that ran again after a resume stands where it stood."""


class Replay:
    """Adds groups of earlier batches to later ones, each once to a batch.

    num_groups: the most that a batch gets. min_reward: a group is kept if one of its trajectories has a reward above
    it. A group trained at version t, with tokens of version v, may join the batches t + 1 to v + max_staleness. A batch
    gets the least stale groups: those whose oldest token is newest, and among equals those admitted last.
    """

    def __init__(self, num_groups: int = 0, *, min_reward: float = 0.0, max_staleness: int = 0) -> None:
        self._num_groups = num_groups
        self._min_reward = min_reward
        self._max_staleness = max_staleness
        self._kept: dict[int, Group] = {}

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that are kept, for a checkpoint."""
        return tuple(self._kept.values())

    def add(self, groups: Iterable[Group], version: int) -> None:
        """Keep the good groups of the batch that made `version`, or of its checkpoint; forget old ones."""
        if not self._num_groups:
            return
        good = [g for g in groups if any(t.total_reward > self._min_reward for t in g.trajectories)]
        self._kept |= {group.group_id: group for group in good}
        self._kept = {number: group for number, group in self._kept.items() if self._is_fresh(group, version)}

    def take(self, version: int) -> list[Group]:
        """The groups to add to the batch for `version`, least stale first. They stay here. Raises StalenessError."""
        fresh = [group for group in self._kept.values() if self._is_fresh(group, version)]
        chosen = sorted(fresh, key=lambda group: (group.oldest_version, group.group_id), reverse=True)
        chosen = chosen[: self._num_groups]
        check_staleness(chosen, version, self._max_staleness)
        return chosen

    def _is_fresh(self, group: Group, version: int) -> bool:
        return version - group.oldest_version <= self._max_staleness

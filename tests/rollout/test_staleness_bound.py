"""The bound of docs/staleness.md over random events, and proof that these tests can fail."""

from collections.abc import Iterable

import pytest
from random_life import live

from arl.api.errors import StalenessError
from arl.api.types import Group
from arl.rollout.buffer import Replay, ReplayBuffer, Slot


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(part, marks=pytest.mark.runs) for part in range(2, 10))])
def test_the_bound_holds_and_nobody_waits_in_vain_over_random_events_crashes_and_resumes(part: int) -> None:
    """After each of a million events, most of them in make test-runs; see random_life.py. Every kind happens often."""
    seen = live(100_000, first_seed=1000 * part)
    assert seen.total() == 100_000
    assert min(seen.values()) > 100


# Mistakes, each in one rule of docs/staleness.md. Random events find each.


class WithoutLookAhead(ReplayBuffer):
    def _first_overfull(self) -> None:
        return None


class UnchargedWhenTaken(ReplayBuffer):
    async def take_batch(self, version: int) -> list[object]:
        batch = await super().take_batch(version)
        for number in self._taken.pop(version):
            del self._entries[number]
        return batch


class LookAheadOffByOne(ReplayBuffer):
    def _first_overfull(self) -> int | None:
        self._version -= 1
        try:
            return super()._first_overfull()
        finally:
            self._version += 1


class OnePlaceTooMany(ReplayBuffer):
    @property
    def capacity(self) -> int:
        return super().capacity + 1


class StampedWithTheTrainersVersion(ReplayBuffer):
    async def admit(self) -> Slot:
        published, self._published = self._published, self._version
        try:
            return await super().admit()
        finally:
            self._published = published


class LatestDeadlineFirst(ReplayBuffer):
    def _take_earliest(self) -> object:
        self._finished.sort(reverse=True)
        deadline, number = self._finished[0]
        self._finished.sort()
        self._finished.remove((deadline, number))
        self._finished.insert(0, (deadline, number))
        return super()._take_earliest()


class DeadlineOfTheStamp(ReplayBuffer):
    """The versions of a finished group's tokens are not looked at."""

    def _finish(self, entry: object) -> None:
        entry.deadline = entry.slot.stamp + self._max_staleness
        super()._finish(entry)


class ReleasedAndStillCharged(ReplayBuffer):
    async def release(self, slot: Slot) -> None:
        self._ended(slot)


class WakesNobodyOnRelease(ReplayBuffer):
    async def release(self, slot: Slot) -> None:
        del self._entries[self._ended(slot).slot.number]


class LookAheadOfFinishedAlone(ReplayBuffer):
    def _first_overfull(self) -> int | None:
        running, self._running = self._running, {}
        try:
            return super()._first_overfull()
        finally:
            self._running = running


class UnchargedOneVersionEarly(ReplayBuffer):
    async def published(self, version: int) -> None:
        await super().published(version)
        for number in self._taken.pop(version, []):
            del self._entries[number]


class RestoresAllOfACheckpoint(ReplayBuffer):
    def restore(self, groups: Iterable[Group]) -> list[Group]:
        self._batch_size, batch_size = 10**6, self._batch_size
        try:
            return super().restore(groups)
        finally:
            self._batch_size = batch_size


class ForgetsTheBatchInHand(ReplayBuffer):
    def untrained(self, version: int) -> list[Group]:
        return [entry.group for entry in self._entries.values() if entry.group and entry.trained_in is None]


class SavesTrainedGroups(ReplayBuffer):
    def untrained(self, version: int) -> list[Group]:
        return super().untrained(version - 1)


class CutsAnybody(ReplayBuffer):
    def _overdue(self, now: float, after_s: float) -> tuple[list[int], float | None]:
        return [number for running in self._running.values() for number in running.admitted], None


@pytest.mark.parametrize(
    "mistaken",
    [
        *(WithoutLookAhead, LookAheadOffByOne, UnchargedWhenTaken, OnePlaceTooMany),
        *(StampedWithTheTrainersVersion, LatestDeadlineFirst, DeadlineOfTheStamp),
        *(ReleasedAndStillCharged, WakesNobodyOnRelease, LookAheadOfFinishedAlone, UnchargedOneVersionEarly),
        *(RestoresAllOfACheckpoint, ForgetsTheBatchInHand, SavesTrainedGroups, CutsAnybody),
    ],
)
def test_random_events_find_a_mistake_in_any_rule(mistaken: type[ReplayBuffer]) -> None:
    with pytest.raises((AssertionError, StalenessError, ValueError)):
        live(50_000, mistaken)


class ReplaysOldGroups(Replay):
    def _is_fresh(self, group: Group, version: int) -> bool:
        return version - group.oldest_version <= self._max_staleness + 1


def test_random_events_find_a_mistake_of_replay() -> None:
    with pytest.raises((AssertionError, StalenessError)):
        live(50_000, replay_type=ReplaysOldGroups)

"""A slow, obvious twin of ReplayBuffer: it looks at all groups after each change."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from arl.api.types import Group
from arl.rollout.buffer import Slot


class Stage(Enum):
    RUNNING = "running"
    FINISHED = "finished"
    TAKEN = "taken"


@dataclass(slots=True, kw_only=True)
class Entry:
    slot: Slot
    deadline: int
    """The last version whose batch may hold it."""
    stage: Stage = Stage.RUNNING
    group: Group | None = None
    trained_in: int | None = None
    blocking_since: float | None = None


class SlowBuffer:
    """See there."""

    def __init__(self, batch_size: int, max_staleness: int, version: int = 0) -> None:
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._version = version
        self._published = version
        self._next_number = 0
        self._entries: dict[int, Entry] = {}
        self._is_taking = False
        self._changed = asyncio.Condition()

    @property
    def capacity(self) -> int:
        return (self._max_staleness + 1) * self._batch_size

    @property
    def num_charged(self) -> int:
        return len(self._entries)

    @property
    def num_running(self) -> int:
        return len(self._in(Stage.RUNNING))

    @property
    def num_finished(self) -> int:
        return len(self._in(Stage.FINISHED))

    async def admit(self) -> Slot:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._entries) < self.capacity)
            slot = Slot(number=self._next_number, stamp=self._published)
            self._next_number += 1
            self._entries[slot.number] = Entry(slot=slot, deadline=slot.stamp + self._max_staleness)
            self._notify()
            return slot

    async def finish(self, slot: Slot, group: Group) -> None:
        async with self._changed:
            entry = self._running(slot)
            entry.stage = Stage.FINISHED
            entry.group = group
            entry.deadline = group.oldest_version + self._max_staleness
            self._notify()

    async def release(self, slot: Slot) -> None:
        async with self._changed:
            del self._entries[self._running(slot).slot.number]
            self._notify()

    def untrained(self, version: int) -> list[Group]:
        waiting = (
            entry.group
            for entry in self._entries.values()
            if entry.group and (entry.trained_in is None or entry.trained_in >= version)
        )
        return sorted(waiting, key=lambda group: group.group_id)

    async def take_batch(self, version: int) -> list[Group]:
        async with self._changed:
            self._is_taking = True
            self._notify()
            try:
                await self._changed.wait_for(self._may_take)
                batch = self._earliest()
                for entry in batch:
                    entry.stage = Stage.TAKEN
                    entry.trained_in = version
                self._version += 1
            finally:
                self._is_taking = False
                self._notify()
        return sorted((entry.group for entry in batch if entry.group), key=lambda group: group.group_id)

    async def published(self, version: int) -> None:
        async with self._changed:
            self._published = version
            for entry in self._in(Stage.TAKEN):
                if entry.trained_in is not None and entry.trained_in < version:
                    del self._entries[entry.slot.number]
            self._notify()

    async def wait_for_stragglers(self, after_s: float) -> list[Slot]:
        clock = asyncio.get_running_loop()
        async with self._changed:
            while True:
                since = {e.slot: e.blocking_since for e in self._entries.values() if e.blocking_since is not None}
                overdue = [slot for slot, start in since.items() if start + after_s <= clock.time()]
                if overdue:
                    return overdue
                next_due = min(since.values()) + after_s if since else None
                try:
                    async with asyncio.timeout_at(next_due):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    def _in(self, stage: Stage) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.stage is stage]

    def _running(self, slot: Slot) -> Entry:
        entry = self._entries[slot.number]
        assert entry.stage is Stage.RUNNING
        return entry

    def _earliest(self) -> list[Entry]:
        finished = sorted(self._in(Stage.FINISHED), key=lambda entry: (entry.deadline, entry.slot.number))
        return finished[: self._batch_size]

    def _may_take(self) -> bool:
        batch = self._earliest()
        return len(batch) == self._batch_size and self._first_overfull(batch) is None

    def _first_overfull(self, batch: list[Entry]) -> int | None:
        chosen = {entry.slot.number for entry in batch}
        left_behind = sorted(
            entry.deadline
            for entry in self._entries.values()
            if entry.stage is not Stage.TAKEN and entry.slot.number not in chosen
        )
        for count, deadline in enumerate(left_behind, start=1):
            if count > (deadline - self._version) * self._batch_size:
                return deadline
        return None

    def _blocking(self) -> Iterable[Entry]:
        running = self._in(Stage.RUNNING)
        batch = self._earliest()
        if len(batch) < self._batch_size:
            return running
        overfull = self._first_overfull(batch)
        return [entry for entry in running if overfull is not None and entry.deadline <= overfull]

    def _notify(self) -> None:
        now = asyncio.get_running_loop().time()
        blocking = {entry.slot.number for entry in self._blocking()} if self._is_taking else frozenset[int]()
        for number, entry in self._entries.items():
            if number not in blocking:
                entry.blocking_since = None
            elif entry.blocking_since is None:
                entry.blocking_since = now
        self._changed.notify_all()

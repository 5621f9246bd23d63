"""ReplayBuffer decides at each step as its slow twin does, whatever happens to groups and in which order."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from simulation import group
from virtual_time import run_in_virtual_time

from arl.rollout.buffer import ReplayBuffer, Slot

OVERDUE_S = 5.0
KINDS = [*["round"] * 6, *["admit"] * 3, "fill", "finish", "finish younger", "release", "take", "cancel", "publish"]
events = st.tuples(st.sampled_from(KINDS), st.integers(0, 1000), st.sampled_from([0.0, 0.0, 0.0, 0.5, 2.0, 4.5]))
"""What happens, to which group or version, and how much time passes then."""


@dataclass(slots=True)
class Entry:
    slot: Slot
    deadline: int
    """The last version whose batch may hold it."""
    stage: str = "running"
    trained_in: int | None = None
    blocking_since: float | None = None


class SlowTwin:
    """The buffer, the trainer that takes and the watch that cuts stragglers. It looks at all groups after each change.

    taken: the numbers of each batch's groups. cut: (when, the numbers of stragglers).
    """

    def __init__(self, batch_size: int, max_staleness: int) -> None:
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.taken: list[list[int]] = []
        self.cut: list[tuple[float, list[int]]] = []
        self.is_taking = False
        self._now = 0.0
        self._num_admitted = 0
        self._published = 0
        self._entries: dict[int, Entry] = {}

    @property
    def room(self) -> int:
        return (self.max_staleness + 1) * self.batch_size - len(self._entries)

    def admit(self) -> Slot:
        slot = Slot(number=self._num_admitted, stamp=self._published)
        self._num_admitted += 1
        self._entries[slot.number] = Entry(slot, slot.stamp + self.max_staleness)
        self.decide()
        return slot

    def finish(self, slot: Slot, oldest: int) -> None:
        entry = self._entries[slot.number]
        entry.stage, entry.deadline, entry.blocking_since = "finished", oldest + self.max_staleness, None
        self.decide()

    def release(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            del self._entries[number]
        self.decide()

    def publish(self, version: int) -> None:
        self._published = version
        self.release([n for n, e in self._entries.items() if e.trained_in is not None and e.trained_in < version])

    def pass_time(self, seconds: float) -> None:
        until = self._now + seconds
        while blocking := [e for e in self._in("running") if e.blocking_since is not None]:
            due = OVERDUE_S + min(e.blocking_since or 0.0 for e in blocking)
            if due > until:
                break
            self._now, overdue = due, [e.slot.number for e in blocking if e.blocking_since == due - OVERDUE_S]
            self.cut.append((due, overdue))
            self.release(overdue)
        self._now = until

    def decide(self) -> None:
        """Take a batch if it is asked for and may be taken, or else note which groups keep it waiting."""
        blocked_until = self._blocked_until() if self.is_taking else -inf
        if self.is_taking and blocked_until == -inf:
            for entry in (batch := self._earliest()):
                entry.stage, entry.trained_in = "taken", len(self.taken)
            self.taken.append(sorted(entry.slot.number for entry in batch))
            self.is_taking = False
        for entry in self._in("running"):
            if entry.deadline > blocked_until:
                entry.blocking_since = None
            elif entry.blocking_since is None:
                entry.blocking_since = self._now

    def state(self) -> dict[str, Any]:
        version, finished = len(self.taken), self._in("finished")
        untrained = [
            sorted(e.slot.number for e in (*finished, *(e for e in self._in("taken") if (e.trained_in or 0) >= since)))
            for since in (version - 1, version)
        ]
        counts = len(self._entries), len(self._in("running")), len(finished)
        return {"counts": counts, "untrained": untrained, "cut": self.cut, "taken": self.taken}

    def _in(self, stage: str) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.stage == stage]

    def _earliest(self) -> list[Entry]:
        return sorted(self._in("finished"), key=lambda entry: (entry.deadline, entry.slot.number))[: self.batch_size]

    def _blocked_until(self) -> float:
        """Running groups with a deadline up to this keep a batch from being taken."""
        batch = self._earliest()
        if len(batch) < self.batch_size:
            return inf
        waiting = [*self._in("running"), *self._in("finished")]
        left_behind = sorted(entry.deadline for entry in waiting if entry not in batch)
        for count, deadline in enumerate(left_behind, start=1):
            if count > (deadline - len(self.taken)) * self.batch_size:
                return deadline
        return -inf


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Twins:
    """Both, with what a trainer took from the buffer and what a watch cut."""

    def __init__(self, batch_size: int, max_staleness: int) -> None:
        self.buffer = ReplayBuffer(batch_size, max_staleness)
        self.slow = SlowTwin(batch_size, max_staleness)
        self.taken: list[list[int]] = []
        self.cut: list[tuple[float, list[int]]] = []
        self.running: list[Slot] = []
        self.published = 0
        self.taking: asyncio.Task[None] | None = None

    async def cut_stragglers(self) -> None:
        while True:
            slots = await self.buffer.wait_for_stragglers(OVERDUE_S)
            self.cut.append((asyncio.get_running_loop().time(), [slot.number for slot in slots]))
            for slot in slots:
                await self.buffer.release(slot)

    async def take(self) -> None:
        batch = await self.buffer.take_batch(len(self.taken))
        self.taken.append([group.group_id for group in batch])

    def state(self) -> dict[str, Any]:
        buffer, version = self.buffer, len(self.taken)
        untrained = [[group.group_id for group in buffer.untrained(since)] for since in (version - 1, version)]
        counts = buffer.num_charged, buffer.num_running, buffer.num_finished
        return {"counts": counts, "untrained": untrained, "cut": self.cut, "taken": self.taken}

    async def happen(self, event: str, which: int) -> None:
        """Let the same happen to both."""
        cut = {number for _, numbers in self.cut for number in numbers}
        self.running = [slot for slot in self.running if slot.number not in cut]
        match event:
            case "round":  # most of the younger groups end, and a batch is trained and published if it may be taken
                for part in ("fill", "finish younger", "take"):
                    await self.happen(part, which)
                    await settle()
                await self.publish(-2)
            case "admit" | "fill":
                for _ in range(min(self.slow.room, 1 if event == "admit" else self.slow.room)):
                    self.running.append(self.slow.admit())
                    assert await self.buffer.admit() == self.running[-1]
            case "finish younger":
                stop = max(1, len(self.running) - which % 2)  # the youngest may go on, too
                ended, self.running = self.running[1:stop], [*self.running[:1], *self.running[stop:]]
                await self.finish(ended, which)
            case "finish" if self.running:
                await self.finish([self.running.pop(which % len(self.running))], which)
            case "release" if self.running:
                slot = self.running.pop(which % len(self.running))
                self.slow.release([slot.number])
                await self.buffer.release(slot)
            case "publish":
                await self.publish(which)
            case "take" | "cancel":
                self.slow.is_taking = event == "take"
                self.slow.decide()
                if event == "cancel" and self.taking:
                    self.taking.cancel()
                elif event == "take" and (self.taking is None or self.taking.done()):
                    self.taking = asyncio.create_task(self.take())
            case _:
                pass

    async def finish(self, slots: list[Slot], which: int) -> None:
        for slot in slots:
            oldest = slot.stamp + which % (len(self.taken) - slot.stamp + 1)
            self.slow.finish(slot, oldest)
            await self.buffer.finish(slot, group(slot, oldest))

    async def publish(self, which: int) -> None:
        self.published += (which + 1) % (len(self.taken) - self.published + 1)
        self.slow.publish(self.published)
        await self.buffer.published(self.published)


@given(st.integers(1, 3), st.integers(0, 3), st.lists(events, min_size=40, max_size=120))
@settings(max_examples=100, deadline=None, phases=[Phase.generate])  # to shrink a failure takes minutes
def test_it_decides_as_its_twin(batch_size: int, max_staleness: int, schedule: list[tuple[str, int, float]]) -> None:
    async def main() -> None:
        twins = Twins(batch_size, max_staleness)
        watch = asyncio.create_task(twins.cut_stragglers())
        for event, which, seconds in schedule:
            await twins.happen(event, which)
            await settle()
            twins.slow.pass_time(seconds)
            await asyncio.sleep(seconds)
            await settle()
            assert twins.state() == twins.slow.state()
        for task in (watch, twins.taking):
            if task:
                task.cancel()

    run_in_virtual_time(main())


async def test_calls_out_of_order_and_tokens_older_than_the_admission_are_refused() -> None:
    buffer = ReplayBuffer(batch_size=1, max_staleness=0, version=7)
    slot = await buffer.admit()
    with pytest.raises(ValueError, match="called for version 8; the next batch is for 7"):
        await buffer.take_batch(8)
    with pytest.raises(ValueError, match="version 8 cannot be published after 7, with 7 trained"):
        await buffer.published(8)
    with pytest.raises(ValueError, match="version 6, but was admitted at version 7"):
        await buffer.finish(slot, group(slot, 6, 7))
    await buffer.finish(slot, group(slot))
    with pytest.raises(ValueError, match="slot 0 is not running"):
        await buffer.release(slot)


@pytest.mark.parametrize(("batch_size", "max_staleness"), [(0, 1), (1, -1)])
def test_sizes_out_of_range_are_named(batch_size: int, max_staleness: int) -> None:
    with pytest.raises(ValueError, match=f"batch_size is {batch_size} and max_staleness {max_staleness}"):
        ReplayBuffer(batch_size, max_staleness)

"""ReplayBuffer decides at each step as its slow twin does, whatever happens to groups and in which order."""

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import group
from slow_buffer import SlowBuffer
from virtual_time import run_in_virtual_time

from arl.rollout.buffer import ReplayBuffer, Slot

OVERDUE_S = 5.0
KINDS = [*["round"] * 6, "admit", "fill", "finish", "finish younger", "release", "take", "cancel", "publish"]
events = st.tuples(st.sampled_from(KINDS), st.integers(0, 1000), st.sampled_from([0.0, 0.0, 0.0, 0.5, 2.0]))
"""What happens, to which group or version, and how much time passes then."""


class Watched:
    """One of the twins, with a trainer that takes and a watch that cuts stragglers."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.cut: list[tuple[float, list[int]]] = []
        self.taken: list[list[int]] = []
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
        return {
            "counts": (buffer.num_charged, buffer.num_running, buffer.num_finished),
            "untrained": [[group.group_id for group in buffer.untrained(v)] for v in (version - 1, version)],
            "cut": self.cut,
            "taken": self.taken,
        }


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Twins:
    def __init__(self, batch_size: int, max_staleness: int) -> None:
        self.fast = Watched(ReplayBuffer(batch_size, max_staleness))
        self.slow = Watched(SlowBuffer(batch_size, max_staleness))
        self.running: list[Slot] = []
        self.published = 0

    async def happen(self, event: str, which: int) -> None:
        """Let the same happen to both."""
        cut = {number for _, numbers in self.fast.cut for number in numbers}
        self.running = [slot for slot in self.running if slot.number not in cut]
        match event:
            case "round":
                await self.play_round(which)
            case "admit" | "fill":
                await self.admit(1 if event == "admit" else self.fast.buffer.capacity)
            case "finish younger":
                ended, self.running = self.running[1:], self.running[:1]
                await self.end(ended, which, is_released=False)
            case "finish" | "release" if self.running:
                ended = self.running.pop(which % len(self.running))
                await self.end([ended], which, is_released=event == "release")
            case "publish":
                await self.publish(which)
            case "take" | "cancel":
                self.take(is_cancelled=event == "cancel")
            case _:
                pass

    async def play_round(self, which: int) -> None:
        """All but the oldest group end, and a batch is trained and published if it may be taken."""
        for event in ("fill", "finish younger", "take"):
            await self.happen(event, which)
            await settle()
        await self.publish(-2)

    async def admit(self, most: int) -> None:
        for _ in range(min(most, self.fast.buffer.capacity - self.fast.buffer.num_charged)):
            slots = [await one.buffer.admit() for one in (self.fast, self.slow)]
            assert slots[0] == slots[1]
            self.running.append(slots[0])

    async def publish(self, which: int) -> None:
        self.published += (which + 1) % (len(self.fast.taken) - self.published + 1)
        for one in (self.fast, self.slow):
            await one.buffer.published(self.published)

    def take(self, *, is_cancelled: bool) -> None:
        for one in (self.fast, self.slow):
            if is_cancelled and one.taking:
                one.taking.cancel()
            elif not is_cancelled and (one.taking is None or one.taking.done()):
                one.taking = asyncio.create_task(one.take())

    async def end(self, slots: list[Slot], which: int, *, is_released: bool) -> None:
        for slot in slots:
            oldest = slot.stamp + which % (len(self.fast.taken) - slot.stamp + 1)
            for one in (self.fast, self.slow):
                await (one.buffer.release(slot) if is_released else one.buffer.finish(slot, group(slot, oldest)))


@given(st.integers(1, 3), st.integers(0, 3), st.lists(events, min_size=40, max_size=120))
@settings(max_examples=100, deadline=None)
def test_it_decides_as_its_twin(batch_size: int, max_staleness: int, schedule: list[tuple[str, int, float]]) -> None:
    async def main() -> None:
        twins = Twins(batch_size, max_staleness)
        watches = [asyncio.create_task(one.cut_stragglers()) for one in (twins.fast, twins.slow)]
        for event, which, seconds in schedule:
            await twins.happen(event, which)
            await asyncio.sleep(seconds)
            await settle()
            assert twins.fast.state() == twins.slow.state()
        for task in (*watches, twins.fast.taking, twins.slow.taking):
            if task:
                task.cancel()

    run_in_virtual_time(main())

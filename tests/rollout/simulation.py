"""A random schedule of rollouts, training and rolling weight updates around a ReplayBuffer, in virtual time."""

import asyncio
import random
from dataclasses import dataclass

from hypothesis import strategies as st
from records import grouped, trajectory
from virtual_time import run_in_virtual_time

from arl.api.types import Group
from arl.rollout.buffer import ReplayBuffer, Slot


def group(slot: Slot, *versions: int) -> Group:
    """A group of one episode; its tokens have the slot's stamp unless versions are given."""
    return grouped(trajectory(versions or (slot.stamp,)), number=slot.number, stamp=slot.stamp)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Times are means of exponential distributions; stragglers take 50 times as long."""

    batch_size: int
    max_staleness: int
    num_servers: int = 1
    num_versions: int = 60
    rollout_s: float = 1.0
    train_s: float = 1.0
    update_s: float = 0.1
    straggler_rate: float = 0.0
    rejection_rate: float = 0.0
    seed: int = 0


schedules = st.builds(
    Schedule,
    batch_size=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    num_servers=st.integers(1, 3),
    rollout_s=st.sampled_from([0.1, 1.0, 5.0]),
    train_s=st.sampled_from([0.01, 1.0]),
    update_s=st.sampled_from([0.0, 0.3, 3.0]),
    straggler_rate=st.sampled_from([0.0, 0.05, 0.3]),
    rejection_rate=st.sampled_from([0.0, 0.2, 0.8]),
    seed=st.integers(0, 2**32),
)


class Simulation:
    """`batches[t]` is what was trained at version t; `num_charged` is the buffer's after every event."""

    def __init__(self, schedule: Schedule, buffer: ReplayBuffer) -> None:
        self.schedule = schedule
        self.buffer = buffer
        self.random = random.Random(schedule.seed)
        self.servers = [0] * schedule.num_servers
        self.newest_version = 0
        self.batches: list[list[Group]] = []
        self.num_charged: list[int] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            rollout = tasks.create_task(self._roll_out(tasks))
            updating = asyncio.Lock()
            for version in range(self.schedule.num_versions):
                self.batches.append(await self.buffer.take_batch(version))
                self.num_charged.append(self.buffer.num_charged)
                await self._pass(self.schedule.train_s)
                self.newest_version = version + 1
                tasks.create_task(self._publish(version + 1, updating))
            rollout.cancel()

    async def _pass(self, mean_s: float) -> None:
        await asyncio.sleep(self.random.expovariate(1 / mean_s) if mean_s else 0)

    async def _roll_out(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            slot = await self.buffer.admit()
            self.num_charged.append(self.buffer.num_charged)
            tasks.create_task(self._episode(slot))

    async def _episode(self, slot: Slot) -> None:
        """Two turns, each on a random server, at the version which that server holds by then."""
        slow = 50 if self.random.random() < self.schedule.straggler_rate else 1
        versions: list[int] = []
        for _ in range(2):
            versions.append(self.random.choice(self.servers))
            await self._pass(slow * self.schedule.rollout_s / 2)
        if self.random.random() < self.schedule.rejection_rate:
            await self.buffer.release(slot)
        else:
            await self.buffer.finish(slot, group(slot, *versions))
        self.num_charged.append(self.buffer.num_charged)

    async def _publish(self, version: int, updating: asyncio.Lock) -> None:
        """Update one server after another; a version that was overtaken while it waited is skipped."""
        async with updating:
            if version < self.newest_version:
                return
            for i in range(len(self.servers)):
                await self._pass(self.schedule.update_s)
                self.servers[i] = version
            await self.buffer.published(version)


def simulate(schedule: Schedule, buffer_type: type[ReplayBuffer] = ReplayBuffer) -> Simulation:
    async def main() -> Simulation:
        simulation = Simulation(schedule, buffer_type(schedule.batch_size, schedule.max_staleness))
        await simulation.run()
        return simulation

    return run_in_virtual_time(main())

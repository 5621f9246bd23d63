"""ReplayBuffer, where random schedules do not tell: who is a straggler, and calls out of order."""

import asyncio

import pytest
from simulation import group
from virtual_time import run_in_virtual_time

from arl.rollout.buffer import ReplayBuffer, Slot


async def fill(buffer: ReplayBuffer) -> list[Slot]:
    """Admit until the buffer is full."""
    return [await buffer.admit() for _ in range(buffer.capacity - buffer.num_charged)]


def test_stragglers_are_those_that_kept_the_trainer_waiting_for_so_long() -> None:
    async def main() -> None:
        buffer = ReplayBuffer(batch_size=2, max_staleness=0)
        straggler, other = await fill(buffer)
        async with asyncio.TaskGroup() as tasks:
            overdue = tasks.create_task(buffer.wait_for_stragglers(after_s=10))
            await asyncio.sleep(100)
            assert not overdue.done(), "the trainer did not wait yet"
            take = tasks.create_task(buffer.take_batch(0))
            await asyncio.sleep(3)
            await buffer.finish(other, group(other))
            assert await overdue == [straggler]
            assert asyncio.get_running_loop().time() == 110
            await buffer.finish(straggler, group(straggler))
            await take
            await buffer.published(1)
            await fill(buffer)
            overdue = tasks.create_task(buffer.wait_for_stragglers(after_s=10))
            await asyncio.sleep(100)
            assert not overdue.done(), "the trainer does not wait any more"
            overdue.cancel()

    run_in_virtual_time(main())


def test_a_running_group_with_time_left_is_no_straggler_while_another_is_due() -> None:
    async def main() -> None:
        buffer = ReplayBuffer(batch_size=1, max_staleness=2)
        due = await buffer.admit()
        for version in range(2):
            slot = await buffer.admit()
            await buffer.finish(slot, group(slot))
            await buffer.take_batch(version)
            await buffer.published(version + 1)
        finished, with_time_left = await fill(buffer)
        await buffer.finish(finished, group(finished))
        async with asyncio.TaskGroup() as tasks:
            take = tasks.create_task(buffer.take_batch(2))
            assert await buffer.wait_for_stragglers(after_s=5) == [due]
            take.cancel()
        assert with_time_left.stamp == 2

    run_in_virtual_time(main())


async def test_calls_out_of_order_and_tokens_older_than_the_admission_are_refused() -> None:
    buffer = ReplayBuffer(batch_size=1, max_staleness=0, version=7)
    (slot,) = await fill(buffer)
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

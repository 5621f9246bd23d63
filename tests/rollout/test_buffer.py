"""ReplayBuffer: who waits for what, and what a batch holds."""

import asyncio

import pytest
from simulation import group
from virtual_time import DeadlockError, run_in_virtual_time

from arl.rollout.buffer import ReplayBuffer, Slot


async def fill(buffer: ReplayBuffer) -> list[Slot]:
    """Admit until the buffer is full."""
    return [await buffer.admit() for _ in range(buffer.capacity - buffer.num_charged)]


async def is_waiting(task: asyncio.Task[object]) -> bool:
    """Whether the task still waits after everything that could happen now has happened."""
    for _ in range(10):
        await asyncio.sleep(0)
    return not task.done()


async def test_admission_waits_while_the_buffer_is_full_and_a_release_lets_it_go_on() -> None:
    buffer = ReplayBuffer(batch_size=2, max_staleness=1)
    slots = await fill(buffer)
    assert len(slots) == 4
    async with asyncio.TaskGroup() as tasks:
        admission = tasks.create_task(buffer.admit())
        assert await is_waiting(admission)
        await buffer.release(slots[1])
    assert admission.result() == Slot(number=4, stamp=0)


async def test_a_taken_batch_keeps_its_places_until_its_weights_are_published() -> None:
    buffer = ReplayBuffer(batch_size=2, max_staleness=0)
    for slot in await fill(buffer):
        await buffer.finish(slot, group(slot))
    async with asyncio.TaskGroup() as tasks:
        admission = tasks.create_task(buffer.admit())
        await buffer.take_batch(0)
        assert await is_waiting(admission)
        await buffer.published(1)
    assert admission.result().stamp == 1


async def test_the_earliest_deadline_is_taken_first() -> None:
    buffer = ReplayBuffer(batch_size=1, max_staleness=2, version=5)
    first, second, _ = await fill(buffer)
    await buffer.finish(first, group(first, 6, 7))
    await buffer.finish(second, group(second, 5, 7))
    assert [g.group_id for g in await buffer.take_batch(5)] == [1]


async def test_a_batch_is_in_order_of_admission_whatever_its_deadlines() -> None:
    buffer = ReplayBuffer(batch_size=2, max_staleness=2, version=5)
    first, second, *_ = await fill(buffer)
    await buffer.finish(first, group(first, 6, 7))
    await buffer.finish(second, group(second, 5, 7))
    assert [g.group_id for g in await buffer.take_batch(5)] == [0, 1]


async def test_published_versions_may_skip() -> None:
    buffer = ReplayBuffer(batch_size=1, max_staleness=1)
    for slot in await fill(buffer):
        await buffer.finish(slot, group(slot))
    await buffer.take_batch(0)
    await buffer.take_batch(1)
    await buffer.published(2)
    assert buffer.num_charged == 0


async def test_a_cancelled_take_leaves_the_buffer_as_it_was() -> None:
    buffer = ReplayBuffer(batch_size=1, max_staleness=0)
    take = asyncio.ensure_future(buffer.take_batch(0))
    assert await is_waiting(take)
    take.cancel()
    (slot,) = await fill(buffer)
    await buffer.finish(slot, group(slot))
    assert buffer.num_finished == 1
    assert len(await buffer.take_batch(0)) == 1


def test_stragglers_are_those_that_kept_the_trainer_waiting_for_so_long() -> None:
    async def main() -> None:
        buffer = ReplayBuffer(batch_size=2, max_staleness=0)
        straggler, other = await fill(buffer)
        await asyncio.sleep(100)
        async with asyncio.TaskGroup() as tasks:
            take = tasks.create_task(buffer.take_batch(0))
            await asyncio.sleep(3)
            await buffer.finish(other, group(other))
            assert await buffer.wait_for_stragglers(after_s=10) == [straggler]
            take.cancel()
        assert asyncio.get_running_loop().time() == 110

    run_in_virtual_time(main())


def test_nothing_is_a_straggler_while_the_trainer_does_not_wait() -> None:
    async def main() -> None:
        buffer = ReplayBuffer(batch_size=1, max_staleness=0)
        await fill(buffer)
        await buffer.wait_for_stragglers(after_s=1)

    with pytest.raises(DeadlockError):
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


async def test_a_group_ends_once() -> None:
    buffer = ReplayBuffer(batch_size=1, max_staleness=0)
    (slot,) = await fill(buffer)
    await buffer.finish(slot, group(slot))
    with pytest.raises(ValueError, match="slot 0 is not running"):
        await buffer.release(slot)


async def test_tokens_older_than_the_admission_are_refused() -> None:
    buffer = ReplayBuffer(batch_size=1, max_staleness=3, version=7)
    slot = await buffer.admit()
    with pytest.raises(ValueError, match="version 6, but was admitted at version 7"):
        await buffer.finish(slot, group(slot, 6, 7))


async def test_versions_come_in_sequence_and_only_trained_ones_are_published() -> None:
    buffer = ReplayBuffer(batch_size=1, max_staleness=0)
    with pytest.raises(ValueError, match="called for version 1; the next batch is for 0"):
        await buffer.take_batch(1)
    with pytest.raises(ValueError, match="version 1 cannot be published after 0, with 0 trained"):
        await buffer.published(1)


@pytest.mark.parametrize(("batch_size", "max_staleness"), [(0, 1), (1, -1)])
def test_sizes_out_of_range_are_named(batch_size: int, max_staleness: int) -> None:
    with pytest.raises(ValueError, match=f"batch_size is {batch_size} and max_staleness {max_staleness}"):
        ReplayBuffer(batch_size, max_staleness)

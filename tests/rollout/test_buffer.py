"""ReplayBuffer refuses calls out of order, and knows since when a group keeps the trainer waiting.

random_life.py compares its other decisions with a plain model.
"""

import asyncio

import pytest
from records import grouped, trajectory
from virtual_time import run_in_virtual_time

from arl.api.types import Group
from arl.rollout.buffer import ReplayBuffer, Slot


def group(slot: Slot, *versions: int) -> Group:
    """A group of one episode; its tokens have the slot's stamp unless versions are given."""
    return grouped(trajectory(versions or (slot.stamp,)), number=slot.number, stamp=slot.stamp)


def test_a_group_keeps_the_trainer_waiting_only_while_it_waits_and_not_before_its_own_admission() -> None:
    async def main() -> None:
        buffer, clock = ReplayBuffer(batch_size=1, max_staleness=1), asyncio.get_running_loop()
        first, second = await buffer.admit(), await buffer.admit()
        overdue = asyncio.create_task(buffer.wait_for_stragglers(5.0))
        await asyncio.sleep(10)
        assert not overdue.done(), "nobody waits for a batch"
        taking = asyncio.create_task(buffer.take_batch(0))
        await asyncio.sleep(3)
        await buffer.finish(second, group(second))
        await taking
        await asyncio.sleep(10)
        assert not overdue.done(), "the trainer has waited 3 s for it, and does not any more"
        await buffer.published(1)
        taking = asyncio.create_task(buffer.take_batch(1))
        await asyncio.sleep(2)
        late = await buffer.admit()
        assert (await overdue, clock.time()) == ([first], 28)
        await buffer.release(first)
        assert (await buffer.wait_for_stragglers(5.0), clock.time()) == ([late], 30)
        taking.cancel()

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

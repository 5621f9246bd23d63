"""ReplayBuffer refuses calls out of order, and knows since when a group keeps the trainer waiting; Replay trains again.

random_life.py compares its other decisions with a plain model.
"""

import asyncio

import pytest
from records import grouped, trajectory
from virtual_time import run_in_virtual_time

from arl.api.errors import StalenessError
from arl.api.types import Group
from arl.rollout.buffer import Replay, ReplayBuffer, Slot


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


def rewarded(number: int, version: int, *rewards: float) -> Group:
    """A group of one token for each of the rewards."""
    return grouped(*(trajectory((version,), reward) for reward in rewards or (1.0,)), number=number, stamp=version)


def ids(groups: list[Group]) -> list[int]:
    return [g.group_id for g in groups]


@pytest.mark.parametrize(("num_groups", "taken"), [(0, []), (3, [3, 1, 2]), (9, [3, 1, 2, 4])])
def test_of_groups_with_a_reward_above_the_limit_the_least_stale_are_taken(num_groups: int, taken: list[int]) -> None:
    replay = Replay(num_groups, min_reward=0.5, max_staleness=5)
    good = [rewarded(number, version, 0.0, 0.6) for number, version in ((1, 4), (2, 3), (3, 4), (4, 1))]
    replay.add([rewarded(0, 4, 0.0, 0.5), *good], version=5)
    assert ids(replay.take(5)) == taken
    assert len(replay.groups) == (4 if num_groups else 0)


def test_a_group_is_replayed_up_to_the_last_version_that_may_hold_it_and_then_forgotten() -> None:
    replay = Replay(9, max_staleness=2)
    replay.add([rewarded(0, 1)], version=2)
    assert ids(replay.take(3)) == [0]
    assert replay.take(4) == []
    replay.add([], version=3)
    assert ids(list(replay.groups)) == [0]
    replay.add([], version=4)
    assert replay.groups == ()


class Forgetful(Replay):
    """Looks at no version, neither of what it keeps nor of what it takes."""

    def _is_fresh(self, group: Group, version: int) -> bool:
        return True


def test_a_replay_that_ignored_versions_would_be_noticed_at_use() -> None:
    replay = Forgetful(1, max_staleness=1)
    replay.add([rewarded(0, 3)], version=4)
    with pytest.raises(StalenessError, match="version 3 in the batch for version 5; max_staleness is 1"):
        replay.take(5)

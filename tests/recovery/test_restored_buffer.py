"""A buffer filled from a checkpoint keeps the promises of one that filled itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arl.api.types import Group, Trajectory
from arl.rollout.buffer import ReplayBuffer


def group(group_id: int, version: int) -> Group:
    """With one token that was sampled at `version`."""
    trajectory = Trajectory(
        token_ids=(1, 2), loss_mask=(0, 1), behavior_logprobs=(0.0, -1.0), versions=(-1, version), reward=0.0
    )
    return Group(
        group_id=group_id, example_id=(0, group_id), stamp=version, trajectories=(trajectory,), episode_indices=(0,)
    )


def restored(versions: list[int], at: int, *, batch_size: int, max_staleness: int) -> tuple[ReplayBuffer, list[int]]:
    """A buffer at version `at` with a group for each of `versions`, and the ids of those that found no place."""
    buffer = ReplayBuffer(batch_size, max_staleness, version=at)
    unusable = buffer.restore([group(i, version) for i, version in enumerate(versions)])
    return buffer, sorted(g.group_id for g in unusable)


async def test_restored_groups_are_taken_in_the_order_of_their_ids():
    buffer, _ = restored([4, 3, 4, 3], at=4, batch_size=4, max_staleness=1)
    assert [g.group_id for g in await buffer.take_batch(4)] == [0, 1, 2, 3]


async def test_a_group_that_runs_again_stands_in_its_batch_where_it_stood():
    buffer = ReplayBuffer(2, 0, version=4)
    buffer.restore([group(1, 4)])
    await buffer.finish(await buffer.admit(), group(0, 4))
    assert [g.group_id for g in await buffer.take_batch(4)] == [0, 1]


async def test_the_oldest_are_taken_first():
    buffer, _ = restored([4, 3, 4, 3], at=4, batch_size=2, max_staleness=1)
    assert [g.group_id for g in await buffer.take_batch(4)] == [1, 3]


async def test_restored_groups_are_charged():
    buffer, _ = restored([5, 5, 5], at=5, batch_size=2, max_staleness=1)
    await buffer.admit()
    assert buffer.num_charged == buffer.capacity


@given(
    versions=st.lists(st.integers(0, 6), max_size=20),
    batch_size=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
)
def test_what_is_kept_fits_into_the_batches_that_are_left_and_nothing_else_would(
    versions: list[int], batch_size: int, max_staleness: int
):
    at = 6
    _, unusable = restored(versions, at, batch_size=batch_size, max_staleness=max_staleness)
    kept = [version + max_staleness for i, version in enumerate(versions) if i not in unusable]
    assert fits(kept, at, batch_size)
    assert not any(fits([*kept, versions[i] + max_staleness], at, batch_size) for i in unusable)


def fits(deadlines: list[int], at: int, batch_size: int) -> bool:
    return all(sum(x <= d for x in deadlines) <= max(0, d - at + 1) * batch_size for d in deadlines)


@pytest.mark.parametrize("versions", [[1], []])
async def test_new_groups_go_on_beside_restored_ones(versions: list[int]):
    buffer, _ = restored(versions, at=1, batch_size=2, max_staleness=0)
    for number in range(len(versions), 2):
        await buffer.finish(await buffer.admit(), group(number + 10, 1))
    assert len(await buffer.take_batch(1)) == 2

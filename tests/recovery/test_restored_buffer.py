"""A buffer filled from a checkpoint keeps the promises of one that filled itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import grouped, trajectory

from arl.api.types import Group
from arl.rollout.buffer import ReplayBuffer


def group(number: int, version: int) -> Group:
    """With one token that was sampled at `version`."""
    return grouped(trajectory((version,)), number=number, stamp=version)


@pytest.mark.parametrize(("batch_size", "taken"), [(4, [0, 1, 2, 3]), (2, [1, 3])])
async def test_the_oldest_restored_groups_are_taken_in_the_order_of_their_ids(batch_size: int, taken: list[int]):
    buffer = ReplayBuffer(batch_size, 1, version=4)
    buffer.restore([group(number, version) for number, version in enumerate([4, 3, 4, 3])])
    assert [g.group_id for g in await buffer.take_batch(4)] == taken


async def test_a_group_that_runs_again_stands_in_its_batch_where_it_stood():
    buffer = ReplayBuffer(2, 0, version=4)
    buffer.restore([group(1, 4)])
    await buffer.finish(await buffer.admit(), group(0, 4))
    assert [g.group_id for g in await buffer.take_batch(4)] == [0, 1]


@given(
    versions=st.lists(st.integers(0, 6), max_size=20),
    batch_size=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
)
def test_what_is_kept_is_charged_and_fits_into_the_batches_that_are_left_and_nothing_else_would(
    versions: list[int], batch_size: int, max_staleness: int
):
    at = 6
    buffer = ReplayBuffer(batch_size, max_staleness, version=at)
    unusable = {g.group_id for g in buffer.restore([group(i, version) for i, version in enumerate(versions)])}
    kept = [version + max_staleness for i, version in enumerate(versions) if i not in unusable]
    assert buffer.num_charged == len(kept)
    assert fits(kept, at, batch_size)
    assert not any(fits([*kept, versions[i] + max_staleness], at, batch_size) for i in unusable)


def fits(deadlines: list[int], at: int, batch_size: int) -> bool:
    return all(sum(x <= d for x in deadlines) <= max(0, d - at + 1) * batch_size for d in deadlines)

"""Calls of ReplayBuffer that are refused. Its decisions are tested beside a slow twin."""

import pytest
from simulation import group

from arl.rollout.buffer import ReplayBuffer


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

"""Checks of the garbage collector beside the event loop, each in a process that has frozen nothing: `test_collector.py`
starts them by name."""

import asyncio
import gc
import sys
import weakref

from arl.rollout import monitors
from arl.rollout.monitors import collect_garbage


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def abandoned_cycle() -> asyncio.Event:
    """Set when it is collected."""
    gone = asyncio.Event()
    weakref.finalize(Cycle(), gone.set)
    return gone


async def young_and_old_garbage_is_collected_until_cancelled() -> None:
    monitors._YOUNG_EVERY_S, monitors._ALL_EVERY_S = 0.001, 0.05
    before = gc.get_threshold()
    task = asyncio.create_task(collect_garbage())
    await asyncio.sleep(0)
    assert gc.get_freeze_count() > 0
    old = abandoned_cycle()
    gc.collect(1)  # from here on it is old
    await asyncio.wait_for(old.wait(), 10)
    monitors._ALL_EVERY_S = 1e9
    await asyncio.wait_for(abandoned_cycle().wait(), 10)
    task.cancel()
    await asyncio.wait([task])
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


async def a_collector_that_the_process_has_set_itself_is_left_alone() -> None:
    gc.set_threshold(50_000, 10, 10)
    async with asyncio.timeout(10):
        await collect_garbage()
    assert gc.get_threshold() == (50_000, 10, 10)


CHECKS = {
    check.__name__: check
    for check in (
        young_and_old_garbage_is_collected_until_cancelled,
        a_collector_that_the_process_has_set_itself_is_left_alone,
    )
}

if __name__ == "__main__":
    asyncio.run(CHECKS[sys.argv[1]]())

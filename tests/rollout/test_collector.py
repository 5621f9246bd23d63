"""Garbage collections beside the event loop."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from arl.rollout import collector
from arl.rollout.collector import collect_garbage


@pytest.fixture(autouse=True, scope="module")
def nothing_frozen() -> Iterator[None]:
    """As in a process that has frozen nothing itself."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def abandoned_cycle() -> asyncio.Event:
    """Set when it is collected."""
    gone = asyncio.Event()
    weakref.finalize(Cycle(), gone.set)
    return gone


async def test_young_and_old_garbage_is_collected_until_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_YOUNG_EVERY_S", 0.001)
    monkeypatch.setattr(collector, "_ALL_EVERY_S", 0.05)
    before = gc.get_threshold()
    task = asyncio.create_task(collect_garbage())
    try:
        await asyncio.sleep(0)
        old = abandoned_cycle()
        gc.collect(1)  # from here on it is old
        await asyncio.wait_for(old.wait(), 10)
        monkeypatch.setattr(collector, "_ALL_EVERY_S", 1e9)
        await asyncio.wait_for(abandoned_cycle().wait(), 10)
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


async def test_garbage_from_before_does_not_stay_until_the_end() -> None:
    gc.disable()
    try:
        gone = abandoned_cycle()
    finally:
        gc.enable()
    task = asyncio.create_task(collect_garbage())
    await asyncio.sleep(0)
    assert gone.is_set()
    task.cancel()
    await asyncio.wait([task])


async def test_what_the_process_has_frozen_itself_stays_frozen() -> None:
    gc.collect()
    gc.freeze()
    frozen = gc.get_freeze_count()
    task = asyncio.create_task(collect_garbage())
    await asyncio.sleep(0)
    assert gc.get_freeze_count() <= frozen
    task.cancel()
    await asyncio.wait([task])
    assert 0 < gc.get_freeze_count() <= frozen
    gc.unfreeze()


async def test_a_collector_that_the_process_has_set_itself_is_left_alone() -> None:
    before = gc.get_threshold()
    gc.set_threshold(50_000, 10, 10)
    try:
        async with asyncio.timeout(10):
            await collect_garbage()
        assert gc.get_threshold() == (50_000, 10, 10)
    finally:
        gc.set_threshold(*before)

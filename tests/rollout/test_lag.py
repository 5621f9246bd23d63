"""Code that blocks the event loop again and again is noticed, and blamed on the workflow."""

import asyncio
import time

import pytest

from arl.rollout.watches import LagMonitor


def told(caplog: pytest.LogCaptureFixture, *blocks: tuple[float, float]) -> list[str]:
    """Warnings of a monitor that begins at 0 and sees (when it ended, seconds) blocks."""
    monitor = LagMonitor("MyAgent")
    monitor.note(0.0, 0.0)
    for now, lag_s in blocks:
        monitor.note(lag_s, now)
    return [record.getMessage() for record in caplog.records]


def test_blocks_that_come_again_and_again_are_a_warning_with_the_likely_culprit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (warning,) = told(caplog, (70, 1.5), (80, 0.5), (90, 2.0))
    assert warning.startswith("the event loop was blocked for 3.5 of the last 60 s, probably by MyAgent")


def test_a_start_that_blocks_the_loop_is_none(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, (5, 4.0), (20, 10.0), (59, 2.0), (61, 2.0)) == []


def test_nor_are_single_blocks_far_apart(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, *((100 * i, 2.5) for i in range(1, 20))) == []


def test_a_loop_that_stays_blocked_is_told_of_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    assert len(told(caplog, *((float(now), 2.0) for now in range(2, 302, 2)))) == 4


async def test_the_lag_is_how_late_the_loop_wakes_up() -> None:
    monitor = LagMonitor("MyAgent")
    watch = asyncio.ensure_future(monitor.run())
    await asyncio.sleep(0)
    time.sleep(0.5)  # noqa: ASYNC251 - this is what it must notice
    for _ in range(3):
        await asyncio.sleep(0)
    watch.cancel()
    assert monitor.worst_s > 0.2

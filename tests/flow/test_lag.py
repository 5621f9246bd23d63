"""Code that blocks the event loop is noticed, and blamed on the workflow."""

import asyncio
import time

import pytest

from arl.lag import LagMonitor


async def test_a_blocked_event_loop_is_reported_with_the_likely_culprit(caplog: pytest.LogCaptureFixture) -> None:
    monitor = LagMonitor("MyAgent", period_s=0.01, warn_after_s=0.1)
    watch = asyncio.ensure_future(monitor.run())
    await asyncio.sleep(0)
    time.sleep(0.3)  # noqa: ASYNC251 - this is what it must notice
    await asyncio.sleep(0.02)
    watch.cancel()
    assert monitor.worst_s > 0.2
    assert "probably by MyAgent" in caplog.text

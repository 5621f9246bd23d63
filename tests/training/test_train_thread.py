"""The thread that trains: what happens to a call whose caller is cancelled."""

import asyncio
import gc
import threading
from typing import Any

import pytest

from arl.runtime.threads import TrainThread


async def test_the_error_of_a_call_whose_caller_was_cancelled_is_not_reported_as_forgotten() -> None:
    """The run ends with its own error; asyncio would add one that nobody retrieved."""
    thread, may_fail, told = TrainThread(), threading.Event(), list[dict[str, Any]]()
    loop, is_running = asyncio.get_running_loop(), asyncio.Event()
    loop.set_exception_handler(lambda _, context: told.append(context))

    def fails() -> None:
        loop.call_soon_threadsafe(is_running.set)
        may_fail.wait(10)
        raise RuntimeError("a rank died")

    async def call() -> None:
        await thread(fails)

    caller = asyncio.create_task(call())
    await is_running.wait()
    caller.cancel()
    await asyncio.sleep(0)  # the cancellation arrives, and the caller waits for the end of its call
    may_fail.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    del caller
    gc.collect()
    await asyncio.sleep(0)
    assert told == []
    thread.close()

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
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    def fails() -> None:
        may_fail.wait(10)
        raise RuntimeError("a rank died")

    async def call() -> None:
        await thread(fails)

    caller = asyncio.create_task(call())
    await asyncio.sleep(0.01)
    caller.cancel()
    asyncio.get_running_loop().call_later(0.01, may_fail.set)
    with pytest.raises(asyncio.CancelledError):
        await caller
    del caller
    gc.collect()
    await asyncio.sleep(0)
    assert told == []
    thread.close()

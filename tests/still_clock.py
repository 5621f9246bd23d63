"""A clock of the event loop that stands still while threads, processes and sockets go on: no time limit is missed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

_TURNS = 10


@contextmanager
def still_clock() -> Iterator[Callable[[float], Awaitable[None]]]:
    """Within the block the running loop's time is its time at the start. Gives a function that lets seconds pass, and
    then what is due take its turns."""
    loop = asyncio.get_running_loop()
    now = loop.time()

    async def passes(seconds: float) -> None:
        nonlocal now
        now += seconds
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    with patch.object(loop, "time", lambda: now):
        yield passes

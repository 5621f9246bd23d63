"""TrainThread: the one thread on which the train engine lives, seen from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

ResultT = TypeVar("ResultT")
ArgsT = TypeVarTuple("ArgsT")


class TrainThread:
    """Runs blocking calls one after another. A cancelled caller still waits until its call is done."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="arl-train")

    def submit(self, function: Callable[[*ArgsT], ResultT], *args: *ArgsT) -> asyncio.Future[ResultT]:
        """Begin a call without waiting for it."""
        return asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    async def __call__(self, function: Callable[[*ArgsT], ResultT], *args: *ArgsT) -> ResultT:
        return await self.finish(self.submit(function, *args))

    async def finish(self, call: asyncio.Future[ResultT]) -> ResultT:
        """Wait for a call that was begun, also when cancelled, so that its effects are known."""
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait([call])
            raise

    def close(self) -> None:
        self._executor.shutdown()

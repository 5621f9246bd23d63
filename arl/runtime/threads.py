"""Runs arl's own blocking work, such as file access and training, in threads; makes files survive a power cut."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TypeVar, TypeVarTuple

ResultT = TypeVar("ResultT")
ArgsT = TypeVarTuple("ArgsT")


def offload(function: Callable[[*ArgsT], ResultT], *args: *ArgsT) -> asyncio.Future[ResultT]:
    """Begin `function(*args)` in a thread of its own, with this task's context variables; await its result.

    arl leaves asyncio's default executor to users' code, because calls that hang there would hold up arl's own. A
    cancelled caller does not wait for the thread. The thread does not keep the process from ending.
    """
    call: Future[ResultT] = Future()
    context = contextvars.copy_context()
    name = getattr(function, "__name__", "call")

    def work() -> None:
        if not call.set_running_or_notify_cancel():
            return
        try:
            call.set_result(context.run(function, *args))
        except StopIteration as error:  # an asyncio future refuses it, and its awaiter would wait for ever
            call.set_exception(RuntimeError(f"{name} raised {error!r}"))
        except BaseException as error:  # noqa: BLE001 - raised where the call is awaited
            call.set_exception(error)

    Thread(target=work, name=f"arl-{name}", daemon=True).start()
    return asyncio.wrap_future(call)


async def finished(call: asyncio.Future[ResultT]) -> ResultT:
    """Wait for a call in a thread. A caller that is cancelled, even twice, waits too, to know the call's effects."""
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        while not call.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([call])
        if not call.cancelled():
            call.exception()  # else asyncio would report an error that nobody retrieved
        raise


class TrainThread:
    """Runs blocking calls one after another on one thread. A cancelled caller still waits for its call to end."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="arl-train")

    def submit(self, function: Callable[[*ArgsT], ResultT], *args: *ArgsT) -> asyncio.Future[ResultT]:
        return asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    async def __call__(self, function: Callable[[*ArgsT], ResultT], *args: *ArgsT) -> ResultT:
        return await self.finish(self.submit(function, *args))

    async def finish(self, call: asyncio.Future[ResultT]) -> ResultT:
        """Wait for a call from `submit`."""
        return await finished(call)

    def close(self) -> None:
        self._executor.shutdown()


def force_to_disk(path: Path) -> None:
    """Wait until the file, or the directory's list of names, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

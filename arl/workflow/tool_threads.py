"""Threads for synchronous tools: the event loop goes on while they run, and while one hangs.

    acall --queue--> a thread  --result--> acall's event loop
                       |
                       hangs: acall stops waiting; the thread is given up, counted, and its place is free for others
                       is cancelled: the same, but it has the call's time limit to end by itself

A thread cannot be killed. One that hangs keeps what it holds (memory, a lock, a CPU it spins on) until it returns by
itself, so past `max_hung` of them no call is begun. Threads are daemons, or one that hangs would keep the process from
ending. For code that nobody trusts there is the sandbox.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from arl.api.errors import ToolError, ToolsHungError, first_error

log = logging.getLogger(__name__)

_IDLE_S = 10.0
"""How long a thread waits for another call before it ends."""
_PATIENCE_S = 30.0
"""How long a call without a time limit may run on when its episode was cancelled, before it counts as hung."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    function: Callable[[], Any]
    context: contextvars.Context
    loop: asyncio.AbstractEventLoop
    began: asyncio.Future[None]
    ended: asyncio.Future[tuple[Any, BaseException | None]]
    state: Literal["queued", "running", "given up", "done"] = field(default="queued")


class ToolThreads:
    """max_threads: calls that run at once; others wait for them. max_hung: how many may be given up and still run."""

    def __init__(self, *, max_threads: int = 512, max_hung: int = 64) -> None:
        self._max_threads = max_threads
        self._max_hung = max_hung
        self._changed = threading.Condition()
        self._queue: deque[_Call] = deque()
        self._num_threads = 0
        self._num_idle = 0
        self._num_hung = 0

    @property
    def num_hung(self) -> int:
        """Calls that were given up and have not returned."""
        return self._num_hung

    async def acall(self, function: Callable[[], Any], timeout_s: float | None = None) -> Any:
        """What `function` returns or raises, from a thread that has this task's context variables.

        timeout_s: counted from when it begins to run, however long it was queued. Raises ToolError when it takes
        longer; ToolsHungError when too many calls hang, or no thread can be had.
        """
        loop = asyncio.get_running_loop()
        call = _Call(
            function=function,
            context=contextvars.copy_context(),
            loop=loop,
            began=loop.create_future(),
            ended=loop.create_future(),
        )
        self._submit(call)
        try:
            await call.began
            async with asyncio.timeout(timeout_s):
                result, error = await call.ended
        except TimeoutError:
            self._give_up(call)
            raise ToolError(f"there was no answer within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self._abandon(call, _PATIENCE_S if timeout_s is None else timeout_s)
            raise
        if error is not None:
            raise error
        return result

    def _submit(self, call: _Call) -> None:
        with self._changed:
            if self._num_hung >= self._max_hung:
                raise ToolsHungError(
                    f"{self._num_hung} earlier calls of tools hang, so no other is begun: the tools need a limit of "
                    "their own, or to be async, or to run in a sandbox"
                )
            self._queue.append(call)
            if self._num_idle >= len(self._queue):
                self._changed.notify()
            elif self._num_threads - self._num_hung < self._max_threads:
                try:
                    self._start_thread()
                except ToolsHungError:
                    self._queue.remove(call)
                    raise

    def _abandon(self, call: _Call, patience_s: float) -> None:
        """Its episode was cancelled. It is not begun; or it has some time to end by itself before it counts as hung."""
        with self._changed:
            if call.state == "queued":
                self._queue.remove(call)
            elif call.state == "running":
                call.loop.call_later(patience_s, self._give_up, call)

    def _give_up(self, call: _Call) -> None:
        """It hangs, unless it has ended."""
        with self._changed:
            if call.state != "running":
                return
            call.state = "given up"
            self._num_hung += 1
            if self._queue and not self._num_idle:
                try:
                    self._start_thread()
                except ToolsHungError as error:
                    first = self._queue.popleft()
                    _tell(first, first.began, None)
                    _tell(first, first.ended, (None, error))
        log.warning(
            "a call of a tool hangs, and its thread is left behind; %d do now, and from %d on no other is begun",
            self._num_hung,
            self._max_hung,
        )

    def _start_thread(self) -> None:
        """For a call in the queue. Where the system has no more threads, it waits for one that there is."""
        try:
            threading.Thread(target=self._work, name="arl-tool", daemon=True).start()
        except RuntimeError as error:
            if self._num_threads > self._num_hung:
                return
            raise ToolsHungError(f"no thread could be started for a tool ({error})") from error
        self._num_threads += 1

    def _work(self) -> None:
        while (call := self._next()) is not None:
            _tell(call, call.began, None)
            result: Any = None
            error: BaseException | None = None
            try:
                result = call.context.run(call.function)
            except KeyboardInterrupt as raised:  # the function's own: Ctrl-C reaches the main thread alone
                error = RuntimeError(f"it raised {raised!r}")
            except BaseException as raised:  # noqa: BLE001 - it is raised where the call is awaited
                error = raised
            with self._changed:
                if call.state == "given up":
                    self._num_hung -= 1
                call.state = "done"
            _tell(call, call.ended, (result, error))

    def _next(self) -> _Call | None:
        """The call that has waited longest, or None when there was none for a while."""
        with self._changed:
            self._num_idle += 1
            is_there = self._changed.wait_for(lambda: self._queue, timeout=_IDLE_S)
            self._num_idle -= 1
            if not is_there:
                self._num_threads -= 1
                return None
            call = self._queue.popleft()
            call.state = "running"
            return call


def _tell(call: _Call, future: asyncio.Future[Any], value: Any) -> None:
    def tell() -> None:
        if not future.done():
            future.set_result(value)

    try:
        call.loop.call_soon_threadsafe(tell)
    except RuntimeError:  # the loop is closed, and nobody waits
        return


THREADS = ToolThreads()
"""Those of this process: threads are one budget, whatever workflow calls a tool."""


# Several awaits of one episode at the same time.


T = TypeVar("T")


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return, in their order. The first error cancels the others, and is raised itself, out of its group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    return [task.result() for task in tasks]

"""Runs blocking code in threads, beside the event loop; and awaits several coroutines at the same time.

    acall --queue--> a thread  --result--> acall's event loop
                       |
                       hangs: acall stops waiting, the thread counts as hung, and its place is free for others
                       is cancelled: it counts as hung only after its time limit

A thread cannot be stopped. A hung one keeps its resources (memory, a lock, a CPU it spins on) until it returns, so no
new call begins while `max_hung` threads hang. Threads are daemons: a hung one does not keep the process from ending.
Run untrusted code in a sandbox.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from arl.api.errors import ArlError, RewardError, ToolsHungError, first_error
from arl.rewards.score import ResultT, check_limits, checked, name_of, ran_too_long, reported

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_IDLE_S = 10.0
"""How long a thread waits for another call before it ends."""
_PATIENCE_S = 30.0
"""How long a cancelled call without a time limit may run on before it counts as hung."""


class CallTimeoutError(ArlError, TimeoutError):
    """A call in a thread took longer than its time limit."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    function: Callable[[], Any]
    context: contextvars.Context
    loop: asyncio.AbstractEventLoop
    began: asyncio.Future[None]
    ended: asyncio.Future[tuple[Any, BaseException | None]]
    state: Literal["queued", "running", "hung", "done"] = "queued"
    """hung: it ran past its time, nobody awaits it, and its place is free for others."""

    def run(self) -> tuple[Any, BaseException | None]:
        try:
            return self.context.run(self.function), None
        except KeyboardInterrupt as error:  # the function's own: Ctrl-C reaches the main thread alone
            return None, RuntimeError(f"it raised {error!r}")
        except BaseException as error:  # noqa: BLE001 - raised where the call is awaited
            return None, error


class CallThreads:
    """Threads for blocking calls. The event loop goes on while calls run, and while one hangs."""

    def __init__(self, *, max_threads: int = 512, max_hung: int = 64) -> None:
        """max_threads: calls that run at once; others wait. max_hung: calls past their time that may still run."""
        self._max_threads = max_threads
        self._max_hung = max_hung
        self._changed = threading.Condition()
        self._queue: deque[_Call] = deque()
        self._num_threads = 0
        self._num_idle = 0
        self._num_hung = 0

    @property
    def num_hung(self) -> int:
        """The number of calls that took too long and have not returned."""
        return self._num_hung

    async def acall(self, function: Callable[[], Any], timeout_s: float | None = None) -> Any:
        """Call `function` in a thread with this task's context variables, and return its result or raise its error.

        timeout_s: counted from when the call begins to run; time in the queue does not count. Raises CallTimeoutError
        if the call takes longer; ToolsHungError if too many calls hang, or no thread can be started.
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
            raise CallTimeoutError(f"there was no answer within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            with self._changed:  # nobody awaits it any more: a queued call never begins, a running one hangs in the end
                if call.state == "queued":
                    self._queue.remove(call)
                elif call.state == "running":
                    loop.call_later(_PATIENCE_S if timeout_s is None else timeout_s, self._give_up, call)
            raise
        if error is not None:
            raise error
        return result

    def _submit(self, call: _Call) -> None:
        with self._changed:
            if self._num_hung >= self._max_hung:
                raise ToolsHungError(
                    f"{self._num_hung} earlier calls hang in threads that cannot be stopped, so no other begins; "
                    "give the code its own time limit, make it async, or run it in a sandbox"
                )
            self._queue.append(call)
            if self._num_idle >= len(self._queue):
                self._changed.notify()
            elif self._num_threads - self._num_hung < self._max_threads:
                self._start_thread()

    def _give_up(self, call: _Call) -> None:
        with self._changed:
            if call.state != "running":
                return
            call.state = "hung"
            self._num_hung += 1
            if self._queue and not self._num_idle:
                self._start_thread()
        log.warning(
            "a call hangs, and its thread cannot be stopped; %d calls hang now, and at %d no other call begins",
            self._num_hung,
            self._max_hung,
        )

    def _start_thread(self) -> None:
        """If the system has no more threads, queued calls wait for one of these; if all of these hang, they fail."""
        try:
            threading.Thread(target=self._work, name="arl-call", daemon=True).start()
            self._num_threads += 1
        except RuntimeError as error:
            while self._queue and self._num_threads <= self._num_hung:
                call = self._queue.popleft()
                call.state = "done"
                _tell(call, call.began, None)
                _tell(call, call.ended, (None, ToolsHungError(f"no thread could be started ({error})")))

    def _work(self) -> None:
        while self._ran_one():
            pass

    def _ran_one(self) -> bool:
        """Run the next call. An idle thread holds nothing of the last one, whose context knows its whole run."""
        call = self._next()
        if call is None:
            return False
        _tell(call, call.began, None)
        outcome = call.run()
        with self._changed:
            self._num_hung -= call.state == "hung"
            call.state = "done"
        _tell(call, call.ended, outcome)
        return True

    def _next(self) -> _Call | None:
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


THREADS = CallThreads()
"""The threads of this process. All workflows share them, since threads are one budget."""


class ThreadReward(Generic[P, ResultT]):
    """Calls a synchronous function in threads. It may be typed into a notebook, a lambda, or hold a connection.

    Use a RewardPool for a function that model-written text can hang.
    """

    def __init__(self, function: Callable[P, ResultT], *, timeout_s: float = 30.0, workers: int = 2) -> None:
        """timeout_s: the longest a call may run, counted from its start. workers: calls that run at once.

        A call that takes longer raises, and its thread hangs on. While `workers` threads hang, all other calls raise.
        """
        check_limits(timeout_s, workers)
        self._function = function
        self._name = name_of(function)
        self._timeout_s = timeout_s
        self.threads = CallThreads(max_threads=workers, max_hung=workers)

    @reported
    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        """Raises RewardTimeoutError; RewardError if the function raises or returns no finite number."""
        try:
            call = functools.partial(_call, self._function, args, kwargs)
            result = await self.threads.acall(call, self._timeout_s)
        except CallTimeoutError as error:
            raise ran_too_long(self._name, self._timeout_s) from error
        except ToolsHungError as error:
            raise RewardError(
                f"reward function {self._name}: {error}; defined in a module, it could have a RewardPool, which kills "
                "its workers"
            ) from error
        except Exception as error:
            raise RewardError(f"reward function {self._name} failed: {error!r}") from error
        return checked(result, self._name)


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except (SystemExit, GeneratorExit, asyncio.CancelledError) as error:  # `exit()` ends this call and nothing else
        raise RuntimeError(f"it raised {error!r}") from error


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of the coroutines, in order. The first error cancels the others; it is raised without its group."""
    safe = [*map(contained, coroutines)]
    if len(safe) == 1:  # as most are: no task need be made
        return [await safe[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [*map(group.create_task, safe)]
    except BaseExceptionGroup as errors:
        raise first_error(errors)  # noqa: B904 - it has its own cause
    return [task.result() for task in tasks]


async def contained(coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine, without the errors that stop an event loop."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:  # out of a task they would stop the event loop
        raise RuntimeError(f"it raised {error!r}") from error

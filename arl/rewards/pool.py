"""RewardPool: calls a synchronous reward function in worker processes, and kills a worker that hangs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from contextlib import AsyncExitStack
from typing import Any, Generic, ParamSpec, cast

from pebble import ProcessExpired, ProcessPool

from arl.api.errors import ArlError, RewardError
from arl.api.types import Example
from arl.api.workflow import Shared
from arl.rewards.score import ResultT, check_example, check_limits, checked, name_of, ran_too_long, reported
from arl.runtime.threads import finished, offload

log = logging.getLogger(__name__)

P = ParamSpec("P")

STARTUP_TIMEOUT_S = 120.0
"""The longest that the first worker may take to start and to import the reward function's module."""
_STARTS = 2
"""How often workers are started before a RewardPool gives up: somebody may have killed the first ones."""
_LOOK_S = 1.0
"""How often a waiting call checks that the pool lives: pebble forgets calls that it has not begun when workers die."""

_Outcome = tuple[object, str | None]
"""The result of a call, or the message of its failure."""


class RewardPool(Shared, Generic[P, ResultT]):
    """Calls a synchronous function in worker processes, and kills a worker when its call hangs or is cancelled.

        async with RewardPool(score, timeout_s=5, workers=4) as reward:
            value = await reward(answer, data)

    Raises RewardTimeoutError; RewardError if the function raises, returns no finite number, or its worker dies. The
    pool then goes on with a new worker. Arguments are pickled.
    """

    def __init__(
        self,
        function: Callable[P, ResultT],
        *,
        timeout_s: float = 30.0,
        workers: int = 2,
        prepare: Callable[[], object] | None = None,
        if_killed: ResultT | None = None,
    ) -> None:
        """function: must be importable, so defined at the top level of a module. Workers import the script too, so put
        what it does under `if __name__ == "__main__":`.

        timeout_s: the longest a call may run, counted from when a worker begins it. workers: calls that run at once.
        prepare: must be importable too; each worker calls it before its first call, to import slow modules. if_killed:
        the result of a call that ran too long or killed its worker; unset, such a call raises.
        """
        super().__init__()
        check_limits(timeout_s, workers)
        self._name = name_of(function)
        if inspect.iscoroutinefunction(function):
            raise RewardError(f"reward function {self._name} is async; use AsyncReward for it")
        _check_importable(function)
        self._function = function
        self._timeout_s = timeout_s
        self._workers = workers
        self._prepare = prepare
        self._if_killed = if_killed
        self._pool: ProcessPool | None = None
        self._calls: set[concurrent.futures.Future[_Outcome]] = set()
        self._replacing = asyncio.Lock()

    def check_example(self, data: Example) -> None:
        check_example(self._function, data)

    async def _open(self, opened: AsyncExitStack) -> None:
        opened.push_async_callback(self._end)
        await self._begin()

    async def _begin(self) -> None:
        """Start the workers. A cancelled caller waits for them, too: nobody else would stop them."""
        starting = offload(self._start)
        try:
            await finished(starting)
        finally:
            if not starting.exception():
                self._pool = starting.result()

    async def _end(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await self._stop(pool)

    @reported
    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        try:
            arguments = pickle.dumps((args, kwargs))
        except (pickle.PicklingError, AttributeError, TypeError) as unpicklable:
            raise RewardError(f"an argument of reward function {self._name} cannot be pickled") from unpicklable
        async with self._replacing:
            if self._pool is not None and not self._pool.active:  # its workers died
                await self._stop(self._pool)
                await self._begin()
            pool = self._pool
        if pool is None:
            raise RewardError(
                f"the pool of reward function {self._name} is not open; enter it, or its workflow, with `async with`"
            )
        call = pool.schedule(_call, args=(self._function, arguments), timeout=self._timeout_s)
        self._calls.add(call)
        try:
            result, error = await _result(call, pool)
        except (TimeoutError, ProcessExpired) as killed:
            if isinstance(killed, TimeoutError):
                failure = ran_too_long(self._name, self._timeout_s)
            else:
                failure = RewardError(
                    f"the worker that ran reward function {self._name} died with exit code {killed.exitcode}"
                )
            if self._if_killed is None:
                raise failure from killed
            log.info("%s; it scores %s", failure, self._if_killed)
            return self._if_killed
        except BrokenProcessPool as broken:
            raise RewardError(
                f"the workers of reward function {self._name} died; the next call starts others"
            ) from broken
        except asyncio.CancelledError as cancelled:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise RewardError(f"the pool of reward function {self._name} was closed during a call") from cancelled
        finally:
            self._calls.discard(call)
        if error is not None:
            raise RewardError(error)
        return cast("ResultT", result)

    def _start(self) -> ProcessPool:
        """Start the workers and wait until one answers. Blocks."""
        for attempt in range(1, _STARTS + 1):
            pool = ProcessPool(
                max_workers=self._workers,
                initializer=_begin,
                initargs=(self._prepare,),
                context=multiprocessing.get_context("spawn"),
            )
            try:
                pool.schedule(_nothing, args=(self._function,)).result(STARTUP_TIMEOUT_S)
            except Exception as error:
                _stop(pool)
                if attempt < _STARTS and isinstance(error, BrokenProcessPool | ProcessExpired):
                    continue
                raise RewardError(
                    f"no worker for reward function {self._name} could start; its module must be importable, and a "
                    'script that makes a RewardPool must do so under `if __name__ == "__main__":`'
                ) from error
            return pool
        raise AssertionError("the last attempt returns or raises")

    async def _stop(self, pool: ProcessPool) -> None:
        """Kill the workers. Also end all calls, since a pool forgets the calls that it had not begun."""
        for call in tuple(self._calls):
            call.cancel()
        await offload(_stop, pool)


async def _result(call: concurrent.futures.Future[_Outcome], pool: ProcessPool) -> _Outcome:
    """Wait for a call to end; the caller's cancellation ends it. Raises BrokenProcessPool if the pool ends before it.

    A pool whose workers are all killed tells the calls that it has begun, and forgets those in its queue.
    """
    waiting = asyncio.wrap_future(call)
    try:
        while not waiting.done():
            await asyncio.wait([waiting], timeout=_LOOK_S)
            if not (waiting.done() or pool.active):
                raise BrokenProcessPool
        return waiting.result()
    finally:
        waiting.cancel()


def is_typed_in(function: Callable[..., Any]) -> bool:
    """Whether the function was defined in a notebook or at a prompt, so that no worker process can import it."""
    main, name = sys.modules["__main__"], name_of(function)
    is_elsewhere = name.isidentifier() and not hasattr(main, name)  # as in `python -m asyncio`
    return getattr(function, "__module__", None) == "__main__" and (is_elsewhere or not hasattr(main, "__file__"))


def _check_importable(function: Callable[..., Any]) -> None:
    advice = (
        "define it at the top level of a module, or wrap it in InlineReward if it is trivial, or in ThreadReward if it "
        "need not be killed when it hangs"
    )
    if is_typed_in(function):
        raise RewardError(
            f"reward function {name_of(function)} was typed in interactively, so no worker can import it; {advice}"
        )
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RewardError(f"reward function {name_of(function)} cannot be sent to a worker; {advice}") from error


# The rest runs in a worker, or stops one.


def _begin(prepare: Callable[[], object] | None) -> None:
    if sys.platform == "linux":
        _end_with_parent()
    if prepare is not None:
        prepare()


def _end_with_parent() -> None:
    """Have the kernel end this process with arl's, by SIGIO, once the pipe that only arl's holds open is closed."""
    import fcntl

    parent = multiprocessing.parent_process()
    assert parent is not None
    pipe = int(parent.sentinel)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():
        os._exit(1)


def _call(function: Callable[..., Any], arguments: bytes) -> _Outcome:
    """Returns the reward, or the traceback as text, since not every exception can be pickled."""
    name = f"reward function {name_of(function)}"
    try:
        args, kwargs = pickle.loads(arguments)
    except Exception as error:  # noqa: BLE001 - crosses to the caller as text
        return None, f"an argument of {name} cannot be read in its worker, as its class must be in a module: {error}"
    try:
        result = function(*args, **kwargs)
    except ArlError as error:
        return None, f"{name}: {error}"
    except Exception:  # noqa: BLE001 - crosses to the caller as text
        return None, f"{name} failed in its worker:\n{traceback.format_exc()}"
    try:
        return checked(result, name_of(function)), None
    except RewardError as error:
        return None, str(error)


def _nothing(_: object) -> None:
    """A call of this in a worker shows that the worker has started and can import its argument."""


def _stop(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()

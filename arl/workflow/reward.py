"""Reward functions off the event loop. In a workflow each is one await: `reward = await self.reward(answer, data)`.

| class | for | time limit | a call costs |
|---|---|---|---|
| RewardPool | any synchronous function; it may hang, crash or run long | kills the worker | a round trip to a process |
| AsyncReward | a coroutine function, such as a call to a judge model | cancels it | itself |
| InlineReward | a trivial one, such as comparing two strings | none | itself, on the event loop |

Results must be finite numbers. A slow reward makes a slow episode, and nothing else waits for it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import math
import multiprocessing
import pickle
import sys
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures.process import BrokenProcessPool
from numbers import Real
from typing import Any, Generic, ParamSpec, Self

from pebble import ProcessExpired, ProcessPool

from arl.api.errors import RewardError, RewardTimeoutError

P = ParamSpec("P")

STARTUP_TIMEOUT_S = 120.0
"""Longest time the first worker may take to start and to import the reward function's module."""


class RewardPool(Generic[P]):
    """Calls a synchronous function in worker processes that are killed when a call hangs.

        async with RewardPool(score, timeout_s=5, workers=4) as reward:
            value = await reward(answer, data)

    function: must be importable, so defined at the top level of a module; a script that makes a pool needs
    `if __name__ == "__main__":`, because workers import it. Arguments are pickled. timeout_s: the longest a call may
    run, counted from when a worker begins it, however long it was queued. workers: calls that run at once.
    Cancelling a call kills its worker if it runs. Workers are forked from a clean server process, never from this one.

    Raises RewardTimeoutError; RewardError if the function raises, returns no finite number, or its worker dies. The
    pool then goes on with a new worker.
    """

    def __init__(self, function: Callable[P, float], *, timeout_s: float = 30.0, workers: int = 2) -> None:
        if timeout_s <= 0 or workers < 1:
            raise ValueError(f"timeout_s is {timeout_s} and workers is {workers}; they must be above 0 and at least 1")
        self._name = _name(function)
        if inspect.iscoroutinefunction(function):
            raise RewardError(f"reward function {self._name} is async; use AsyncReward for it")
        _check_importable(function)
        self._function = function
        self._timeout_s = timeout_s
        self._workers = workers
        self._pool: ProcessPool | None = None
        self._calls: set[concurrent.futures.Future[tuple[float, str | None]]] = set()
        self._replacing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._pool = await asyncio.to_thread(self._start)
        return self

    async def __aexit__(self, *exc: object) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await self._stop(pool)

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> float:
        async with self._replacing:
            pool = self._pool
        if pool is None:
            raise RewardError(f"the pool of reward function {self._name} is not open; call it within `async with`")
        value, error = await self._run(pool, args, kwargs)
        if error is not None:
            raise RewardError(f"reward function {self._name} failed in its worker:\n{error}")
        return value

    async def _run(self, pool: ProcessPool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, str | None]:
        """Run `_call` in a worker, and attribute whatever kept it from returning."""
        call = pool.schedule(_call, args=(self._function, args, kwargs), timeout=self._timeout_s)
        self._calls.add(call)
        try:
            return await asyncio.wrap_future(call)
        except TimeoutError as timeout:
            raise RewardTimeoutError(f"reward function {self._name} ran longer than {self._timeout_s:g} s") from timeout
        except ProcessExpired as death:
            raise RewardError(
                f"the worker that ran reward function {self._name} died with exit code {death.exitcode}"
            ) from death
        except BrokenProcessPool as broken:
            await self._replace(pool)
            raise RewardError(f"the workers of reward function {self._name} died; others were started") from broken
        except (pickle.PicklingError, AttributeError, TypeError) as unpicklable:
            raise RewardError(f"an argument of reward function {self._name} cannot be pickled") from unpicklable
        except asyncio.CancelledError as cancelled:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise RewardError(f"the pool of reward function {self._name} was closed during a call") from cancelled
        finally:
            self._calls.discard(call)

    def _start(self) -> ProcessPool:
        """Start workers and wait until one can run the function. Blocks."""
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        pool = ProcessPool(max_workers=self._workers, context=multiprocessing.get_context(method))
        try:
            pool.schedule(_call, args=(_nothing, (self._function,), {})).result(STARTUP_TIMEOUT_S)
        except Exception as error:
            _stop(pool)
            raise RewardError(
                f"no worker for reward function {self._name} could start; its module must be importable, and a script "
                'that makes a RewardPool must do so under `if __name__ == "__main__":`'
            ) from error
        return pool

    async def _replace(self, broken: ProcessPool) -> None:
        """Start a new pool, unless another call that saw the same one break did; calls wait meanwhile."""
        async with self._replacing:
            if self._pool is broken:
                await self._stop(broken)
                self._pool = await asyncio.to_thread(self._start)

    async def _stop(self, pool: ProcessPool) -> None:
        """Kill the workers. Calls are ended here, since a pool forgets those it had not begun."""
        for call in tuple(self._calls):
            call.cancel()
        await asyncio.to_thread(_stop, pool)


class AsyncReward(Generic[P]):
    """Awaits a coroutine function for at most timeout_s seconds. Raises RewardTimeoutError and RewardError."""

    def __init__(self, function: Callable[P, Awaitable[float]], *, timeout_s: float = 30.0) -> None:
        self._function = function
        self._timeout_s = timeout_s

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> float:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return _finite(await self._function(*args, **kwargs))
        except Exception as error:
            name = _name(self._function)
            if limit.expired():
                raise RewardTimeoutError(f"reward function {name} ran longer than {self._timeout_s:g} s") from error
            raise RewardError(f"reward function {name} failed: {error}") from error


class InlineReward(Generic[P]):
    """Calls a function on the event loop, where all else waits for it: for microseconds of work. Raises RewardError."""

    def __init__(self, function: Callable[P, float]) -> None:
        self._function = function

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> float:
        try:
            return _finite(self._function(*args, **kwargs))
        except Exception as error:
            raise RewardError(f"reward function {_name(self._function)} failed: {error}") from error


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, str | None]:
    """In the worker: the reward, or the traceback as text, since not every exception can be pickled."""
    try:
        return _finite(function(*args, **kwargs)), None
    except Exception:  # noqa: BLE001 - crosses to the caller as text
        return 0.0, traceback.format_exc()


def _nothing(_: object) -> float:
    return 0.0


def _finite(value: Any) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"it returned {value!r}; a reward must be a finite number")
    return float(value)


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _check_importable(function: Callable[..., Any]) -> None:
    advice = "define it at the top level of a module, or use InlineReward if it is trivial"
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RewardError(f"reward function {_name(function)} cannot be sent to a worker; {advice}") from error
    main = sys.modules["__main__"]
    if getattr(function, "__module__", None) == "__main__" and not hasattr(main, "__file__"):
        raise RewardError(
            f"reward function {_name(function)} was typed in interactively, so no worker can import it; {advice}"
        )


def _stop(pool: ProcessPool) -> None:
    """Blocks until the workers are dead."""
    pool.stop()
    pool.join()

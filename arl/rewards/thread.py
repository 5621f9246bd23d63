"""A synchronous reward function in threads of this process, for one that no worker process can import."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, ParamSpec

from arl.api.errors import ConfigError, RewardError, RewardTimeoutError
from arl.rewards.score import ResultT, checked, name_of

P = ParamSpec("P")


class ThreadReward(Generic[P, ResultT]):
    """Calls a synchronous function in threads: one typed into a notebook, a lambda, or one that holds a connection.

    The event loop goes on meanwhile, a little slower where the function computes in Python. timeout_s: the longest a
    call may run, counted from its start. One that runs longer is told to stop, which ends Python code, but not a call
    into C that never returns: such a thread is left behind, and after `workers` of these all further calls fail.
    workers: calls that run at once. A function that model-written text can hang belongs into a RewardPool.

    Raises RewardTimeoutError; RewardError if the function raises or returns no finite number.
    """

    def __init__(self, function: Callable[P, ResultT], *, timeout_s: float = 30.0, workers: int = 2) -> None:
        if timeout_s <= 0 or workers < 1:
            raise ConfigError(f"timeout_s is {timeout_s} and workers is {workers}; they must be above 0 and at least 1")
        self._function = function
        self._name = name_of(function)
        self._timeout_s = timeout_s
        self._workers = workers
        self._places = asyncio.Semaphore(workers)
        self._left_behind = dict[threading.Thread, float]()

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        async with self._places:
            self._left_behind = {thread: end for thread, end in self._left_behind.items() if thread.is_alive()}
            if sum(end <= time.monotonic() for end in self._left_behind.values()) >= self._workers:
                raise RewardError(
                    f"{self._workers} calls of reward function {self._name} hang in threads that cannot be stopped; "
                    "define it in a module, so that a RewardPool can kill its workers"
                )
            return checked(await self._run(args, kwargs), self._name)

    async def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call: concurrent.futures.Future[Any] = concurrent.futures.Future()
        # A daemon, since one that cannot be stopped must not keep the interpreter from ending.
        thread = threading.Thread(target=_call, args=(call, self._function, args, kwargs), daemon=True)
        call.set_running_or_notify_cancel()
        end = time.monotonic() + self._timeout_s  # a call that is cancelled before then does not hang
        limit = asyncio.timeout(self._timeout_s)
        thread.start()
        try:
            async with limit:
                return await asyncio.wrap_future(call)
        except Exception as error:
            if limit.expired():
                message = f"reward function {self._name} ran longer than {self._timeout_s:g} s"
                raise RewardTimeoutError(message) from error
            raise RewardError(f"reward function {self._name} failed: {error!r}") from error
        finally:
            if not call.done():
                self._left_behind[thread] = end
                _stop(thread)


class _Stopped(BaseException):
    """Raised within a call that is to end; no Exception, so that the function does not catch it."""


def _call(
    call: concurrent.futures.Future[Any], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        try:
            result = function(*args, **kwargs)
        except StopIteration as error:  # asyncio's futures do not take it
            call.set_exception(RuntimeError(f"it raised {error!r}"))
        except Exception as error:  # noqa: BLE001 - crosses to the caller
            call.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - `exit()` in a reward ends that call and nothing else
            call.set_exception(RuntimeError(f"it raised {type(error).__name__}"))
        else:
            call.set_result(result)
    except _Stopped:
        pass  # told to stop just as it ended


def _stop(thread: threading.Thread) -> None:
    """Have _Stopped raised in the thread, before its next instruction of Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stopped))

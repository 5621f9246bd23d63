"""Rewards that need no process: coroutine functions, threads, and trivial functions on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, ParamSpec, cast

from arl.api.errors import ConfigError, RewardError, RewardTimeoutError
from arl.rewards.score import ResultT, Score, name_of, score_of

P = ParamSpec("P")


class AsyncReward(Generic[P, ResultT]):
    """Awaits a coroutine function for at most timeout_s seconds. Raises RewardTimeoutError and RewardError."""

    def __init__(self, function: Callable[P, Awaitable[ResultT]], *, timeout_s: float = 30.0) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s is {timeout_s}; it must be above 0")
        self._function = function
        self._name = name_of(function)
        self._timeout_s = timeout_s

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                result = await self._function(*args, **kwargs)
        except Exception as error:
            if limit.expired():
                message = f"reward function {self._name} ran longer than {self._timeout_s:g} s"
                raise RewardTimeoutError(message) from error
            raise RewardError(f"reward function {self._name} failed: {error}") from error
        return checked(result, self._name)


class InlineReward(Generic[P, ResultT]):
    """Calls a function on the event loop, where all else waits for it: for microseconds of work. Raises RewardError."""

    def __init__(self, function: Callable[P, ResultT]) -> None:
        self._function = function
        self._name = name_of(function)

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        try:
            result = self._function(*args, **kwargs)
        except Exception as error:
            raise RewardError(f"reward function {self._name} failed: {error}") from error
        return checked(result, self._name)


def checked(result: ResultT, name: str) -> ResultT:
    """The result itself, a number as a float. Raises RewardError for what is neither number nor Score."""
    score = score_of(result, f"reward function {name}")
    return cast("ResultT", result if isinstance(result, Score) else score.value)

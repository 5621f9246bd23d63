"""Score, the result of a reward, and the checks of results: a reward must be a finite number."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ParamSpec, TypeVar, cast

from arl.api.errors import ConfigError, RewardError, RewardTimeoutError
from arl.api.events import EPISODE, RewardEnded, short
from arl.api.types import Example


@dataclass(frozen=True, slots=True)
class Score:
    """A reward with its parts. Raises ValueError for anything but finite numbers."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Named parts, before weighting. Workflows pass them to Trajectory.rewards; logs show means as `reward/NAME`."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers that are logged as `episode/NAME` but not rewarded."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _finite("value", self.value))
        for field_name, numbers in (("parts", self.parts), ("metrics", self.metrics)):
            checked = {name: _finite(f"{field_name}[{name!r}]", number) for name, number in numbers.items()}
            object.__setattr__(self, field_name, checked)


Reward = Callable[[str, Example], Awaitable[float | Score]]
"""The reward that a workflow awaits: takes the final answer and the example, returns a number or a Score."""

ResultT = TypeVar("ResultT", float, Score, float | Score)


def score_of(result: object, name: str = "a reward") -> Score:
    """Turn a number into a Score; return a Score as it is. Raises RewardError with `name` for anything else."""
    if isinstance(result, Score):
        return result
    if not is_finite(result):
        hint = "; return Score(value, parts) for several named ones" if isinstance(result, Mapping) else ""
        raise RewardError(f"{name} returned {shown(result)}; a reward must be a finite number, or a Score{hint}")
    return Score(float(result))  # pyright: ignore[reportArgumentType]


def is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def shown(value: object) -> str:
    """The beginning of a value's repr, short enough for a message."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python converts
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", None) or type(function).__name__


def _finite(name: str, number: float) -> float:
    if not is_finite(number):
        raise ValueError(f"{name} is {shown(number)}; a reward must be a finite number")
    return float(number)


def check_limits(timeout_s: float, workers: int = 1) -> None:
    if timeout_s <= 0:
        raise ConfigError(f"timeout_s is {timeout_s}; it must be above 0")
    if workers < 1:
        raise ConfigError(f"workers is {workers}; it must be at least 1")


def check_example(reward: object, data: Example) -> None:
    """Let a reward that looks a reference up raise RewardError if the example has none. Only arl's own can tell."""
    if check := getattr(reward, "check_example", None):
        check(data)


def ran_too_long(name: str, timeout_s: float) -> RewardTimeoutError:
    return RewardTimeoutError(f"reward function {name} ran longer than {timeout_s:g} s")


def checked(result: ResultT, name: str) -> ResultT:
    """The result: a Score as it is, a number as a float. Raises RewardError for anything else."""
    score = score_of(result, f"reward function {name}")
    return cast("ResultT", result if isinstance(result, Score) else score.value)


P = ParamSpec("P")


def reported(call: Callable[P, Coroutine[Any, Any, ResultT]]) -> Callable[P, Coroutine[Any, Any, ResultT]]:
    """A reward's `__call__`, whose results the event log gets as those of the episode that it runs in."""

    @functools.wraps(call)
    async def reporting(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        if (context := EPISODE.get()) is None:
            return await call(*args, **kwargs)
        reward: Any = args[0]
        name = getattr(reward, "_name", None) or getattr(reward, "name", None) or type(reward).__name__
        began = time.monotonic()

        def ended(**outcome: Any) -> None:
            seconds = time.monotonic() - began
            context.events.emit(
                RewardEnded(episode=context.episode, reward=short(str(name)), seconds=seconds, **outcome)
            )

        try:
            result = await call(*args, **kwargs)
        except BaseException as error:
            ended(error=type(error).__name__)
            raise
        if isinstance(result, Score):
            ended(value=result.value, parts={short(str(name)): part for name, part in result.parts.items()})
        else:
            ended(value=result)
        return result

    cast("Any", reporting).reports = True
    return reporting


def reports(reward: object) -> bool:
    """Whether its `__call__` is `reported`."""
    return hasattr(type(reward).__call__, "reports")

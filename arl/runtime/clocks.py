"""Time limits that stand still: of an episode that waits for a place to run in, of a request while servers sleep."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar


class EpisodeClock:
    """How long an episode may still take, all its attempts together.

    Its time runs from `begin` to `end` of each attempt, but not while it is stopped. It belongs to the running loop.
    on_change: called with whether it stands still, when that changes.
    """

    __slots__ = ("_left_s", "_limit", "_now", "_num_stops", "_on_change", "_since", "began")

    def __init__(self, limit_s: float = math.inf, on_change: Callable[[bool], object] = lambda _: None) -> None:
        self._now = asyncio.get_running_loop().time
        self.began = self._now()
        """When the episode began, by the loop's clock: before its first attempt."""
        self._left_s = limit_s
        self._since = self.began
        self._limit: asyncio.Timeout | None = None
        self._num_stops = 0
        self._on_change = on_change

    @property
    def left_s(self) -> float:
        """Seconds that are left; infinite without a limit."""
        is_running = self._limit is not None and not self.is_still
        return self._left_s - (self._now() - self._since if is_running else 0.0)

    @property
    def is_still(self) -> bool:
        return self._limit is not None and self._num_stops > 0

    def begin(self) -> asyncio.Timeout:
        """The time limit of an attempt, to enter once."""
        self._num_stops, self._since = 0, self._now()
        self._limit = asyncio.timeout_at(self._deadline())
        return self._limit

    def end(self) -> None:
        self._left_s, self._limit = self.left_s, None

    def stop(self) -> None:
        """Stand still, until there was a `go` for each `stop`. Does nothing between attempts."""
        if self._limit is None:
            return
        if not self._num_stops:
            self._left_s = self.left_s
            _reschedule(self._limit, None)  # unless the attempt is ending already
            self._on_change(True)
        self._num_stops += 1

    def go(self) -> None:
        if self._limit is None or not self._num_stops:
            return
        self._num_stops -= 1
        if not self._num_stops:
            self._since = self._now()
            _reschedule(self._limit, self._deadline())
            self._on_change(False)

    def _deadline(self) -> float | None:
        return self._since + self._left_s if self._left_s < math.inf else None


CLOCK: ContextVar[EpisodeClock | None] = ContextVar("CLOCK", default=None)
"""Of the episode that a piece of code runs in."""


@contextmanager
def off_the_clock() -> Generator[None]:
    """Time within the block does not count against rollout.episode_timeout_s: the episode waits until others end."""
    if (clock := CLOCK.get()) is None:
        yield
        return
    clock.stop()
    try:
        yield
    finally:
        clock.go()


class AwakeClock:
    """Deadlines are by `now`. Belongs to one event loop."""

    def __init__(self) -> None:
        self._slept_s = 0.0
        self._since: float | None = None
        """When it was stopped, by the loop's clock; None while it goes."""
        self._deadlines: dict[asyncio.Timeout, float] = {}
        self._episodes: dict[EpisodeClock, int] = {}
        """The clocks of the episodes that wait for requests, and how many each."""

    def now(self) -> float:
        """The loop's time, without the time for which it was stopped."""
        return (_now() if self._since is None else self._since) - self._slept_s

    def limit(self, deadline: float) -> asyncio.Timeout:
        """A time limit that moves with the stops. `ended` has to follow."""
        scope = asyncio.timeout_at(None if self._since is not None else deadline + self._slept_s)
        self._deadlines[scope] = deadline
        return scope

    def ended(self, scope: asyncio.Timeout) -> None:
        """It is over, or about to expire whatever the clock says."""
        self._deadlines.pop(scope, None)

    @contextmanager
    def request(self) -> Generator[None]:
        """Within the block the clock of the running episode stands still while this one does."""
        if (clock := CLOCK.get()) is None:
            yield
            return
        self._episodes[clock] = self._episodes.get(clock, 0) + 1
        if self._since is not None and self._episodes[clock] == 1:
            clock.stop()
        try:
            yield
        finally:
            self._episodes[clock] -= 1
            if not self._episodes[clock]:
                del self._episodes[clock]
                if self._since is not None:
                    clock.go()

    def stop(self) -> None:
        if self._since is not None:
            return
        self._since = _now()
        for scope in self._deadlines:
            _reschedule(scope, None)
        for clock in self._episodes:
            clock.stop()

    def go(self) -> None:
        if self._since is None:
            return
        self._slept_s += _now() - self._since
        self._since = None
        for scope, deadline in self._deadlines.items():
            _reschedule(scope, deadline + self._slept_s)
        for clock in self._episodes:
            clock.go()


def _reschedule(scope: asyncio.Timeout, when: float | None) -> None:
    if not scope.expired():
        scope.reschedule(when)


def _now() -> float:
    return asyncio.get_running_loop().time()

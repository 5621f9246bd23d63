"""The time limit of an episode, which stands still while the episode waits for a place to run in."""

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

    def __init__(self, limit_s: float = math.inf, on_change: Callable[[bool], object] | None = None) -> None:
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
        """End the attempt that has begun."""
        self._left_s, self._limit = self.left_s, None

    def stop(self) -> None:
        """Stand still, until there was a `go` for each `stop`. Does nothing between attempts."""
        if self._limit is None:
            return
        if not self._num_stops:
            self._left_s = self.left_s
            self._reschedule(None)
            self._tell(is_still=True)
        self._num_stops += 1

    def go(self) -> None:
        if self._limit is None or not self._num_stops:
            return
        self._num_stops -= 1
        if not self._num_stops:
            self._since = self._now()
            self._reschedule(self._deadline())
            self._tell(is_still=False)

    def _deadline(self) -> float | None:
        return self._since + self._left_s if self._left_s < math.inf else None

    def _reschedule(self, when: float | None) -> None:
        if self._limit is not None and not self._limit.expired():  # else the attempt is ending already
            self._limit.reschedule(when)

    def _tell(self, *, is_still: bool) -> None:
        if self._on_change is not None:
            self._on_change(is_still)


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

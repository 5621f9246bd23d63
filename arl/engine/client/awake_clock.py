"""How long requests may take. Their time stands still while servers sleep, and that of their episodes, too."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from arl.api.episode_clock import CLOCK, EpisodeClock


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

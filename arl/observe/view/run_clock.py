"""The time of a run whose machine may have another clock than the one that looks at it."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable

_TRUSTED_S = 5.0
"""Clocks this close count as equal."""


class RunClock:
    """Seconds since 1970 as the run's machine counts them, learnt from records that arrive while somebody looks.

    A record arrives moments after it was written, or later; so the smallest difference seen is nearest to that between
    the clocks. Until one has arrived, this machine's clock counts, except that nothing was written in the future.
    """

    def __init__(self, clock: Callable[[], float] = time.time, here: str | None = None) -> None:
        self._clock = clock
        self._here = here or socket.gethostname()
        self._host: str | None = None
        self._ahead_s = math.inf
        """How far this machine's clock is ahead of the run's, at most."""

    def note(self, host: str, written: float) -> None:
        """A record that was written on this host at this time has just arrived."""
        if host != self._host:  # another life of the run, on another machine
            self._host, self._ahead_s = host, math.inf
        self._ahead_s = min(self._ahead_s, self._clock() - written)

    def now(self, host: str, last: float) -> float:
        """host: of the run. last: the time of its newest record."""
        if host == self._here:
            return self._clock()
        if self._clock() < last:
            self.note(host, last)
        is_apart = host == self._host and abs(self._ahead_s) > _TRUSTED_S
        return self._clock() - self._ahead_s if is_apart else self._clock()

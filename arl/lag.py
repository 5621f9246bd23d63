"""LagMonitor: notices code that blocks the event loop, on which every episode and every request waits."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

log = logging.getLogger(__name__)


class LagMonitor:
    """Wakes up every `period_s` and notes how late it was woken.

    culprit: what the warning says blocks the loop, most likely. warn_after_s: a lag that is worth a warning.
    recent_s: the last `keep` lags, in seconds.
    """

    def __init__(self, culprit: str, *, period_s: float = 0.1, warn_after_s: float = 1.0, keep: int = 1000) -> None:
        self._culprit = culprit
        self._period_s = period_s
        self._warn_after_s = warn_after_s
        self.recent_s: deque[float] = deque(maxlen=keep)

    @property
    def worst_s(self) -> float:
        """The longest of the recent lags."""
        return max(self.recent_s, default=0.0)

    async def run(self) -> None:
        """Watch until cancelled."""
        clock = asyncio.get_running_loop()
        while True:
            due = clock.time() + self._period_s
            await asyncio.sleep(self._period_s)
            lag = clock.time() - due
            self.recent_s.append(lag)
            if lag > self._warn_after_s:
                log.warning(
                    "the event loop was blocked for %.1f s, probably by %s (or the machine has no core to spare): "
                    "every episode and request stood still. Await what takes long, or move it off the loop "
                    "(asyncio.to_thread, RewardPool)",
                    lag,
                    self._culprit,
                )

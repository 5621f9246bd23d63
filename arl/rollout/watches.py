"""LagMonitor: notices code that blocks the event loop, on which every episode and every request waits."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

log = logging.getLogger(__name__)

_BLOCKED_S = 1.0
"""A longer lag is a block."""
_WINDOW_S = 60.0
_TOLERATED_S = 3.0
"""How long all blocks of a window may take together until there is a warning."""


class LagMonitor:
    """Wakes up every `period_s`, notes how late it was woken, and warns where the loop is blocked again and again.

    The first window counts for nothing, in which modules are imported and kernels compiled, nor does the one after a
    warning. culprit: what the warning says blocks the loop, most likely. recent_s: the last `keep` lags, in seconds.
    """

    def __init__(self, culprit: str, *, period_s: float = 0.1, keep: int = 1000) -> None:
        self.recent_s: deque[float] = deque(maxlen=keep)
        self._culprit = culprit
        self._period_s = period_s
        self._blocks: deque[tuple[float, float]] = deque()
        self._quiet_until: float | None = None

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
            now = clock.time()
            self.note(now - due, now)

    def note(self, lag_s: float, now: float) -> None:
        """Count a lag that ended at `now`, in seconds of any clock."""
        self.recent_s.append(lag_s)
        if self._quiet_until is None:
            self._quiet_until = now + _WINDOW_S
        if now < self._quiet_until or lag_s <= _BLOCKED_S:
            return
        self._blocks.append((now, lag_s))
        while self._blocks[0][0] < now - _WINDOW_S:
            self._blocks.popleft()
        blocked_s = sum(block_s for _, block_s in self._blocks)
        if blocked_s > _TOLERATED_S:
            log.warning(
                "the event loop was blocked for %.1f of the last %.0f s, probably by %s (or the machine has no core to "
                "spare): every episode and request stood still. Await what takes long, or move it off the loop "
                "(asyncio.to_thread, RewardPool)",
                blocked_s,
                _WINDOW_S,
                self._culprit,
            )
            self._blocks.clear()
            self._quiet_until = now + _WINDOW_S

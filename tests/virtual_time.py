"""An event loop whose clock jumps to the next timer: hours of schedule in milliseconds, and a deadlock is an error."""

from __future__ import annotations

import asyncio
import gc
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(Exception):
    """Every task waits, and no timer is left that could wake one."""


class _Clock(selectors.SelectSelector):
    """Instead of waiting, it lets time pass. tick_s: how long each turn of the loop takes."""

    def __init__(self, tick_s: float) -> None:
        super().__init__()
        self.now, self._tick_s = 0.0, tick_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += self._tick_s
        if timeout is None:
            if ready := super().select(0):  # a signal
                return ready
            raise DeadlockError("every task waits for another")
        self.now += max(timeout, 0.0)
        return []


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self, tick_s: float) -> None:
        self._clock = _Clock(tick_s)
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_in_virtual_time(main: Coroutine[Any, Any, T], tick_s: float = 0.0) -> T:
    """tick_s: how long each turn of the loop takes, so that a timer may go off between any two of them.

    Garbage is collected afterwards: there is little, and looking at all that a large schedule holds takes seconds.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=lambda: _VirtualTimeLoop(tick_s)) as runner:
            return runner.run(main)
    finally:
        if collects:
            gc.enable()

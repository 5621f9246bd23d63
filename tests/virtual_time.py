"""An event loop whose clock jumps to the next timer: hours of schedule in milliseconds, and a deadlock is an error."""

import asyncio
import gc
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(Exception):
    """Every task waits, and no timer is left that could wake one."""


class _JumpingSelector(selectors.SelectSelector):
    now = 0.0
    tick_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise DeadlockError("every task waits for another")
        self.now += max(timeout, self.tick_s)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self, tick_s: float = 0.0) -> None:
        self._jumping = _JumpingSelector()
        self._jumping.tick_s = tick_s
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_in_virtual_time(main: Coroutine[Any, Any, T], tick_s: float = 0.0) -> T:
    """tick_s: how long each turn of the loop takes, so that a timer may go off between any two of them.

    Python collects garbage itself here: by the loop's clock it would be collected 20 times a second of the schedule.
    """
    before = gc.get_threshold()
    gc.set_threshold(50_000, 5, 5)
    try:
        with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(tick_s)) as runner:
            return runner.run(main)
    finally:
        gc.set_threshold(*before)

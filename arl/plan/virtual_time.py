"""An event loop whose clock jumps to the next timer: hours of schedule in milliseconds, and a deadlock is an error."""

from __future__ import annotations

import asyncio
import gc
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar, cast

T = TypeVar("T")

_FEW_TIMERS = 1000
"""Cancelled timers that are left where they are."""


class DeadlockError(Exception):
    """Every task waits, and no timer is left that could wake one."""


class _Timer:
    """What `call_at` returns. The loop's heap holds it beside its time, as tuples compare faster than objects."""

    __slots__ = ("_args", "_callback", "_loop", "_when", "context")

    def __init__(
        self, loop: VirtualTimeLoop, when: float, callback: Callable[..., object], args: Any, context: Context | None
    ) -> None:
        self._loop = loop
        self._when = when
        self._callback: Callable[..., object] | None = callback
        self._args = args
        self.context = copy_context() if context is None else context

    def when(self) -> float:
        return self._when

    def cancelled(self) -> bool:
        return self._callback is None

    def cancel(self) -> None:
        if self._callback is not None:
            self._callback, self._args, self.context = None, (), None
            self._loop.note_cancelled()

    def run(self) -> None:
        """It may have been cancelled since it went off."""
        if self._callback is not None:
            self._callback(*self._args)


class _JumpingSelector(selectors.SelectSelector):
    """What the loop asks for the next event; no file is ever looked at."""

    turn: Callable[[bool], None]

    def select(self, timeout: float | None = None) -> list[Any]:
        self.turn(timeout is None)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """tick_s: how long each turn of the loop takes, so that a timer may go off between any two of them."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self._tick_s = tick_s
        self._now = 0.0
        self._timers: list[tuple[float, int, _Timer]] = []
        """A heap: (when, number, timer)."""
        self._num_timers = 0
        self._num_cancelled = 0
        selector = _JumpingSelector()
        selector.turn = self._turn
        super().__init__(selector)

    def time(self) -> float:
        return self._now

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(self, when, callback, args, context)
        self._num_timers += 1
        heappush(self._timers, (when, self._num_timers, timer))
        return cast(asyncio.TimerHandle, timer)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def note_cancelled(self) -> None:
        self._num_cancelled += 1
        if self._num_cancelled > _FEW_TIMERS and 2 * self._num_cancelled > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapify(self._timers)
            self._num_cancelled = 0

    def _turn(self, is_idle: bool) -> None:
        """Let timers go off. is_idle: nothing else is to be done, so the clock jumps to the next one."""
        self._now += self._tick_s
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heappop(timers)
            self._num_cancelled -= 1
        if is_idle and not timers:
            raise DeadlockError("every task waits for another")
        if is_idle:
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            timer = heappop(timers)[2]
            if timer.cancelled():
                self._num_cancelled -= 1
            elif is_idle:  # nothing is to be done before it, and what it wakes is done in this turn
                self._go_off(timer)
            else:
                self.call_soon(timer.run, context=timer.context)

    def _go_off(self, timer: _Timer) -> None:
        assert timer.context is not None
        try:
            timer.context.run(timer.run)
        except Exception as error:  # noqa: BLE001 - as a handle's
            self.call_exception_handler({"message": "a timer's callback raised", "exception": error})


def run_in_virtual_time(main: Coroutine[Any, Any, T], tick_s: float = 0.0) -> T:
    """tick_s: how long each turn of the loop takes, so that a timer may go off between any two of them.

    Python collects garbage itself here: by the loop's clock it would be collected 20 times a second of the schedule.
    """
    before = gc.get_threshold()
    gc.set_threshold(500_000, 10, 10)
    try:
        with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(tick_s)) as runner:
            return runner.run(main)
    finally:
        gc.set_threshold(*before)

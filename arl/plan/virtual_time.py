"""An event loop whose clock jumps to the next timer: hours of schedule in milliseconds, and a deadlock is an error."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar, cast

T = TypeVar("T")

_FEW_TIMERS = 1000
"""Cancelled timers that are left where they are."""
_SLICES = 8
"""The number of slices of a second."""
_LAST_SLICE = 1 << 60


class DeadlockError(Exception):
    """Every task waits, and no timer is left that could wake one."""


class _LoopCall:
    """What `call_soon` and `call_at` return: a handle without what debugging needs."""

    __slots__ = ("args", "callback", "context", "loop", "when_s")

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context | None,
        loop: VirtualTimeLoop | None = None,
        when: float = 0.0,
    ) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = context
        self.loop = loop
        """Whose heap holds it, if one does."""
        self.when_s = when

    def when(self) -> float:
        return self.when_s

    def cancelled(self) -> bool:
        return self.callback is None

    def cancel(self) -> None:
        if self.callback is not None:
            self.callback, self.args = None, ()
            if self.loop is not None:
                self.loop.note_cancelled()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """tick_s: how long each turn of the loop takes, so that a timer may go off between any two of them.

    Its turn takes the place of BaseEventLoop's, which spends most of its time on files that nobody waits for here.
    """

    def __init__(self, tick_s: float = 0.0) -> None:
        self._tick_s = tick_s
        self._now = 0.0
        self._timers: list[tuple[float, int, _LoopCall]] = []
        """A heap: (when, number, timer), as tuples compare faster than objects. It holds those before `_far`: a heap of
        hundreds of thousands, most of which are far from due, would take a third of the time."""
        self._far = 0.0
        self._slices: dict[int, list[tuple[float, int, _LoopCall]]] = {}
        """Number of a slice of time -> its timers."""
        self._slice_numbers: list[int] = []
        """A heap."""
        self._num_far = 0
        """Timers in slices."""
        self._num_timers = 0
        self._num_cancelled = 0
        super().__init__()
        self._ready: deque[_LoopCall] = deque()
        """What the next turn does. BaseEventLoop knows it by this name."""

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        call = _LoopCall(callback, args, copy_context() if context is None else context)
        self._ready.append(call)
        return call

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        """The loop never sleeps, so nothing need wake it."""
        return self.call_soon(callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        return self._add(_LoopCall(callback, args, copy_context() if context is None else context, self, when))

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def do_at(self, when: float, callback: Callable[..., object], *args: Any) -> _LoopCall:
        """`call_at` without a context: for callbacks that run no code of others."""
        return self._add(_LoopCall(callback, args, None, self, when))

    def until(self, when: float) -> asyncio.Future[None]:
        """For `await`: a sleep, with less work."""
        future: asyncio.Future[None] = asyncio.Future(loop=self)
        self.do_at(when, _complete, future)
        return future

    def note_cancelled(self) -> None:
        self._num_cancelled += 1
        if self._num_cancelled > _FEW_TIMERS and 2 * self._num_cancelled > len(self._timers) + self._num_far:
            for entries in (self._timers, *self._slices.values()):
                entries[:] = [entry for entry in entries if entry[2].callback is not None]
            heapify(self._timers)
            self._num_far = sum(map(len, self._slices.values()))
            self._num_cancelled = 0

    def _add(self, timer: _LoopCall) -> _LoopCall:
        self._num_timers += 1
        when = timer.when_s
        entry = (when, self._num_timers, timer)
        if when < self._far:
            heappush(self._timers, entry)
            return timer
        number = int(min(when * _SLICES, _LAST_SLICE))
        if number not in self._slices:
            self._slices[number] = []
            heappush(self._slice_numbers, number)
        self._slices[number].append(entry)
        self._num_far += 1
        return timer

    def _has_timer(self) -> bool:
        """If so, the heap's first is the next. An empty heap gets the timers of the next slice."""
        while self._slice_numbers and not self._timers:
            number = heappop(self._slice_numbers)
            self._timers += self._slices.pop(number)
            heapify(self._timers)
            self._num_far -= len(self._timers)
            self._far = (number + 1) / _SLICES
        return bool(self._timers)

    def _run_once(self) -> None:
        """One turn. If nothing else is to be done, the clock jumps to the next timer, and what it wakes is done."""
        ready, timers = self._ready, self._timers
        self._now += self._tick_s
        if is_idle := not ready:
            while (timers or self._has_timer()) and timers[0][2].callback is None:
                heappop(timers)
                self._num_cancelled -= 1
            if not timers:
                raise DeadlockError("every task waits for another")
            self._now = max(self._now, timers[0][0])
        now = self._now
        while (timers or self._has_timer()) and timers[0][0] <= now:
            timer = heappop(timers)[2]
            if timer.callback is None:
                self._num_cancelled -= 1
                continue
            timer.loop = None
            if is_idle:
                self._run(timer)
            else:
                ready.append(timer)
        for _ in range(len(ready)):
            self._run(ready.popleft())

    def _run(self, call: _LoopCall) -> None:
        callback, context = call.callback, call.context
        if callback is None:
            return  # cancelled since it went off
        try:
            if context is None:
                callback(*call.args)
            else:
                context.run(callback, *call.args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - as a handle's
            self.call_exception_handler({"message": f"{callback} raised", "exception": error})


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def virtual_loop() -> VirtualTimeLoop:
    """The loop that runs."""
    return cast(VirtualTimeLoop, asyncio.get_running_loop())


def run_in_virtual_time(main: Coroutine[Any, Any, T], tick_s: float = 0.0) -> T:
    """tick_s: how long each turn of the loop takes, so that a timer may go off between any two of them.

    Garbage is collected afterwards: there is little, and looking at all that a large schedule holds takes seconds.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(tick_s)) as runner:
            return runner.run(main)
    finally:
        if collects:
            gc.enable()

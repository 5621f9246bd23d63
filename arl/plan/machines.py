"""Cores in virtual time: processes that have their own, and processes that share those of one machine.

A process's seconds of work are counted on the clock of its machine, `now`. Where it has cores of its own, this is the
event loop's clock. Where processes want more cores than there are, the clock of the machine slows down for all of them:
with 3 busy processes on 2 cores, two seconds of work take three.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Protocol

from arl.plan.virtual_time import virtual_loop


class Cancellable(Protocol):
    def cancel(self) -> object: ...


class Machine(Protocol):
    """Where processes compute."""

    def now(self) -> float:
        """Seconds of work that a process could have done here so far."""
        ...

    def at(self, work_s: float, callback: Callable[[], object]) -> Cancellable:
        """Call back when `now` has come to `work_s`."""
        ...

    def use(self, cores: int) -> None:
        """Some processes begin to compute, or end (below 0), on this many cores."""
        ...


class OwnCores:
    """Processes here never wait for each other."""

    def __init__(self) -> None:
        self._loop = virtual_loop()

    def now(self) -> float:
        return self._loop.time()

    def at(self, work_s: float, callback: Callable[[], object]) -> Cancellable:
        return self._loop.do_at(work_s, callback)

    def use(self, cores: int) -> None:
        pass


class _DueCall:
    """A callback of a MachineWithCores."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class MachineWithCores:
    """Processes here share its cores: each gets the same part of those it wants."""

    def __init__(self, cores: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._cores = cores
        self._wanted = 0
        self._rate = 1.0
        self._looked_at = self._loop.time()
        self._work_s = 0.0
        """By `_looked_at`."""
        self._calls: list[tuple[float, int, _DueCall]] = []
        self._numbers = 0
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        return self._work_s + (self._loop.time() - self._looked_at) * self._rate

    def at(self, work_s: float, callback: Callable[[], object]) -> Cancellable:
        call = _DueCall(callback)
        self._numbers += 1
        heappush(self._calls, (work_s, self._numbers, call))
        if self._calls[0][2] is call:
            self._set_timer()
        return call

    def use(self, cores: int) -> None:
        self._work_s, self._looked_at = self.now(), self._loop.time()
        self._wanted += cores
        rate = min(1.0, self._cores / self._wanted) if self._wanted > 0 else 1.0
        if rate != self._rate:
            self._rate = rate
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = None
        if self._calls:
            wait_s = max(self._calls[0][0] - self.now(), 0.0) / self._rate
            self._timer = self._loop.call_later(wait_s, self._run)

    def _run(self) -> None:
        self._timer = None
        now = self.now() + 1e-9  # the loop's clock may be a rounding error early
        while self._calls and self._calls[0][0] <= now:
            callback = heappop(self._calls)[2].callback
            if callback is not None:
                callback()
        if self._timer is None:
            self._set_timer()


class Processor:
    """A process with cores of its own. It does one thing at a time, in the order of asking."""

    def __init__(self) -> None:
        self._loop = virtual_loop()
        self._free_at = 0.0
        self._given_s = 0.0

    def busy_s(self) -> float:
        """Seconds, by the loop's clock, in which it has computed."""
        return self._given_s - max(self._free_at - self._loop.time(), 0.0)

    def do(self, seconds: float, callback: Callable[[], object], delay_s: float = 0.0) -> None:
        """Do so much, after all that it was given before, and call back `delay_s` later. 0 waits for nothing else."""
        if seconds <= 0:
            return self._call_later(delay_s, callback)
        self._given_s += seconds
        self._free_at = max(self._free_at, self._loop.time()) + seconds
        self._loop.do_at(self._free_at + delay_s, callback)

    async def work(self, seconds: float) -> None:
        """Wait until it has done so much."""
        if seconds > 0:
            done: asyncio.Future[None] = self._loop.create_future()
            self.do(seconds, lambda: done.done() or done.set_result(None))
            await done

    def _call_later(self, delay_s: float, callback: Callable[[], object]) -> None:
        if delay_s:
            self._loop.do_at(self._loop.time() + delay_s, callback)
        else:
            callback()


class SharingProcessor(Processor):
    """A process that shares the cores of a machine. cores: how many it uses while it computes."""

    def __init__(self, machine: Machine, cores: int = 1) -> None:
        super().__init__()
        self._machine = machine
        self._cores = cores
        self._free_at = -inf
        """By the machine's clock."""
        self._busy_s, self._busy_since = 0.0, inf

    def busy_s(self) -> float:
        return self._busy_s + max(self._loop.time() - self._busy_since, 0.0)

    def do(self, seconds: float, callback: Callable[[], object], delay_s: float = 0.0) -> None:
        if seconds <= 0:
            return self._call_later(delay_s, callback)
        now = self._machine.now()
        if self._free_at <= now:
            self._machine.use(self._cores)
            self._free_at, self._busy_since = now, self._loop.time()
        self._free_at += seconds
        until = self._free_at

        def end() -> None:
            if self._free_at == until:
                self._busy_s = self.busy_s()
                self._free_at, self._busy_since = -inf, inf
                self._machine.use(-self._cores)
            self._call_later(delay_s, callback)

        self._machine.at(until, end)

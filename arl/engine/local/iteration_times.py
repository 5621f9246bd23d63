"""How long the model thread's iterations took, summed by how many requests they decoded: for the event log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_FIELDS = ("number", "decoded", "context", "prompt", "begun", "seconds")


class IterationTimes:
    """Sums since the server began. Use it on the model thread.

    is_alone: the model computes on the CPU with one thread, whose CPU seconds are counted, as other processes do not
    change these much. Otherwise seconds are those of the clock.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self.clock: Callable[[], float] = time.thread_time if is_alone else time.perf_counter
        self._is_alone = is_alone
        self._sums: dict[tuple[int, bool], list[float]] = {}
        """(bit length of the number of decoded requests, whether prompts were read) -> the sums of _FIELDS."""

    def add(self, decoded: int, context: int, prompt: int, begun: int, seconds: float) -> None:
        """Count an iteration. context: tokens that the decoded requests held. begun: requests that got their first
        token."""
        key = decoded.bit_length(), prompt > 0 or begun > 0
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = [0.0] * len(_FIELDS)
        for i, value in enumerate((1, decoded, context, prompt, begun, seconds)):
            sums[i] += value

    def report(self) -> dict[str, Any]:
        """The sums, in the form that arl.api.events.ServerWorked reads."""
        rows = [[reads, *self._sums[bits, reads]] for bits, reads in sorted(self._sums)]
        return {"is_cpu_time": self._is_alone, "iterations": rows}

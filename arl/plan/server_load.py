"""What one server had to do at each time of a run, from the turns that it answered: the measurements of its costs.

turns --> when each ran --> cells between the changes --> integrals over the cells --> a row for each turn, and slice

Inside a cell as many requests run all the time. All times of the measurements are seconds in which the server could
compute: pauses do not count, nor, where the log knows the CPU time of its process, time in which it did not compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

Span = tuple[float, float]
CpuTimes = tuple[np.ndarray, np.ndarray]
"""Times, and the CPU seconds that a process had used until then."""


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredRequests:
    """The requests of one server, in order of their arrival. Arrays [N]."""

    begun: np.ndarray
    """When each was sent."""
    ended: np.ndarray
    prompt: np.ndarray
    computed: np.ndarray
    """Prompt tokens that were not cached."""
    output: np.ndarray
    is_whole: np.ndarray
    """It was answered at its first sending, so that its time says something about the costs. Others are load alone."""


COLUMNS = ("iterations", "samples", "context", "prompts", "reads", "requests")
"""What a server did in some time: iterations that decoded; the tokens that they sampled; the sum over the iterations of
the tokens that all requests held; prompt tokens computed; iterations that computed some; requests begun, each of which
gets its first token with its prompt."""
_SLICES, _SLICE = (80, 800), 0.5
"""How many parts the run is cut into, at least and at most, and which share of a request's time a part lasts: in longer
ones, the requests that ran at once would be means of many and few."""
_WAIT = 1.0
"""Iterations in the time of a request that sample none of its tokens: it waits for the end of one, and in that which
reads its prompt others get theirs. Not all of them are whole."""
_SHORTEST_S = 1e-4
"""Shorter times of a request say nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Measurements:
    """Seconds in which one server could compute, and what it did in them, in the order of COLUMNS."""

    turns: tuple[np.ndarray, np.ndarray]
    """[N], [N, 6]: of the time of each request that says something."""
    slices: tuple[np.ndarray, np.ndarray]
    """[M], [M, 6]: of equal parts of the whole time in which it had requests."""
    running: np.ndarray
    """[M] AnsweredRequests that ran at once, in each part."""
    most_context: float
    """Tokens that all running requests held at once."""


class ServerLoad:
    """The requests of one server over a run.

    pauses: when it stood still. used: times, and the CPU seconds of its process until then, if it computes on the CPU
    with one thread. most_running: requests that it runs at once. chunk: most prompt tokens in an iteration.
    """

    def __init__(
        self, requests: AnsweredRequests, pauses: list[Span], used: CpuTimes | None, most_running: int, chunk: int
    ) -> None:
        self._requests = requests
        self._most_running = most_running
        self._chunk = chunk
        started = _started(requests, most_running)
        self._cells = _Cells.of(started, requests.ended, pauses, used)
        self._first, self._last = self._cells.place(started), self._cells.place(requests.ended)
        self._running = self._cells.sums(self._first, self._last, np.ones(len(started)))
        self._lasted = self._cells.lasted(self._cells.clock, self._first, self._last)
        self._arrived = self._arrivals()

    def measured(self, found: np.ndarray | None = None) -> Measurements:
        """found: seconds for each of COLUMNS, as an earlier measurement gave them. They say when, in the time of a
        request, its iterations were: not while prompts were read, and fewer while many requests ran."""
        requests, cells, first, last = self._requests, self._cells, self._first, self._last
        worked = np.diff(cells.clock)
        seconds, at_once, arrived = worked, np.array([]), self._arrived
        read = np.array([_integral(one) for one in arrived.T])
        if found is not None:
            reading_s = arrived @ found[3:]
            spent = _backlog(reading_s, worked)
            seconds = worked - spent
            if reading_s.any():  # what waits when a request comes is read in its time, too
                read = np.array([np.interp(_integral(spent), _integral(reading_s), one) for one in read])
            at_once = found[0] + found[1] * self._running + found[2] * self._held(cells.clock)
        pace = _integral(seconds / np.maximum(at_once, 1e-9) if len(at_once) and (at_once > 0).all() else seconds)
        rate = self._rate(pace)
        steps = _quotient(cells.sums(first, last, rate), cells.sums(first, last, (rate > 0).astype(float)))
        iterations = steps * np.diff(pace)
        per_cell = [iterations, iterations * self._running, iterations * self._held(pace)]
        done = np.array([*map(_integral, per_cell), *read])
        own = (requests.is_whole & (requests.output > 0) & (self._lasted > _SHORTEST_S)).nonzero()[0]
        columns = (done[:, last[own]] - done[:, first[own]]).T
        columns[:, 0] = requests.output[own] - 1 + _WAIT  # exactly
        num_slices = int(np.clip(cells.clock[-1] / (_SLICE * np.median(self._lasted)), *_SLICES))
        parts = np.linspace(0.0, cells.clock[-1], num_slices + 1)
        sliced = np.diff([np.interp(parts, cells.clock, one) for one in done]).T
        return Measurements(
            turns=(self._lasted[own], columns),
            slices=(np.diff(parts), sliced),
            running=np.minimum(_quotient(sliced[:, 1], sliced[:, 0]), self._most_running),
            most_context=float(self._held(pace).max(initial=0.0)),
        )

    def _rate(self, pace: np.ndarray) -> np.ndarray:
        """[N] Iterations of each request by this clock. The first token comes with the prompt. Requests of one token,
        and those that were cut, tell of no iterations: 0."""
        lasted = self._cells.lasted(pace, self._first, self._last)
        tokens = np.where(self._requests.output > 1, self._requests.output - 1 + _WAIT, 0)
        return np.where((self._lasted > _SHORTEST_S) & (lasted > 1e-3 * pace[-1] / len(pace)), tokens / lasted, 0.0)

    def _held(self, pace: np.ndarray) -> np.ndarray:
        """[M] The tokens of all that run: those of the prompts, and as many more as they have sampled."""
        rate, cells = self._rate(pace), self._cells
        at_start = cells.sums(self._first, self._last, self._requests.prompt - rate * pace[self._first])
        return at_start + cells.sums(self._first, self._last, rate) * (pace[1:] + pace[:-1]) / 2

    def _arrivals(self) -> np.ndarray:
        """[M, 3] Prompt tokens, iterations that read them, and requests, of those that begin with each cell."""
        rate = self._rate(self._cells.clock)
        iteration_s = 1.0 / np.maximum(np.median(rate[rate > 0]) if (rate > 0).any() else 1.0, 1.0)
        computed = self._requests.computed
        reads = _reads(self._cells.clock[self._first], computed, iteration_s, self._chunk)
        values = (computed, reads, np.ones(len(computed)))
        num_cells = len(self._running)
        return np.array([np.bincount(self._first, one, num_cells)[:num_cells] for one in values]).T


def _backlog(arriving: np.ndarray, worked: np.ndarray) -> np.ndarray:
    """[M] What of each cell's time is spent on work that arrived at its beginning, or earlier and is not done yet."""
    spent, left = np.zeros(len(worked)), 0.0
    for i, (new, room) in enumerate(zip(arriving.tolist(), worked.tolist(), strict=True)):
        left += new
        spent[i] = min(left, room)
        left -= spent[i]
    return spent


def _started(requests: AnsweredRequests, most_running: int) -> np.ndarray:
    """When each request left the server's queue: there are places for most_running."""
    started, ends = requests.begun.copy(), list[float]()
    for i, (begun, ended) in enumerate(zip(requests.begun.tolist(), requests.ended.tolist(), strict=True)):
        while ends and ends[0] <= begun:
            heappop(ends)
        if len(ends) >= most_running:
            started[i] = min(max(begun, heappop(ends)), ended)
        heappush(ends, ended)
    return started


@dataclass(frozen=True, slots=True, eq=False)
class _Cells:
    edges: np.ndarray
    """[M + 1] Times."""
    clock: np.ndarray
    """[M + 1] Seconds of work until then."""

    @classmethod
    def of(cls, started: np.ndarray, ended: np.ndarray, pauses: list[Span], used: CpuTimes | None) -> _Cells:
        times = [started, ended, np.array(pauses).reshape(-1)]
        edges = np.unique(np.concatenate([*times, *([] if used is None else [used[0]])]))
        width, middle = np.diff(edges), (edges[1:] + edges[:-1]) / 2
        is_busy = np.searchsorted(np.sort(started), middle) > np.searchsorted(np.sort(ended), middle)
        for begin, end in pauses:
            is_busy &= ~((begin <= middle) & (middle < end))
        busy = width * is_busy
        if used is not None:
            busy *= _shares(busy, middle, *used)
        return cls(edges, _integral(busy))

    def place(self, times: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.edges, times)

    def lasted(self, clock: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        return np.maximum(clock[last] - clock[first], 1e-12)

    def sums(self, first: np.ndarray, last: np.ndarray, values: np.ndarray) -> np.ndarray:
        """[M] For each cell, the sum of the values of the requests that run in it."""
        changes = np.bincount(first, values, len(self.edges)) - np.bincount(last, values, len(self.edges))
        return changes.cumsum()[:-1]


def _shares(busy: np.ndarray, middle: np.ndarray, times: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The share of each cell in which the process computed: the same between two readings of its CPU time."""
    window = np.searchsorted(times, middle)
    lasted = np.bincount(window, busy, len(times) + 1)
    spent = np.concatenate([[0.0], np.diff(seconds), [0.0]])
    shares = np.minimum(np.divide(spent, lasted, out=np.ones_like(lasted), where=lasted > 0), 1.0)
    inside = shares[1:-1][lasted[1:-1] > 0]
    shares[[0, -1]] = np.median(inside) if len(inside) else 1.0
    return shares[window]


def _reads(clock: np.ndarray, computed: np.ndarray, iteration_s: float, chunk: int) -> np.ndarray:
    """[N] The iterations that begin to read prompts with each request. What comes within an iteration goes together."""
    reads, until = np.zeros(len(clock)), -np.inf
    for i in np.argsort(clock, kind="stable"):
        if computed[i] > 0:
            reads[i] = float(clock[i] > until) + computed[i] // chunk
            until = clock[i] + iteration_s if clock[i] > until else until
    return reads


def _quotient(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """0 where there is nothing to divide by."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0.5)


def _integral(values: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], values.cumsum()])

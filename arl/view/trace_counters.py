"""Numbers over a run's time, for its trace: rewards, staleness, what runs and what waits."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from arl.api import events
from arl.api.events import Event, TurnEnded
from arl.eventlog.records import EpisodeRecord
from arl.eventlog.run_record import RunRecord

Count = tuple[float, str, dict[str, float]]
"""(seconds since 1970, name, values)"""

_METRICS = {
    "reward": {"reward": "reward"},
    "staleness": {"mean": "staleness/mean", "max": "staleness/max"},
    "episodes per second": {"episodes": "samples_per_s"},
}
"""Counter -> its values -> metrics of a step."""


def counters(run: RunRecord, shown: Sequence[EpisodeRecord], window: tuple[float, float]) -> Iterator[Count]:
    """Each counter in the order of time. shown: the episodes that count as running."""
    first, last = window
    for count in (*_of_steps(run), *_of_groups(run), *_of_episodes(shown)):
        if first <= count[0] <= last:
            yield count


def _of_steps(run: RunRecord) -> Iterator[Count]:
    rows = {row["version"]: row for row in run.steps}
    for _, record in run.system:
        match record:
            case events.BatchTrained() if record.version in rows:
                for name, metrics in _METRICS.items():
                    known = {key: _number(rows[record.version].get(metric)) for key, metric in metrics.items()}
                    if values := {key: value for key, value in known.items() if value is not None}:
                        yield record.t, name, values
            case events.EvaluationEnded() if math.isfinite(record.reward):
                yield record.t, "held-out reward", {"reward": record.reward}
            case _:
                pass


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _of_groups(run: RunRecord) -> Iterator[Count]:
    """Groups whose episodes run, and finished ones that wait to be taken. A life's end empties both."""
    changes: list[tuple[float, int, int]] = []
    ends = {life: began.t for life, began in run.lives.items()}
    for group in run.groups:
        over = min((t for life, t in ends.items() if life > group.life), default=math.inf)
        ended = min(math.inf if group.ended is None else group.ended, over)
        changes += [(group.admitted, 1, 0), (ended, -1, 0)]
        if group.outcome == "kept" and ended < over:
            changes += [(ended, 0, 1), (max(ended, math.inf if group.taken is None else group.taken), 0, -1)]
    for t, running, waiting in _summed(changes):
        yield t, "groups", {"running": running, "waiting to be trained": waiting}


def _of_episodes(shown: Sequence[EpisodeRecord]) -> Iterator[Count]:
    changes = [(episode.began, 1, 0) for episode in shown]
    changes += [(episode.ended, -1, 0) for episode in shown if episode.ended is not None]
    for t, running, _ in _summed(changes):
        yield t, "episodes running", {"episodes": running}


def _summed(changes: Iterable[tuple[float, int, int]]) -> Iterator[tuple[float, int, int]]:
    """(time, sums from then on), finite times alone."""
    first = second = 0
    for t, at_once in groupby(sorted(changes), key=lambda change: change[0]):
        if math.isfinite(t):
            for _, a, b in at_once:
                first, second = first + a, second + b
            yield t, first, second


class Requests:
    """How many requests each server had at once, on average over each bin of `width_s` seconds."""

    def __init__(self, width_s: float = 1.0) -> None:
        self._width_s = width_s
        self._changes: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
        """Server -> bin -> the increase of the average over the bin before."""

    def counted(self, calls: Iterable[Event]) -> Iterator[Event]:
        """The same calls; turns are counted on the way."""
        for call in calls:
            if isinstance(call, TurnEnded) and call.server:
                stop = call.t / self._width_s
                start = (call.t - max(call.seconds - call.queued_s, 0.0)) / self._width_s
                if math.isfinite(start) and math.isfinite(stop):
                    self._add(call.server, start, 1.0)
                    self._add(call.server, stop, -1.0)
            yield call

    def found(self) -> Iterator[tuple[float, str, float]]:
        """(start of the bin in seconds, server, requests), where the number changes."""
        for server, changes in sorted(self._changes.items()):
            number = 0.0
            for place in sorted(changes):
                number += changes[place]
                if abs(changes[place]) > 1e-9:
                    yield place * self._width_s, server, round(max(number, 0.0), 3)

    def _add(self, server: str, at: float, sign: float) -> None:
        place = math.floor(at)
        part = 1.0 - (at - place)
        self._changes[server][place] += sign * part
        self._changes[server][place + 1] += sign * (1.0 - part)

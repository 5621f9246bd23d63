"""What the rules of `arl.view.findings` look at in a run: its first and its last steps, and what all steps say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from arl.eventlog.run_record import RunRecord
from arl.view.episode_table import Row, mean

_FIRST, _LAST = 5, 20
"""Steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """The best and the last of the mean rewards of some ten steps, or up to fifty in a long run."""

    best: float
    steps: str
    """Those of `best`."""
    now: float
    error: float
    """The standard error of best - now, from how much rewards differ from step to step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """A run, read once. Numbers that are not known are None."""

    record: RunRecord
    rows: list[Row]
    """The metrics of all steps."""
    first: list[Row]
    last: list[Row]
    low: float
    high: float
    """The lowest and the highest reward of an episode, in all steps. Both are 0 if they are not known."""
    before: float | None
    now: float | None
    """The mean reward of the first and of the last steps."""
    fall: Fall | None
    """None in a short run."""

    @property
    def range(self) -> float:
        return self.high - self.low

    @property
    def is_solved(self) -> bool:
        """Whether nearly all episodes of the last steps had the highest reward of the run, and others once had not."""
        return self.now is not None and self.range > 0 and self.now >= self.low + 0.9 * self.range

    def is_much(self, difference: float, error: float) -> bool:
        """Whether it is a fifth of the range of rewards, and more than its standard error explains."""
        return self.range > 0 and difference >= max(0.2 * self.range, 4 * error)

    def setting(self, *path: str) -> Any:
        """Of the last life; None if there is none."""
        found: Any = self.record.settings
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return found


def digest_of(record: RunRecord) -> Digest:
    rows = record.steps
    first, last = rows[:_FIRST], rows[-_LAST:]
    return Digest(
        record=record,
        rows=rows,
        first=first,
        last=last,
        low=min(values(rows, "reward_min"), default=0.0),
        high=max(values(rows, "reward_max"), default=0.0),
        before=mean_of(first, "reward"),
        now=mean_of(last, "reward"),
        fall=_fall(rows),
    )


def number(value: object) -> float | None:
    """None for what is not a finite number."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:  # an integer that no float holds
        return None


def values(rows: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    """Those that are finite numbers."""
    return [value for row in rows if (value := number(row.get(metric))) is not None]


def mean_of(rows: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    found = values(rows, metric)
    return mean(found) if found else None


def _fall(rows: Sequence[Row]) -> Fall | None:
    """More steps in a long run: the best of very many short windows is luck."""
    known = [(row["version"], reward) for row in rows if (reward := number(row.get("reward"))) is not None]
    size = min(max(len(known) // 10, 10), 50)
    if len(known) < 2 * size:
        return None
    rewards = [reward for _, reward in known]
    sums = list(accumulate(rewards, initial=0.0))
    best = max(range(len(known) - size + 1), key=lambda k: sums[k + size] - sums[k])
    then, now = rewards[best : best + size], rewards[-size:]
    return Fall(
        best=mean(then),
        steps=f"steps {known[best][0]} to {known[best + size - 1][0]}",
        now=mean(now),
        error=math.sqrt((_variance(then) + _variance(now)) / size),
    )


def _variance(found: Sequence[float]) -> float:
    centre = mean(found)
    return mean((value - centre) * (value - centre) for value in found)

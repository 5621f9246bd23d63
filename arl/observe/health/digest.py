"""What `arl.observe.health.rules` read of a run: its first and last steps, and numbers over all steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

_FIRST, _LAST, _NOW = 5, 20, 5
"""Steps."""
LATE = 50
"""Late steps that are kept whole."""
_SOLVED = 0.9
"""Of the range of rewards. Nine of ten episodes have the highest one, where there are two rewards."""

Row = Mapping[str, Any]
"""A line of metrics.jsonl or evaluations.jsonl. It may lack anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """The best and the last of the mean rewards of some ten steps, or up to fifty in a long run."""

    best: float
    steps: str
    """The steps of `best`."""
    now: float
    error: float
    """The standard error of best - now, from how much rewards differ from step to step."""


class Digest:
    """A run, each step read once, as it comes. Numbers that are not known are None."""

    def __init__(self, settings: Any = None, steps: Iterable[Row] = (), evaluations: Iterable[Row] = ()) -> None:
        """settings: of the last life, section by section; anything else is taken for none."""
        self._settings = settings
        self.first: list[Row] = []
        self.late: deque[Row] = deque(maxlen=LATE)
        self.num_steps = 0
        self.evaluations = list(evaluations)
        self._versions: list[Any] = []
        self._rewards: list[float] = []
        self._lows: float | None = None
        self._highs: float | None = None
        for row in steps:
            self.add(row)

    def add(self, row: Row) -> None:
        """A step's metrics."""
        self.num_steps += 1
        self.late.append(row)
        if len(self.first) < _FIRST:
            self.first.append(row)
        reward, low, high = (number(row.get(name)) for name in ("reward", "reward_min", "reward_max"))
        if reward is not None:
            self._versions.append(row["version"])
            self._rewards.append(reward)
        if low is not None:
            self._lows = low if self._lows is None else min(low, self._lows)
        if high is not None:
            self._highs = high if self._highs is None else max(high, self._highs)

    @property
    def last(self) -> list[Row]:
        return list(self.late)[-_LAST:]

    @property
    def low(self) -> float:
        """The lowest reward of an episode, in all steps; 0 if it is not known."""
        return self._lows or 0.0

    @property
    def high(self) -> float:
        return self._highs or 0.0

    @property
    def range(self) -> float:
        return self.high - self.low

    @property
    def before(self) -> float | None:
        """The mean reward of the first steps."""
        return mean_of(self.first, "reward")

    @property
    def now(self) -> float | None:
        """The mean reward of the last steps."""
        return mean_of(self.last, "reward")

    @property
    def level(self) -> float:
        """Where in the range of rewards the last steps are: 0 at the lowest one, 1 at the highest, 0 without a range.

        The mean of the last few of them counts, if it is higher: a task may be solved in less time.
        """
        known = [one for steps in (self.last, self.last[-_NOW:]) if (one := mean_of(steps, "reward")) is not None]
        return (max(known) - self.low) / self.range if known and self.range > 0 else 0.0

    @property
    def is_solved(self) -> bool:
        """Whether nearly all episodes of the last steps had the highest reward of the run, and others once had not."""
        return self.level >= _SOLVED

    @property
    def fall(self) -> Fall | None:
        """None in a short run. In a long run of more steps: the best of very many short windows is luck."""
        rewards, size = self._rewards, min(max(len(self._rewards) // 10, 10), 50)
        if len(rewards) < 2 * size:
            return None
        sums = list(accumulate(rewards, initial=0.0))
        best = max(range(len(rewards) - size + 1), key=lambda k: sums[k + size] - sums[k])
        then, now = rewards[best : best + size], rewards[-size:]
        return Fall(
            best=mean(then),
            steps=f"steps {self._versions[best]} to {self._versions[best + size - 1]}",
            now=mean(now),
            error=math.sqrt((_variance(then) + _variance(now)) / size),
        )

    def is_much(self, difference: float, error: float) -> bool:
        """Whether it is a fifth of the range of rewards, and more than its standard error explains."""
        return self.range > 0 and difference >= max(0.2 * self.range, 4 * error)

    def setting(self, *path: str) -> Any:
        """None if there is none."""
        found: Any = self._settings
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return found


def number(value: object) -> float | None:
    """None for what is not a finite number."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:  # an integer that no float holds
        return None


def values(rows: Iterable[Row], metric: str) -> list[float]:
    """The values that are finite numbers."""
    return [value for row in rows if (value := number(row.get(metric))) is not None]


def mean_of(rows: Iterable[Row], metric: str) -> float | None:
    found = values(rows, metric)
    return mean(found) if found else None


def mean(found: Iterable[float]) -> float:
    """The mean of at least one value. Infinite where statistics.fmean raises OverflowError."""
    listed = list(found)
    return sum(listed) / len(listed)


def _variance(found: Sequence[float]) -> float:
    centre = mean(found)
    return mean((value - centre) * (value - centre) for value in found)

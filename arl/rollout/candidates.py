"""Candidates for experiment trackers: trajectories and failed episodes, with their examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arl.api.types import Trajectory

_MOST = 16
"""The most classes of errors that are distinguished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A trajectory, or a failed episode, that trackers may get."""

    name: str
    """The episode's name in the event log."""
    example_id: tuple[int, int]
    """(epoch, index in the dataset); of a held-out one (0, index in eval_dataset)."""
    task: str = ""
    """The name of its task; "" in a run without tasks."""
    example: Mapping[str, Any]
    """The example, in the form of `report.shown`."""
    group_id: int | None = None
    """None for a held-out one."""
    index: int = 0
    """The episode's index in its group."""
    trajectory: Trajectory | None
    """For a failed episode: what the model last saw and said; None if it said nothing."""
    advantage: float | None = None
    distance: float = 0.0
    """Between its reward and the mean of its group and role."""
    error: str = ""
    """For a failed episode: `CLASS: message`."""


class FirstFailures:
    """The first failed episode of each class of error since the last `take`."""

    def __init__(self) -> None:
        self._first: dict[str, Candidate] = {}

    def note(self, failed: Candidate) -> None:
        if len(self._first) < _MOST:
            self._first.setdefault(failed.error.partition(":")[0], failed)

    def take(self) -> list[Candidate]:
        taken, self._first = self._first, {}
        return [*taken.values()]

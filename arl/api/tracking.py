"""Trackers show a run in another tool, such as Weights & Biases. Users write their own by subclassing Tracker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from arl.api.types import Evaluation, StepStats


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run that begins or continues, as a tracker gets it."""

    run_dir: Path
    settings: Mapping[str, Any]
    """All settings, section by section, as JSON values. Keys, passwords and users in URLs are masked."""
    version: int = 0
    """The version that the run continues from; 0 for a new run. The next step leads to version + 1."""
    run_id: str | None = None
    """The value that `open` returned when it was last called in this run_dir. None if it was not called, or returned
    None."""

    @property
    def name(self) -> str:
        """The name of run_dir."""
        return self.run_dir.absolute().name

    @property
    def flat_settings(self) -> dict[str, Any]:
        """The settings by their dotted names, as on the command line."""
        return dict(_flat(self.settings, ""))


def _flat(settings: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            yield prefix + name, value


EXPECTED = ("answer", "expected", "expected_answer", "ground_truth", "solution", "target", "reference", "label")
"""Names of the column that holds an example's expected answer: the first of these that it has."""


def expected_column(example: Mapping[str, Any]) -> str | None:
    return next((name for name in EXPECTED if name in example), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedTrajectory:
    """A trajectory of a step or an evaluation, or a failed episode, as trackers show it."""

    why: str
    """Why it was chosen: highest reward, lowest reward, longest, least like its group, any, failed."""
    name: str
    """The episode's name in the event log and `arl view`."""
    example_id: tuple[int, int]
    """(epoch, index in the dataset); of a held-out one (0, index in eval_dataset)."""
    group_id: int | None
    """None for a held-out one."""
    episode: int
    """The episode's index in its group."""
    role: str
    """Empty for a failed episode in which the model said nothing."""
    reward: float | None
    """Outcome and process rewards; None for a failed episode."""
    rewards: Mapping[str, float]
    """The named parts of the reward."""
    metrics: Mapping[str, float]
    """The workflow's."""
    advantage: float | None
    """The mean over its trained tokens; None without trained tokens."""
    num_tokens: int
    num_trained_tokens: int
    oldest_version: int | None
    """The smallest policy version among its trained tokens; None without trained tokens."""
    newest_version: int | None
    is_truncated: bool
    error: str
    """For a failed episode `CLASS: message`, else empty."""
    example: Mapping[str, Any]
    """The example's columns as JSON values: 2,000 characters of each, and some 20,000 of all."""
    expected: str
    """The expected answer: the column `answer`, or else the first that it has of EXPECTED; empty without one."""
    task: str = ""
    """The name of its task; "" in a run without tasks, and for a held-out one."""
    text: str
    """All its tokens, decoded; of a failed episode, what the model last saw and said. Empty without a tokenizer."""


class Tracker(ABC):
    """Shows a run in another tool. All calls of a tracker are made on its own thread, one after another.

    It cannot stop a run or make it wait: its first exception is logged, further ones are counted, and a tracker whose
    `open` fails is left out. Records that come while a call hangs are dropped once 256 wait.
    """

    def open(self, run: TrackedRun) -> str | None:
        """Called once, first. Returns what `run.run_id` will be when the run continues in the same run_dir.

        A continued run may repeat steps that the tracker has already: those after run.version.
        """
        return None

    @abstractmethod
    def step(self, stats: StepStats, trajectories: Sequence[TrackedTrajectory]) -> None:
        """Called after each step. trajectories: in the first step, and every tenth after it, some of the step's, and
        some episodes that failed since the last of these steps."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """Called after each evaluation. Its version may be older than the last step's."""
        return None

    def held_out(self, evaluation: Evaluation, trajectories: Sequence[TrackedTrajectory]) -> None:
        """Called after `evaluation`. trajectories: some of its trajectories, and of its failed episodes."""
        return None

    def close(self, error: str | None) -> None:
        """Called once, last. error: what ended the run, such as "CancelledError"; None if it ended as it should."""
        return None

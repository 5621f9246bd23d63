"""A ready-made tracker in a process of its own, where its package may import, patch and hang as it likes.

These packages take over sys.excepthook and sys.exit, wait in atexit hooks, print, and read their directories from
variables when they are imported. None of that reaches the run's process, which hands over records alone.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from arl.api.errors import EngineClosedError, TrainingError
from arl.api.tracker_config import TrackerConfig
from arl.api.tracking import TrackedRun, TrackedTrajectory, Tracker
from arl.api.types import Evaluation, StepStats
from arl.object_process import ObjectProcess
from arl.tracking.ready_made import environment, ready_made

_NICENESS = 10
"""Training and episodes come first."""


class TrackerError(Exception):
    """A call of a tracker failed, in its process or with it."""


class TrackerProcess(Tracker):
    """Calls block, and raise TrackerError. The process ends with this one, or when `kill` is called."""

    def __init__(self, config: TrackerConfig) -> None:
        self._config = config
        self._process: ObjectProcess | None = None
        self._log = Path()
        self._is_over = False

    def open(self, run: TrackedRun) -> str | None:
        self._log = run.run_dir / "logs" / f"tracker-{self._config.kind}.log"
        variables = environment(self._config, run.run_dir, os.environ)
        hosted = partial(HostedTracker, self._config)
        self._process = ObjectProcess(f"the tracker {self._config.kind}", hosted, self._log, variables)
        if self._is_over:
            self.kill()
        try:
            return self._call("open", run)
        except TrackerError:
            self.kill()
            raise

    def step(self, stats: StepStats, trajectories: Sequence[TrackedTrajectory]) -> None:
        self._call("step", stats, trajectories)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._call("evaluation", evaluation)

    def held_out(self, evaluation: Evaluation, trajectories: Sequence[TrackedTrajectory]) -> None:
        self._call("held_out", evaluation, trajectories)

    def close(self, error: str | None) -> None:
        try:
            self._call("close", error)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the process at once, from any thread. Idempotent."""
        self._is_over = True
        if self._process is not None:
            self._process.kill()

    def whereabouts(self) -> str:
        """Where the tracker is, for a log line."""
        return "the start of its process" if self._process is None else self._process.whereabouts()

    def _call(self, method: str, *args: Any) -> Any:
        if self._process is None:
            raise TrackerError("it was not opened")
        try:
            return self._process.call("make", method, *args)
        except (TrainingError, EngineClosedError):
            raise TrackerError(f"its process has ended; see {self._log}") from None


class HostedTracker:
    """The process's side."""

    def __init__(self, config: TrackerConfig) -> None:
        os.nice(_NICENESS)
        self._tracker = ready_made(config)

    def make(self, method: str, *args: Any) -> Any:
        """Make a call. Raises TrackerError: the package's own errors need not be importable for the caller."""
        try:
            return getattr(self._tracker, method)(*args)
        except BaseException as error:  # noqa: BLE001 - a package's own code; the caller gets it
            traceback.print_exc()
            raise TrackerError(failure(error)) from None


def failure(error: BaseException) -> str:
    """One line that says what happened, and where."""
    if isinstance(error, TrackerError):
        return str(error)
    said = " ".join(f"{type(error).__name__}: {error}".split())
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    return said[:500] + (f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else "")

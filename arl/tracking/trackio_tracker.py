"""trackio. A continued run is trackio's run of the same name; steps that come again are drawn again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from arl.api.tracker_config import TrackioConfig
from arl.api.tracking import TrackedRun, TrackedTrajectory, Tracker
from arl.api.types import Evaluation, StepStats, new_id
from arl.tracking.rows import COLUMNS, evaluation_metrics, rows


def is_local(config: TrackioConfig, variables: Mapping[str, str]) -> bool:
    """Whether the run stays on this machine. variables: of the process."""
    return not (config.space_id or variables.get("TRACKIO_SPACE_ID") or variables.get("TRACKIO_SERVER_URL"))


class TrackioTracker(Tracker):
    """Needs $TRACKIO_DIR before trackio is imported; see `environment`."""

    def __init__(self, config: TrackioConfig) -> None:
        self._config = config

    def open(self, run: TrackedRun) -> str:
        import trackio

        self._table = trackio.Table
        name = run.run_id or self._new_name(run)
        self._run = trackio.init(
            self._config.project,
            name=name,
            group=self._config.group,
            space_id=self._config.space_id,
            config=run.flat_settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return name

    def _new_name(self, run: TrackedRun) -> str:
        """trackio finds a run by its name, which must be this run's alone where other runs go, too."""
        name = self._config.name or run.name
        is_alone = self._config.directory is None and is_local(self._config, os.environ)
        return name if is_alone else f"{name}-{new_id()[:6]}"

    def step(self, stats: StepStats, trajectories: Sequence[TrackedTrajectory]) -> None:
        shown: dict[str, Any] = dict(stats.metrics)
        if trajectories:
            shown["trajectories"] = self._table([*COLUMNS], rows(stats.version, trajectories))
        self._run.log(shown, step=stats.version)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._run.log(evaluation_metrics(evaluation), step=evaluation.version)

    def held_out(self, evaluation: Evaluation, trajectories: Sequence[TrackedTrajectory]) -> None:
        table = self._table([*COLUMNS], rows(evaluation.version, trajectories))
        self._run.log({"held_out": table}, step=evaluation.version)

    def close(self, error: str | None) -> None:
        self._run.finish()

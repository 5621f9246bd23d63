"""MLflow. A continued run is the same run there; it keeps all values of steps that come again."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from arl.api.tracker_config import MLflowConfig
from arl.api.tracking import TrackedRun, TrackedTrajectory, Tracker
from arl.api.types import Evaluation, StepStats
from arl.tracking.rows import COLUMNS, evaluation_metrics, rows

_MOST_PARAMS, _MOST_LETTERS = 100, 500
"""Of one request, and of one value."""
_LONGEST_NAME = 250
_UNKNOWN = "RESOURCE_DOES_NOT_EXIST"


class MLflowTracker(Tracker):
    """Uses MLflow's client alone, without the "active run" that it keeps for a whole process."""

    def __init__(self, config: MLflowConfig) -> None:
        self._config = config

    def open(self, run: TrackedRun) -> str:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports] - an extra

        directory = (run.run_dir / "mlflow").absolute()
        address = self._config.address or os.environ.get("MLFLOW_TRACKING_URI")
        if address is None:
            directory.mkdir(parents=True, exist_ok=True)
        self._client: Any = MlflowClient(tracking_uri=address or f"sqlite:///{directory}/mlflow.db")
        if run.run_id is None or not self._continues(run.run_id):
            self._begin(run, None if address else (directory / "artifacts").as_uri())
        self._client.log_dict(self._run_id, dict(run.settings), "settings.json")
        return self._run_id

    def _continues(self, run_id: str) -> bool:
        """Whether the run is known there; if so, it runs again."""
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports] - an extra

        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != _UNKNOWN:
                raise
            return False
        self._run_id = run_id
        return True

    def _begin(self, run: TrackedRun, artifacts: str | None) -> None:
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports] - an extra

        name = self._config.experiment
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name, artifacts)
        self._run_id: str = self._client.create_run(experiment, run_name=self._config.name or run.name).info.run_id
        params = [Param(_named(name), str(value)[:_MOST_LETTERS]) for name, value in run.flat_settings.items()]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MOST_PARAMS])

    def step(self, stats: StepStats, trajectories: Sequence[TrackedTrajectory]) -> None:
        self._log(stats.version, stats.metrics)
        if trajectories:
            self._log_table("trajectories", stats.version, trajectories)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._log(evaluation.version, evaluation_metrics(evaluation))

    def held_out(self, evaluation: Evaluation, trajectories: Sequence[TrackedTrajectory]) -> None:
        self._log_table("held_out", evaluation.version, trajectories)

    def close(self, error: str | None) -> None:
        status = "FINISHED" if error is None else "KILLED" if error.startswith("CancelledError") else "FAILED"
        self._client.set_terminated(self._run_id, status)

    def _log_table(self, name: str, version: int, trajectories: Sequence[TrackedTrajectory]) -> None:
        table = {"columns": COLUMNS, "data": rows(version, trajectories)}  # as MLflow's log_table writes it
        self._client.log_dict(self._run_id, table, f"{name}/version-{version:08}.json")

    def _log(self, version: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports] - an extra

        now_ms = int(time.time() * 1000)
        metrics = [Metric(_named(name), float(value), now_ms, version) for name, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)


def _named(name: str) -> str:
    """The name as MLflow takes it: as a path of a file, in its letters, and not too long."""
    parts = re.sub(r"[^\w\-. /:]", "_", name).split("/")
    path = "/".join(part if part.strip(".") else "_" for part in parts)
    return path if len(path) <= _LONGEST_NAME else path[: _LONGEST_NAME - 1] + "_"

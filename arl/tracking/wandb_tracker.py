"""Weights & Biases. A continued run is the same run there; steps that come again are drawn again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from arl.api.tracker_config import WandbConfig
from arl.api.tracking import TrackedRun, TrackedTrajectory, Tracker
from arl.api.types import Evaluation, StepStats
from arl.tracking.rows import COLUMNS, evaluation_metrics, rows


class WandbTracker(Tracker):
    """Charts have the version as their axis. W&B's own step cannot go back, so it counts calls, over all starts: only
    then `wandb sync` joins what several starts wrote offline.
    """

    def __init__(self, config: WandbConfig) -> None:
        self._config = config

    def open(self, run: TrackedRun) -> str:
        import wandb  # pyright: ignore[reportMissingImports] - an extra

        self._table = wandb.Table
        config = self._config
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.name or run.name,
            group=config.group,
            tags=config.tags,
            mode=config.mode,
            dir=run.run_dir.absolute(),
            id=run.run_id,
            resume="allow" if run.run_id else None,
            settings=wandb.Settings(console="off", silent=True, disable_code=True, x_stats_pid=os.getppid()),
        )
        self._run.config.update(dict(run.settings), allow_val_change=True)
        self._count = run.run_dir.absolute() / "wandb" / "calls"
        self._num_calls = int(self._count.read_text()) if run.run_id and self._count.exists() else 0
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")
        return self._run.id

    def step(self, stats: StepStats, trajectories: Sequence[TrackedTrajectory]) -> None:
        shown: dict[str, Any] = {**stats.metrics, "version": stats.version}
        if trajectories:
            shown["trajectories"] = self._table([*COLUMNS], rows(stats.version, trajectories))
        self._log(shown)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._log({**evaluation_metrics(evaluation), "version": evaluation.version})

    def held_out(self, evaluation: Evaluation, trajectories: Sequence[TrackedTrajectory]) -> None:
        table = self._table([*COLUMNS], rows(evaluation.version, trajectories))
        self._log({"held_out": table, "version": evaluation.version})

    def close(self, error: str | None) -> None:
        self._run.finish(exit_code=1 if error else 0)

    def _log(self, shown: Mapping[str, Any]) -> None:
        self._count.write_text(str(self._num_calls + 1))
        self._run.log(dict(shown), step=self._num_calls)
        self._num_calls += 1

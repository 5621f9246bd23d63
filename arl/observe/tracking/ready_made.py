"""The ready-made trackers: trackio, Weights & Biases, TensorBoard, MLflow. Each imports its package when it opens."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

from arl.api.errors import ConfigError
from arl.api.settings.run import TrackerConfig
from arl.api.tracking import TrackedRun, TrackedTrajectory, Tracker
from arl.api.types import Evaluation, StepStats, new_id
from arl.api.version import install_command


def check_trackers(configs: Sequence[TrackerConfig], own: Sequence[object]) -> None:
    """Raise ConfigError if a package is missing, with what to install, or if one of `own` is no tracker."""
    for config in configs:
        if find_spec(config.kind) is None:
            raise ConfigError(
                f"log.trackers has {config.kind}, whose package is not installed; install it with: "
                f"{install_command(config.kind)}"
            )
    for one in own:
        if not isinstance(one, Tracker):
            raise ConfigError(
                f"trackers has {one!r:.80}; give objects of subclasses of arl.Tracker, and names of ready-made ones in "
                "log.trackers"
            )


def ready_made(config: TrackerConfig) -> Tracker:
    """The tracker of this kind."""
    kinds = {"trackio": _Trackio, "wandb": _Wandb, "tensorboard": _TensorBoard, "mlflow": _MLflow}
    return kinds[config.kind](config)


_FINISH_S = 25
"""How long W&B may upload at the end of a run, and when the process ends. Then its files wait for `wandb sync`."""
COLUMNS = ("version", *(field.name for field in fields(TrackedTrajectory)))
"""The columns of a table of trajectories."""
Rows = list[list[Any]]


class _ReadyMade(Tracker):
    """Shows steps and evaluations alike: numbers of a version, and tables of trajectories."""

    def __init__(self, config: Any) -> None:
        self._config = config

    @abstractmethod
    def show(self, version: int, numbers: Mapping[str, float], tables: Mapping[str, Rows]) -> None: ...

    def step(self, stats: StepStats, trajectories: Sequence[TrackedTrajectory]) -> None:
        tables = {"trajectories": _rows(stats.version, trajectories)} if trajectories else {}
        self.show(stats.version, stats.metrics, tables)

    def evaluation(self, evaluation: Evaluation) -> None:
        self.show(evaluation.version, evaluation_metrics(evaluation), {})

    def held_out(self, evaluation: Evaluation, trajectories: Sequence[TrackedTrajectory]) -> None:
        self.show(evaluation.version, {}, {"held_out": _rows(evaluation.version, trajectories)})


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """`eval/NAME`, with the names of evaluations.jsonl; `eval/DATASET/NAME` of each named dataset."""
    own = ("reward", "standard_error", "num_episodes", "num_failed", "wall_s")
    known = {name: value for name in own if (value := getattr(evaluation, name)) is not None}
    numbers = {name: float(value) for name, value in known.items()} | dict(evaluation.metrics)
    for dataset, part in (evaluation.by_name or {}).items():
        of_part = {"reward": part.reward, "num_failed": float(part.num_failed), **part.metrics}
        numbers |= {f"{dataset}/{name}": value for name, value in of_part.items()}
    return {f"eval/{name}": value for name, value in numbers.items()}


def _rows(version: int, trajectories: Sequence[TrackedTrajectory]) -> Rows:
    """A row for each trajectory, with the values of COLUMNS. version: of the step."""
    return [[version, *(_shown(getattr(one, name)) for name in COLUMNS[1:])] for one in trajectories]


def _shown(value: Any) -> Any:
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    if isinstance(value, Mapping):
        return json.dumps(dict(value), ensure_ascii=False) if value else ""
    return value


class _Trackio(_ReadyMade):
    """A continued run is trackio's run of the same name; steps that come again are drawn again."""

    def open(self, run: TrackedRun) -> str:
        import trackio

        self._table = trackio.Table
        # trackio finds a run by its name, which must be this run's alone.
        name = run.run_id or f"{self._config.name or run.name}-{new_id()[:6]}"
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

    def show(self, version: int, numbers: Mapping[str, float], tables: Mapping[str, Rows]) -> None:
        shown = {name: self._table([*COLUMNS], rows) for name, rows in tables.items()}
        self._run.log({**numbers, **shown}, step=version)

    def close(self, error: str | None) -> None:
        self._run.finish()


class _Wandb(_ReadyMade):
    """A continued run is the same run there; steps that come again are drawn again.

    Charts have the version as their axis. W&B's own step cannot go back, so it counts calls, over all starts: only
    then `wandb sync` joins what several starts wrote offline.
    """

    def open(self, run: TrackedRun) -> str:
        import wandb  # pyright: ignore[reportMissingImports] - an extra

        config, self._table = self._config, wandb.Table
        hooks = (sys.exit, sys.excepthook)
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
            settings=wandb.Settings(
                console="off", silent=True, disable_code=True, reinit="create_new", finish_timeout=_FINISH_S
            ),
        )
        sys.exit, sys.excepthook = hooks  # W&B replaces both
        self._run.config.update(dict(run.settings), allow_val_change=True)
        self._count = run.run_dir.absolute() / "wandb" / "calls"
        self._num_calls = int(self._count.read_text()) if run.run_id and self._count.exists() else 0
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")
        return self._run.id

    def show(self, version: int, numbers: Mapping[str, float], tables: Mapping[str, Rows]) -> None:
        shown = {name: self._table([*COLUMNS], rows) for name, rows in tables.items()}
        self._count.write_text(str(self._num_calls + 1))
        self._run.log({**numbers, **shown, "version": version}, step=self._num_calls)
        self._num_calls += 1

    def close(self, error: str | None) -> None:
        self._run.finish(exit_code=1 if error else 0)


class _TensorBoard(_ReadyMade):
    """Uses tensorboard's own writer, which needs no torch. A continued run writes one more event file, and TensorBoard
    hides earlier steps that come again."""

    def open(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        events: Any = event_pb2  # protobuf makes their classes when they are imported
        summaries: Any = summary_pb2
        self._event, self._summary, self._text_of = events.Event, summaries.Summary, text_pb
        self._writer = EventFileWriter(str((self._config.directory or run.run_dir / "tensorboard").absolute()))
        self._add(run.version + 1, session_log=events.SessionLog(status=events.SessionLog.START))
        self._add(run.version, summary=text_pb("settings", _code(json.dumps(run.settings, indent=2))))

    def show(self, version: int, numbers: Mapping[str, float], tables: Mapping[str, Rows]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
        texts = [self._text_of(name, "\n\n".join(map(_markdown, rows))) for name, rows in tables.items()]
        self._add(version, summary=self._summary(value=[*values, *(value for text in texts for value in text.value)]))

    def _add(self, version: int, **event: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=version, **event))
        self._writer.flush()  # so that it is there if the process is killed

    def close(self, error: str | None) -> None:
        self._writer.close()


def _markdown(row: Sequence[Any]) -> str:
    """A trajectory in Markdown: its numbers, then its texts as they are."""
    known = dict(zip(COLUMNS, row, strict=True))
    texts = {name: known.pop(name) for name in ("error", "example", "expected", "text")}
    numbers = ", ".join(f"{name} {value}" for name, value in known.items() if value not in (None, ""))
    return "\n\n".join([f"**{numbers}**", *(f"{name}\n\n{_code(text)}" for name, text in texts.items() if text)])


def _code(text: str) -> str:
    """A block of code in Markdown, which no text can end."""
    return "\n".join(f"    {line}" for line in text.splitlines())


class _MLflow(_ReadyMade):
    """Uses MLflow's client alone, without the "active run" that it keeps for a whole process. A continued run is the
    same run there; it keeps all values of steps that come again."""

    def open(self, run: TrackedRun) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports] - an extra
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports] - an extra
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports] - an extra

        self._metric = Metric
        directory = (run.run_dir / "mlflow").absolute()
        address = self._config.address or os.environ.get("MLFLOW_TRACKING_URI")
        if address is None:
            directory.mkdir(parents=True, exist_ok=True)
        client = self._client = MlflowClient(tracking_uri=address or f"sqlite:///{directory}/mlflow.db")
        self._run_id = run.run_id
        if run.run_id is not None:
            try:
                client.update_run(run.run_id, status="RUNNING")
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                self._run_id = None
        if self._run_id is None:
            name, artifacts = self._config.experiment, None if address else (directory / "artifacts").as_uri()
            known = client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else client.create_experiment(name, artifacts)
            self._run_id = client.create_run(experiment, run_name=self._config.name or run.name).info.run_id
            params = [Param(mlflow_name(name), str(value)[:500]) for name, value in run.flat_settings.items()]
            for start in range(0, len(params), 100):  # MLflow's limits: 100 in a request, 500 letters in a value
                client.log_batch(self._run_id, params=params[start : start + 100])
        client.log_dict(self._run_id, dict(run.settings), "settings.json")
        return self._run_id

    def show(self, version: int, numbers: Mapping[str, float], tables: Mapping[str, Rows]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(mlflow_name(name), float(value), now_ms, version) for name, value in numbers.items()]
        if metrics:
            self._client.log_batch(self._run_id, metrics=metrics)
        for name, rows in tables.items():
            table = {"columns": COLUMNS, "data": rows}  # as MLflow's log_table writes it
            self._client.log_dict(self._run_id, table, f"{name}/version-{version:08}.json")

    def close(self, error: str | None) -> None:
        status = "FINISHED" if error is None else "KILLED" if error.startswith("CancelledError") else "FAILED"
        self._client.set_terminated(self._run_id, status)


def mlflow_name(name: str) -> str:
    """The name as MLflow takes it: as a path of a file, in its letters, and of 250 letters at most."""
    parts = re.sub(r"[^\w\-. /:]", "_", name).split("/")
    path = "/".join(part if part.strip(".") else "_" for part in parts)
    return path if len(path) <= 250 else path[:249] + "_"

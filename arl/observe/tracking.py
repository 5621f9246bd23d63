"""Experiment trackers: what sends a run to trackio, Weights & Biases, TensorBoard, MLflow, or a user's own class.

All trackers of a run are one, which never waits for them: each has a thread and a queue of calls.

| wait | woken by |
|---|---|
| a tracker's thread | a record; `close` |
| `close` | the end of every thread; CLOSING_S |

A ready-made tracker imports its package when it opens.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
import traceback
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from importlib.util import find_spec
from queue import SimpleQueue
from typing import Any

from arl.api.errors import ConfigError
from arl.api.settings.run import TrackerConfig
from arl.api.tracking import TrackedRun, TrackedTrajectory, Tracker
from arl.api.types import Evaluation, StepStats, new_id
from arl.api.version import install_command
from arl.runtime.processes.rpc import place_of

CLOSING_S = 30.0
"""How long the end of a run waits for trackers. After a tenth of it the log says what the end waits for."""
MOST_WAITING = 256
"""Records that wait for one tracker. More are dropped."""

log = logging.getLogger(__name__)


class Trackers(Tracker):
    """Gives each record to all trackers. Calls return at once, except `close`, which takes CLOSING_S at most."""

    def __init__(
        self, ready_made: Sequence[TrackerConfig] = (), own: Sequence[Tracker] = (), *, closing_s: float = CLOSING_S
    ) -> None:
        """own: a user's."""
        named = [(one.kind, _READY_MADE[one.kind](one)) for one in ready_made]
        named += [(type(one).__name__, one) for one in own]
        counts, self._closing_s = Counter[str](), closing_s
        self._ids, self._changing = dict[str, str](), threading.Lock()
        self._threads: list[_TrackerThread] = []
        for name, tracker in named:
            counts[name] += 1
            self._threads.append(_TrackerThread(name if counts[name] == 1 else f"{name}-{counts[name]}", tracker))

    @property
    def has_any(self) -> bool:
        return bool(self._threads)

    def open(self, run: TrackedRun) -> None:
        """run.run_id does not count: each tracker gets its own, from run_dir/trackers.json."""
        self._ids_file = run.run_dir / "trackers.json"
        with suppress(OSError, ValueError, AttributeError):  # none yet, or a broken file: as in a new run
            self._ids |= {name: str(run_id) for name, run_id in json.loads(self._ids_file.read_text()).items()}
        for thread in self._threads:
            thread.open(replace(run, run_id=self._ids.get(thread.name)), self._keep_id)

    def _keep_id(self, name: str, run_id: str) -> None:
        """Keep what a tracker's `open` returned. Without it the tracker works, but a continued run gets no id."""
        with self._changing:
            self._ids[name] = run_id
            aside = self._ids_file.with_name(self._ids_file.name + ".tmp")
            try:
                aside.write_text(json.dumps(self._ids, indent=2) + "\n")
                aside.replace(self._ids_file)
            except OSError as error:
                log.warning("the run's id in the tracker %s is not kept for a continued run: %s", name, error)

    def step(self, stats: StepStats, trajectories: Sequence[TrackedTrajectory]) -> None:
        self._put(f"step {stats.version}", "step", stats, trajectories)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._put(f"the evaluation of version {evaluation.version}", "evaluation", evaluation)

    def held_out(self, evaluation: Evaluation, trajectories: Sequence[TrackedTrajectory]) -> None:
        about = f"the held-out trajectories of version {evaluation.version}"
        self._put(about, "held_out", evaluation, trajectories)

    def _put(self, about: str, method: str, *args: Any) -> None:
        for thread in self._threads:
            thread.put(about, method, *args)

    def close(self, error: str | None) -> None:
        """Wait until each tracker has its records and is closed. Logs which is not, and goes on without it."""
        began = time.monotonic()
        for thread in self._threads:
            thread.close(error)
        if not all(thread.has_ended(began + self._closing_s / 10) for thread in self._threads):
            log.warning("waiting for trackers to take their last records, %g s at most", self._closing_s)
        for thread in self._threads:
            thread.leave(began + self._closing_s)


class _TrackerThread:
    """A tracker, its thread, and the calls that wait for it. Its first failure is logged; later ones are counted."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name, self._tracker = name, tracker
        self._calls = SimpleQueue[tuple[str, str, tuple[Any, ...]] | None]()
        self._thread = threading.Thread(target=self._work, name=f"arl-tracker-{name}", daemon=True)
        self._doing = "opening"
        self._is_open = self._is_left = False
        """Left: the run has ended without it."""
        self._num_dropped = self._num_failed = 0

    def open(self, run: TrackedRun, keep_id: Callable[[str, str], None]) -> None:
        self._is_open, self._keep_id = True, keep_id
        self._calls.put(("opening", "open", (run,)))
        self._thread.start()

    def put(self, about: str, method: str, *args: Any) -> None:
        if self._is_open and self._calls.qsize() < MOST_WAITING:
            self._calls.put((about, method, args))
        elif self._is_open:
            self._num_dropped += 1
            if self._num_dropped == 1:
                log.warning(
                    "the tracker %s is still busy with %s, and %d records wait for it: it misses every record from "
                    "%s on until it continues",
                    *(self.name, self._doing, MOST_WAITING, about),
                )

    def close(self, error: str | None) -> None:
        self._calls.put(("closing", "close", (error,)))
        self._calls.put(None)

    def has_ended(self, deadline: float) -> bool:
        """Wait until the tracker is closed; returns whether it is, or was never opened."""
        if self._thread.ident is not None:
            self._thread.join(max(deadline - time.monotonic(), 0.0))
        return not self._thread.is_alive()

    def leave(self, deadline: float) -> None:
        """Wait as `has_ended` does; then go on without it, and log what it has missed."""
        if not self.has_ended(deadline):
            self._is_left, place = True, place_of(self._thread.ident or 0)
            log.error("the tracker %s is still at %s, in %s; the run ends without it", self.name, self._doing, place)
        if self._num_dropped or self._num_failed > 1:
            missed = (self.name, self._num_dropped, self._num_failed)
            log.warning("the tracker %s has missed %d records, and failed in %d calls", *missed)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._doing, method, args = call
            try:
                found = getattr(self._tracker, method)(*args)
                if method == "open" and found is not None:
                    self._keep_id(self.name, str(found))
            except BaseException as error:  # noqa: BLE001 - a user's code; sys.exit, too, must end nothing but this call
                self._num_failed += 1
                self._is_open = method != "open"
                if self._num_failed == 1 and not self._is_left:
                    said = " ".join(f"{type(error).__name__}: {error}".split())[:500]
                    place = traceback.extract_tb(error.__traceback__)[-1]
                    where = f"{place.filename}:{place.lineno}"
                    then = ", and counts its further failures" if self._is_open else " without it"
                    about = (self.name, self._doing, said, where, then)
                    log.warning("the tracker %s failed in %s: %s (at %s); the run goes on%s", *about)
                if not self._is_open:
                    return


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


# Ready-made trackers

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


_READY_MADE: dict[str, Callable[[Any], Tracker]] = {
    "trackio": _Trackio,
    "wandb": _Wandb,
    "tensorboard": _TensorBoard,
    "mlflow": _MLflow,
}

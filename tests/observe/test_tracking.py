"""What a run's trackers get, that none can stop the run or make it wait, and what the ready-made ones' readers find."""

import json
import logging
import re
import signal
import sqlite3
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from one_turn import OneTurn
from training.trainer_run import running

import arl.run.launch
from arl.api.engine import Sampler
from arl.api.errors import ConfigError
from arl.api.settings.run import Config, MLflowConfig
from arl.api.tracking import TrackedRun, TrackedTrajectory, Tracker
from arl.api.types import Evaluation, Example, StepStats, Trajectory
from arl.api.version import install_command
from arl.observe import tracking
from arl.observe.tracking import CLOSING_S, COLUMNS, MOST_WAITING, Trackers, mlflow_name
from arl.run.experiment import Experiment, Setup

STATS = {
    "reward": 0.5,
    "num_episodes": 1,
    "mean_staleness": 0.0,
    "max_staleness_seen": 0,
    "wait_s": 0.0,
    "train_s": 0.0,
}


def stats(version: int) -> StepStats:
    return StepStats(version=version, metrics={"version": version, "reward": 0.5}, **STATS)


class Recorder(Tracker):
    """A user's own tracker: keeps what it gets. on_step: called in each step."""

    def __init__(self, on_step: Callable[[], object] = lambda: None, run_id: str | None = None) -> None:
        self._on_step = on_step
        self._run_id = run_id
        self.calls: list[tuple[str, Any]] = []
        self.runs: list[TrackedRun] = []
        self.trajectories: dict[int, Sequence[TrackedTrajectory]] = {}
        self.of_evaluations: dict[int, Sequence[TrackedTrajectory]] = {}
        self.threads: set[str] = set()

    def open(self, run: TrackedRun) -> str | None:
        self.runs.append(run)
        return self._run_id

    def step(self, stats: StepStats, trajectories: Sequence[TrackedTrajectory]) -> None:
        self.threads.add(threading.current_thread().name)
        self._on_step()
        self.calls.append(("step", stats.version))
        self.trajectories[stats.version] = trajectories

    def evaluation(self, evaluation: Evaluation) -> None:
        self.calls.append(("evaluation", evaluation.version))

    def held_out(self, evaluation: Evaluation, trajectories: Sequence[TrackedTrajectory]) -> None:
        self.of_evaluations[evaluation.version] = trajectories

    def close(self, error: str | None) -> None:
        self.calls.append(("close", error))

    @property
    def versions(self) -> list[int]:
        return [value for name, value in self.calls if name == "step"]


def raising(error: BaseException) -> Callable[[], object]:
    def step() -> None:
        raise error

    return step


def given(run_dir: Path, trackers: Trackers, num_steps: int) -> None:
    """Opens them, and gives them steps."""
    trackers.open(TrackedRun(run_dir=run_dir, settings={}))
    for version in range(1, num_steps + 1):
        trackers.step(stats(version), [])


def said(caplog: pytest.LogCaptureFixture, *, level: int = logging.WARNING) -> list[str]:
    """By the trackers' own logger."""
    return [
        record.message for record in caplog.records if record.name == "arl.observe.tracking" and record.levelno >= level
    ]


async def test_an_own_tracker_gets_the_settings_each_step_and_each_evaluation_and_the_end(tmp_path: Path) -> None:
    recorder = Recorder()
    async with running(tmp_path, evaluate=True, steps=3, trackers=[recorder]) as trainer:
        await trainer.evaluate()
        metrics = [step.metrics async for step in trainer]
        await trainer.evaluate()
    assert recorder.calls == [("evaluation", 0), *(("step", n) for n in (1, 2, 3)), ("evaluation", 3), ("close", None)]
    (run,) = recorder.runs
    assert (run.version, run.run_id, run.name) == (0, None, tmp_path.name)
    assert run.settings["rollout"]["batch_size"] == run.flat_settings["rollout.batch_size"] == 2
    assert json.loads(json.dumps(run.settings)) == run.settings
    assert recorder.threads == {"arl-tracker-Recorder"}
    assert len(metrics) == 3


async def test_a_tracker_learns_what_ended_the_run(tmp_path: Path) -> None:
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError):
        async with running(tmp_path, trackers=[recorder]):
            _ = 1 / 0
    assert recorder.calls == [("close", "ZeroDivisionError: division by zero")]


async def test_trajectories_of_some_steps_come_with_their_text_and_are_of_different_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arl.training.metrics_log._TRACKED_EVERY", 2)
    recorder = Recorder()
    settings = {"steps": 3, "log": {"track_trajectories": 2}, "rollout": {"max_staleness": 0}}
    with monkeypatch.context() as patch:
        async with running(tmp_path, trackers=[recorder], **settings) as trainer:
            assert trainer.log._decode is None  # the fakes have no tokenizer
            patch.setattr(trainer.log, "_decode", lambda ids: " ".join(map(str, ids)))
            _ = [step async for step in trainer]
    assert {version: len(found) for version, found in recorder.trajectories.items()} == {1: 2, 2: 0, 3: 2}
    first, second = recorder.trajectories[3]
    assert first.group_id != second.group_id
    assert first.example_id != second.example_id
    assert (first.oldest_version, first.newest_version, first.num_trained_tokens, first.num_tokens) == (2, 2, 3, 5)
    assert first.text == f"1 {first.reward:.0f} 7 8 9"
    assert first.advantage is not None
    assert [dict(one.example) for one in (first, second)] == [{"number": one.reward} for one in (first, second)]


class OddOnesFail(OneTurn):
    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        made = await super().arun_episode(engine, data)
        if data["number"] % 2:
            raise ValueError(f"{data['number']} is odd")
        return made


async def test_held_out_episodes_and_those_that_failed_come_with_their_examples_even_without_an_event_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arl.training.metrics_log._TRACKED_EVERY", 2)
    recorder, log = Recorder(), {"track_trajectories": 2, "events": None}
    options = {"workflow": OddOnesFail(), "evaluate": True, "trackers": [recorder], "log": log}
    async with running(tmp_path, steps=3, rollout={"max_failure_rate": 1.0}, **options) as trainer:
        _ = [step async for step in trainer]
        await trainer.evaluate()
    held_out = recorder.of_evaluations[3]
    assert [(one.name, one.why, one.error) for one in held_out] == [
        ("e1.2", "highest reward", ""),
        ("e1.0", "lowest reward", ""),
        ("e1.1", "failed", "ValueError: 1 is odd"),
    ]
    assert [one.example for one in held_out] == [{"number": number} for number in (2, 0, 1)]
    *finished, failed = recorder.trajectories[3]
    assert [one.example["number"] % 2 for one in (*finished, failed)] == [0, 0, 1]
    assert (failed.why, failed.reward, failed.num_tokens) == ("failed", None, 5)
    assert failed.error == f"ValueError: {failed.example['number']} is odd"


async def test_a_continued_run_gives_a_tracker_the_id_that_it_returned_and_goes_on_after_its_checkpoint(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, steps=2, trackers=[Recorder(run_id="abc")]) as trainer:
        _ = [step async for step in trainer]
    again = Recorder(run_id="abc")
    async with running(tmp_path, steps=4, trackers=[again, Recorder(run_id="other")]) as trainer:
        _ = [step async for step in trainer]
    assert [(run.run_id, run.version) for run in again.runs] == [("abc", 2)]
    assert again.versions == [3, 4]
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"Recorder": "abc", "Recorder-2": "other"}


@pytest.mark.parametrize(
    ("error", "told"), [(ValueError("no\nspace"), "ValueError: no space"), (SystemExit(3), "SystemExit: 3")]
)
async def test_a_tracker_that_raises_or_exits_is_warned_of_once_and_the_run_and_the_others_go_on(
    error: BaseException, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Recorder(raising(error)), Recorder()
    async with running(tmp_path, steps=4, trackers=[bad, good]) as trainer:
        steps = [step.version async for step in trainer]
    assert good.versions == steps == [1, 2, 3, 4]
    assert bad.calls == [("close", None)]
    first, last = said(caplog)
    assert first.startswith(f"the tracker Recorder failed in step 1: {told} (at ")
    assert Path(__file__).name in first
    assert last == "the tracker Recorder has missed 0 records, and failed in 4 calls"


def test_a_tracker_that_cannot_open_is_left_out_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Closed(Recorder):
        def open(self, run: TrackedRun) -> str | None:
            raise ConnectionError("no network")

    closed = Closed()
    trackers = Trackers(own=[closed])
    given(tmp_path, trackers, 2)
    trackers.close(None)
    assert closed.calls == []
    (line,) = said(caplog)
    assert "failed in opening: ConnectionError: no network" in line
    assert line.endswith("the run goes on without it")


def test_the_end_does_not_wait_for_a_tracker_that_hangs_and_says_where_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for closing is over once the other one has closed."""
    hangs, goes_on = threading.Event(), threading.Event()
    good, hung = Recorder(), Recorder(lambda: (hangs.set(), goes_on.wait()))

    def clock() -> float:
        is_working = any(thread.name == "arl-tracker-Recorder" for thread in threading.enumerate())
        return time.monotonic() + (0.0 if is_working else 2 * CLOSING_S)

    trackers = Trackers(own=[good, hung])
    given(tmp_path, trackers, 2)
    hangs.wait()
    monkeypatch.setattr(tracking, "time", SimpleNamespace(monotonic=clock))
    trackers.close(None)
    assert hung.calls == []
    assert good.calls == [("step", 1), ("step", 2), ("close", None)]
    (line,) = said(caplog, level=logging.ERROR)
    assert "the tracker Recorder-2 is still at step 1, in threading.py" in line
    goes_on.set()


def test_records_beyond_those_that_may_wait_are_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    is_there, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        is_there.set()
        goes_on.wait()

    recorder = Recorder(wait)
    trackers = Trackers(own=[recorder])
    given(tmp_path, trackers, 1)
    is_there.wait()
    for version in range(2, MOST_WAITING + 5):
        trackers.step(stats(version), [])
    (line,) = said(caplog)
    assert f"still busy with step 1, and {MOST_WAITING} records wait for it: it misses" in line
    assert f"every record from step {MOST_WAITING + 2} on until it continues" in line
    goes_on.set()
    trackers.close(None)
    assert recorder.versions == list(range(1, MOST_WAITING + 2))
    assert said(caplog)[1:] == ["the tracker Recorder has missed 3 records, and failed in 0 calls"]


def test_an_id_that_cannot_be_kept_is_warned_of_and_the_tracker_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trackers.json.tmp").mkdir()
    recorder = Recorder(run_id="a")
    trackers = Trackers(own=[recorder])
    given(tmp_path, trackers, 2)
    trackers.close(None)
    assert recorder.versions == [1, 2]
    (line,) = said(caplog)
    assert line.startswith("the run's id in the tracker Recorder is not kept for a continued run: ")


async def test_a_missing_package_is_an_error_before_anything_starts_and_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    sentence = "log.trackers has wandb, whose package is not installed; install it with: " + install_command("wandb")
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        async with running(tmp_path, log={"trackers": ["wandb"]}):
            pytest.fail("it began")

    def prepare(config: Config) -> Setup:
        pytest.fail("it was prepared")

    config = Config.model_validate({"model": "none", "run_dir": tmp_path, "log": {"trackers": ["wandb"]}})
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        await Experiment(config=Config, prepare=prepare).train(config)


@pytest.mark.parametrize("given", ["trackio", Recorder, None], ids=str)
async def test_what_is_no_tracker_is_refused_before_anything_starts(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trackers has .*; give objects of subclasses of arl.Tracker"):
        async with running(tmp_path, trackers=[given]):
            pytest.fail("it began")


async def test_a_run_without_trackers_has_none(tmp_path: Path) -> None:
    async with running(tmp_path, steps=1) as trainer:
        _ = [step async for step in trainer]
        assert trainer.log._tracker is None
    assert not (tmp_path / "trackers.json").exists()
    assert arl.run.launch.Trackers().has_any is False


# Ready-made trackers, each with its real package

PROJECT = "arl-tests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a reader found: numbers as (version, value)."""

    rewards: list[tuple[int, float]]
    evaluations: list[tuple[int, float]]
    settings: str
    """In any form."""
    tables: dict[int, Any] = field(default_factory=dict)
    """version -> the trajectories that were shown, in any form."""
    held_out: dict[int, Any] = field(default_factory=dict)
    num_runs: int = 1
    is_finished: bool = True


def read_trackio(run_dir: Path) -> Found:
    """Its database, in the directory that trackio has for the whole process."""
    from trackio.sqlite_storage import SQLiteStorage

    with sqlite3.connect(SQLiteStorage.get_project_db_path(PROJECT)) as database:
        rows = database.execute("select run_id, step, metrics from metrics order by id").fetchall()
        ((config,),) = database.execute("select config from configs").fetchall()
    shown = [(step, json.loads(metrics)) for _, step, metrics in rows]
    return Found(
        rewards=[(step, row["reward"]) for step, row in shown if "reward" in row],
        evaluations=[(step, row["eval/reward"]) for step, row in shown if "eval/reward" in row],
        settings=str(json.loads(config)),
        tables={step: row["trajectories"]["_value"] for step, row in shown if "trajectories" in row},
        held_out={step: row["held_out"]["_value"] for step, row in shown if "held_out" in row},
        num_runs=len({run_id for run_id, _, _ in rows}),
    )


def read_tensorboard(run_dir: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    texts = {tag: events.Tensors(tag) for tag in ("settings", "trajectories", "held_out")}
    return Found(
        rewards=[(event.step, event.value) for event in events.Scalars("reward")],
        evaluations=[(event.step, event.value) for event in events.Scalars("eval/reward")],
        settings=texts["settings"][-1].tensor_proto.string_val[0].decode(),
        tables={event.step: event.tensor_proto.string_val[0].decode() for event in texts["trajectories"]},
        held_out={event.step: event.tensor_proto.string_val[0].decode() for event in texts["held_out"]},
    )


def read_mlflow(run_dir: Path) -> Found:
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    client = MlflowClient(tracking_uri=f"sqlite:///{run_dir}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("arl")
    (run,) = client.search_runs([experiment.experiment_id])

    def history(name: str) -> list[tuple[int, float]]:
        return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]

    directory = run_dir / "mlflow" / "artifacts" / run.info.run_id / "artifacts"

    def tables(name: str) -> dict[int, Any]:
        paths = [Path(artifact.path) for artifact in client.list_artifacts(run.info.run_id, name)]
        return {int(path.stem.rpartition("-")[2]): json.loads((directory / path).read_text()) for path in paths}

    return Found(
        rewards=history("reward"),
        evaluations=history("eval/reward"),
        settings=str(run.data.params) + (directory / "settings.json").read_text(),
        tables=tables("trajectories"),
        held_out=tables("held_out"),
        is_finished=run.info.status == "FINISHED",
    )


def wandb_records(path: Path) -> Iterator[Any]:
    """Of an offline run's file: LevelDB's log format after 7 bytes of W&B's own."""
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    data, position, part = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if (room := 32768 - position % 32768) < 7:
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        part += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            record, part = wandb_internal_pb2.Record.FromString(part), b""
            yield record


def read_wandb(run_dir: Path) -> Found:
    files = sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    records = [record for path in files for record in wandb_records(path)]
    history = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [row["_step"] for row in history] == list(range(len(history))), "starts have different steps there"
    assert "version" in [record.metric.step_metric for record in records if record.metric.glob_name == "*"]
    updates = [update for record in records for update in record.config.update]

    def tables(name: str) -> dict[int, Any]:
        paths = {row["version"]: Path(row[f"{name}/path"]).name for row in history if f"{name}/path" in row}
        return {
            version: json.loads(next((run_dir / "wandb").rglob(path)).read_text()) for version, path in paths.items()
        }

    return Found(
        rewards=[(row["version"], row["reward"]) for row in history if "reward" in row],
        evaluations=[(row["version"], row["eval/reward"]) for row in history if "eval/reward" in row],
        settings=str([(update.key, update.nested_key, update.value_json) for update in updates]),
        tables=tables("trajectories"),
        held_out=tables("held_out"),
        num_runs=len({record.run.run_id for record in records if record.run.run_id}),
        is_finished=[r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"] == [0, 0],
    )


READERS: dict[str, Callable[[Path], Found]] = {
    "trackio": read_trackio,
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "wandb": read_wandb,
}


@pytest.mark.filterwarnings("ignore")  # of these packages' own, where this process reads with them
@pytest.mark.parametrize("kind", READERS)
async def test_its_own_reader_finds_one_run_with_all_steps_evaluations_settings_and_tables(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    pytest.importorskip(kind)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")  # of the reader
    monkeypatch.setattr("arl.training.metrics_log._TRACKED_EVERY", 2)
    hooks = (sys.excepthook, sys.exit, signal.getsignal(signal.SIGINT))
    own = {"wandb": {"mode": "offline"}, "trackio": {"project": PROJECT}}
    tracker = {"kind": kind, **own.get(kind, {})}
    log = {"trackers": [tracker], "track_trajectories": 3}
    run_dir = tmp_path / "run"
    for steps in (2, 4):
        async with running(run_dir, evaluate=True, steps=steps, log=log) as trainer:
            _ = [step async for step in trainer]
            evaluation = await trainer.evaluate()
    assert (sys.excepthook, sys.exit, signal.getsignal(signal.SIGINT)) == hooks
    found = READERS[kind](run_dir)
    rewards = [json.loads(line)["reward"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert found.rewards == [(version, pytest.approx(reward)) for version, reward in enumerate(rewards, start=1)]
    assert found.evaluations == [(2, evaluation.reward), (4, evaluation.reward)]
    assert (found.num_runs, found.is_finished) == (1, True)
    assert "batch_size" in found.settings
    assert sorted(found.tables) == [1, 3]
    assert sorted(found.held_out) == [2, 4]
    named = ("why", "name", "reward", "example", "num_tokens") if kind == "tensorboard" else COLUMNS
    for table in (found.tables[3], found.held_out[4]):
        assert all(name in str(table) for name in named)
    assert '{"number": 3}' in str(found.held_out[4]), "the example of the highest reward"


def test_a_run_that_the_mlflow_server_does_not_know_begins_as_a_new_one(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    unknown, ids = "0123456789abcdef" * 2, tmp_path / "trackers.json"
    ids.write_text(json.dumps({"mlflow": unknown}))
    trackers = Trackers([MLflowConfig()])
    trackers.open(TrackedRun(run_dir=tmp_path, settings={"steps": 3}))
    trackers.close(None)
    assert json.loads(ids.read_text())["mlflow"] != unknown


@pytest.mark.filterwarnings("ignore")  # of MLflow's own
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("reward/日本 a:b", "reward/日本 a:b"),
        ('reward/a"b?', "reward/a_b_"),
        ("reward/", "reward/_"),
        ("reward/../../x", "reward/_/_/x"),
        ("a//b", "a/_/b"),
        ("reward/" + "n" * 300, "reward/" + "n" * 242 + "_"),
    ],
)
def test_whatever_a_number_is_called_mlflow_takes_its_name(name: str, shown: str) -> None:
    assert mlflow_name(name) == shown
    if find_spec("mlflow"):
        from mlflow.utils.validation import _validate_metric_name  # pyright: ignore[reportMissingImports]

        _validate_metric_name(shown)

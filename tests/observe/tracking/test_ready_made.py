"""Each ready-made tracker, with its real package: what its own reader finds after a run that was continued once."""

import json
import signal
import sqlite3
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from training.trainer_run import running

from arl.api.settings.run import MLflowConfig
from arl.api.tracking import TrackedRun
from arl.observe.tracking.ready_made import COLUMNS, mlflow_name, ready_made

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
    tracker = ready_made(MLflowConfig())
    begun = tracker.open(TrackedRun(run_dir=tmp_path, settings={"steps": 3}, run_id="0123456789abcdef" * 2))
    tracker.close(None)
    assert begun not in (None, "0123456789abcdef" * 2)


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

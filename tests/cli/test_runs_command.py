"""`arl runs`: every run of a folder, with its state, from small reads of its files."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training.trainer_run import run, running

from arl.__main__ import main
from arl.api.fakes import ScriptedTrainEngine
from arl.api.settings.run import Config
from arl.training.run_dir import RunLock, record_start


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    main(["runs", str(folder), "--json"])
    return {Path(row["run_dir"]).name: row for row in json.loads(capsys.readouterr().out)}


def killed(run_dir: Path) -> None:
    """A process that takes the lock of a run, and is killed."""
    script = f"""
import os, signal
from pathlib import Path
from arl.training.run_dir import RunLock
RunLock(Path({str(run_dir)!r})).take()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == -signal.SIGKILL


async def test_runs_are_listed_with_their_state_steps_reward_and_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> None:
        raise ValueError("a bug")

    await run(tmp_path / "done", evaluate=True, evaluation={"every": 2})
    with pytest.raises(ValueError, match="a bug"):
        await run(tmp_path / "sweep" / "broken", ScriptedTrainEngine(on_train=fails))
    killed(tmp_path / "dead")
    record_start(Config(model="me/model", run_dir=tmp_path / "dead", steps=9), 9)
    (tmp_path / "dead" / "metrics.jsonl").write_text('{"version": 5}\n{"version": 6}\n{"vers')
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "metrics.jsonl").write_text('{"version": 3, "loss": 0.5}\n')
    (tmp_path / "tuned" / "evaluations.jsonl").write_text('{"version": 3, "loss": 0.25}\n')
    (tmp_path / "done" / "sub").mkdir()
    (tmp_path / "done" / "sub" / "END.json").touch()
    (tmp_path / "notes").mkdir()
    async with running(tmp_path / "now") as trainer:
        await anext(trainer)
        rows = listed(tmp_path, capsys)
    assert {name: row["state"] for name, row in rows.items()} == {
        "done": "finished", "broken": "failed", "dead": "killed", "now": "running", "tuned": "unknown",
    }  # fmt: skip
    assert {name: (row["version"], row["steps"]) for name, row in rows.items()} == {
        "done": (4, 4), "broken": (0, 4), "dead": (6, 9), "now": (1, 4), "tuned": (3, None),
    }  # fmt: skip
    assert (rows["done"]["evaluated_version"], rows["dead"]["reward"]) == (4, None)
    assert (rows["done"]["model"], rows["dead"]["model"]) == ("none", "me/model")
    assert rows["broken"]["why"] == "a bug"
    assert [row["num_bytes"] > 0 for row in rows.values()] == [True] * 5
    main(["runs", str(tmp_path)])
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "state", "steps", "held-out", "model", "started", "size", "why"]
    (broken,) = [line for line in lines if "failed" in line]
    assert broken.endswith("  a bug")
    (tuned,) = [line for line in lines if "tuned" in line]
    assert "loss 0.250 at 3" in tuned
    (dead,) = [line for line in lines if "killed" in line]
    assert dead.split()[:7] == [f"{tmp_path}/dead", "killed", "6", "of", "9", "-", "me/model"]


def test_one_run_an_empty_folder_and_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["runs", str(tmp_path)])
    assert capsys.readouterr().out == f"there are no runs in {tmp_path}\n"
    lock = RunLock(tmp_path / "one\x1b[31m")
    lock.take()
    lock.release()
    main(["runs", str(tmp_path / "one\x1b[31m")])
    said = capsys.readouterr().out
    assert "unknown" in said
    assert "\x1b" not in said
    with pytest.raises(SystemExit) as end:
        main(["runs", str(tmp_path / "missing")])
    assert end.value.code == 2
    assert "missing is not a directory" in capsys.readouterr().err


def test_of_a_long_log_only_the_end_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would take hours here: before the row is a hole of 10 TB."""
    (tmp_path / "long").mkdir()
    with (tmp_path / "long" / "metrics.jsonl").open("wb") as file:
        file.seek(10**13)
        file.write(b'\n{"version": 7}\n')
    assert listed(tmp_path, capsys)["long"]["version"] == 7
    os.truncate(tmp_path / "long" / "metrics.jsonl", 0)

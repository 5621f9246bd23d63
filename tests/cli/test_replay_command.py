"""`arl replay` on a whole run: real processes, real ranks, asynchronous training; and what the command says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import arl.cli.offline
from arl.cli.offline import _change
from arl.engine.tiny import write_tiny_model
from arl.run.replay import Replayed, ReplayedStep, ReplayRange

SCRIPT = Path(__file__).parents[1] / "agent_script.py"
SMALL = ("--rollout.batch_size", "4", "--rollout.group_size", "4", "--rollout.max_staleness", "4", "--record")
RANKS = ("--train.num_ranks", "2", "--train.optimizer.lr", "1e-3", "--algorithm.minibatches", "2")


def run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def replayed(run_dir: Path, *flags: str) -> dict[str, Any]:
    return json.loads(run("-m", "arl", "replay", str(run_dir), "--json", *flags))


@pytest.mark.runs
@pytest.mark.timeout(600)
def test_an_asynchronous_run_on_two_ranks_is_replayed_to_the_bit(tmp_path: Path) -> None:
    model, run_dir = write_tiny_model(tmp_path / "model", ["Say a number"]), tmp_path / "run"
    run(str(SCRIPT), "--model", str(model), "--run_dir", str(run_dir), *SMALL, *RANKS, "--steps", "6")
    staleness = [json.loads(line)["staleness/max"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(staleness) > 0
    found = replayed(run_dir, "--steps", "0:6")
    assert [(step["version"], step["digest"]) for step in found["steps"]] == [
        (step["version"], step["recorded_digest"]) for step in found["steps"]
    ]
    assert [step["version"] for step in found["steps"]] == list(range(6))


def test_a_setting_is_a_name_and_a_value_as_in_yaml() -> None:
    assert _change("train.optimizer.lr=1.0e-4") == ("train.optimizer.lr", 1e-4)
    assert _change("algorithm.selection=null") == ("algorithm.selection", None)
    assert _change("algorithm.preset=gspo") == ("algorithm.preset", "gspo")


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--set", "lr"], 2, "write NAME=VALUE"),
        (["--steps", "1:1"], 1, "has no recorded steps"),
    ],
)
def test_a_wrong_call_ends_with_a_sentence(
    flags: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(SystemExit) as ended:
        arl.cli.offline.replay_steps([str(tmp_path), *flags])
    assert ended.value.code == code
    assert message in capsys.readouterr().err


def test_weights_that_differ_are_named_and_end_the_command_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"version": 3, "loss": 0.5, "recorded_loss": 0.5, "build": (), "is_on_cpu": True, "tensor": "norm.weight"}
    step = ReplayedStep(digest="a", recorded_digest="b", difference=2e-5, **known)
    which = ReplayRange(checkpoint=None, base=0, first=3, stop=4)

    def played(*args: object, on_step: Any, **kwargs: object) -> Replayed:
        on_step(step)
        return Replayed(which=which, tolerance=1e-3, steps=(step,))

    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setattr(arl.cli.offline, "replay", played)
    with pytest.raises(SystemExit) as ended:
        arl.cli.offline.replay_steps([str(tmp_path)])
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert "norm.weight differs most, by 2.0e-05 of its norm" in said
    assert "the same build computed other numbers" in said

"""kill -9 of the trainer and of the embedded server, on the real engines, at random moments; run again until done."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from real_life import NUM_EXAMPLES
from test_kills import check_ledger

from arl.checkpoint import Checkpoints
from arl.engine.tiny import write_tiny_model
from arl.group_file import read_groups
from arl.metrics import read_jsonl

HERE = Path(__file__).parent
SETTINGS = {
    "rollout.batch_size": 2,
    "rollout.group_size": 2,
    "rollout.max_staleness": 1,
    "checkpoint.every": 1,
    "engine.max_restarts": 0,
}


def start(model: Path, run_dir: Path, steps: int) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parents[1]}:{HERE.parent}", "OMP_NUM_THREADS": "1"}
    settings = {"model": model, "run_dir": run_dir, "steps": steps, **SETTINGS}
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, str(HERE / "real_life.py"), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def until_it_trains(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("trained"):
            return
    raise AssertionError(f"it never trained; it said:\n{''.join(seen)}")


def server_of(trainer: int) -> int:
    """The process id of the embedded server that `trainer` started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, status = (path / "cmdline").read_bytes(), (path / "status").read_text()
        except OSError:
            continue
        if b"arl.engine.local" in command and f"\nPPid:\t{trainer}\n" in status:
            return int(path.name)
    raise AssertionError("no embedded server is running")


def check(run_dir: Path) -> int:
    version = Checkpoints(run_dir / "checkpoints", 2, {}).newest_version()
    if version is None:
        return 0
    directory = run_dir / "checkpoints" / f"version-{version:08d}"
    state = json.loads((directory / "state.json").read_text())
    with (directory / "groups.npz").open("rb") as file:
        waiting = {group.example_id for group in read_groups(file)}
    rows = [row for row in read_jsonl(run_dir / "trajectories.jsonl") if row["version"] <= version]
    groups = {(row["version"], row["group_id"]): tuple(row["example_id"]) for row in rows}
    assert len(groups) == len(set(groups.values())) == SETTINGS["rollout.batch_size"] * version
    seen = [[index for (v, _), (_, index) in groups.items() if v == number] for number in range(1, version + 1)]
    check_ledger(state["rollout"]["ledger"], seen, waiting, NUM_EXAMPLES)
    return version


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["trainer", "server"])
def test_killed_at_random_moments(tmp_path: Path, victim: str) -> None:
    model, run_dir = write_tiny_model(tmp_path / "model", ["Say a number"]), tmp_path / "run"
    moments, versions = random.Random(victim), [0]
    for _ in range(4):
        with start(model, run_dir, steps=10**6) as process:
            until_it_trains(process)
            time.sleep(moments.uniform(0, 1.5))
            os.kill(process.pid if victim == "trainer" else server_of(process.pid), signal.SIGKILL)
            said, _ = process.communicate(timeout=120)
        assert process.returncode == (-signal.SIGKILL if victim == "trainer" else 1), said
        versions.append(check(run_dir))
    assert versions == sorted(versions)
    steps = versions[-1] + 3
    with start(model, run_dir, steps) as process:
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert check(run_dir) == steps
    assert steps * SETTINGS["rollout.batch_size"] > NUM_EXAMPLES

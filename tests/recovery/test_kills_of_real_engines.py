"""kill -9 of trainer, rank and embedded server, on the real engines, at random moments; run again until done."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from real_life import NUM_EXAMPLES
from recovery.invariants import check_ledger, newest_checkpoint

from arl.engine.tiny import write_tiny_model
from arl.training.run_files import read_jsonl

HERE = Path(__file__).parent
MARK = "ARL_TEST_RUN"
COMMANDS = {"trainer": b"real_life.py", "server": b"arl.engine.local", "rank": b"ray::RankActor"}
SETTINGS = {
    "rollout.batch_size": 2,
    "rollout.group_size": 2,
    "rollout.max_staleness": 1,
    "checkpoint.every": 1,
    "engine.max_restarts": 0,
}


def start(model: Path, run_dir: Path, steps: int, num_ranks: int) -> "subprocess.Popen[str]":
    paths = f"{HERE.parents[1]}:{HERE.parent}"
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", MARK: str(run_dir)}
    settings = {"model": model, "run_dir": run_dir, "steps": steps, "train.num_ranks": num_ranks, **SETTINGS}
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


def process_of(run_dir: Path, command: bytes) -> int:
    """The process id of one of the run's processes, by a part of its command line."""
    mark = f"{MARK}={run_dir}\0".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if command in (path / "cmdline").read_bytes() and mark in (path / "environ").read_bytes():
                return int(path.name)
        except OSError:
            continue
    raise AssertionError(f"no process of the run is called {command!r}")


def check(run_dir: Path) -> int:
    version, directory = newest_checkpoint(run_dir)
    if version == 0:
        return 0
    rows = [row for row in read_jsonl(run_dir / "trajectories.jsonl") if row["version"] <= version]
    groups = {(row["version"], row["group_id"]): tuple(row["example_id"]) for row in rows}
    assert len(groups) == len(set(groups.values())) == SETTINGS["rollout.batch_size"] * version
    seen = [[index for (v, _), (_, index) in groups.items() if v == number] for number in range(1, version + 1)]
    check_ledger(directory, seen, NUM_EXAMPLES)
    return version


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["trainer", "server", "rank"])
def test_killed_at_random_moments(tmp_path: Path, victim: str):
    model, run_dir = write_tiny_model(tmp_path / "model", ["Say a number"]), tmp_path / "run"
    num_ranks = 2 if victim == "rank" else 1
    moments, versions = random.Random(victim), [0]
    for _ in range(3):
        with start(model, run_dir, 10**6, num_ranks) as process:
            until_it_trains(process)
            time.sleep(moments.uniform(0, 1.5))
            os.kill(process_of(run_dir, COMMANDS[victim]), signal.SIGKILL)
            said, _ = process.communicate(timeout=120)
        assert process.returncode == (-signal.SIGKILL if victim == "trainer" else 1), said
        versions.append(check(run_dir))
    assert versions == sorted(versions)
    steps = max(versions[-1] + 3, NUM_EXAMPLES // SETTINGS["rollout.batch_size"] + 1)  # into the second epoch
    with start(model, run_dir, steps, num_ranks) as process:
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert check(run_dir) == steps

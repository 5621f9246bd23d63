"""kill -9 at any moment, and the same command again: no example is trained twice, none is lost."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arl.api.types import Group
from arl.training.checkpoint import Checkpoints, read_groups
from arl.training.run_files import read_jsonl

HERE = Path(__file__).parent
NUM_EXAMPLES, BATCH_SIZE = 17, 2


class Lives:
    """Runs lives of one run_dir, one after another."""

    def __init__(self, process: "subprocess.Popen[str]", run_dir: Path) -> None:
        self.run_dir = run_dir
        self._process = process

    def begin(self, steps: int, killed_at: int | None = None) -> int:
        """Start a life, which ends before its file operation number `killed_at`; returns its process id."""
        assert self._process.stdin is not None
        life = {"run_dir": str(self.run_dir), "steps": steps, "killed_at": killed_at}
        self._process.stdin.write(json.dumps(life) + "\n")
        self._process.stdin.flush()
        return self._number()

    def end(self) -> int:
        """Wait for its end; returns its exit code, -9 where it was killed."""
        return self._number()

    def _number(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


@pytest.fixture(scope="module")
def server() -> Iterator["subprocess.Popen[str]"]:
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent.parent}:{HERE.parent}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "lives.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        process.kill()


@pytest.fixture
def lives(server: "subprocess.Popen[str]", tmp_path: Path) -> Lives:
    return Lives(server, tmp_path / "run")


def newest_checkpoint(run_dir: Path) -> tuple[int, Path]:
    """Its version, 0 without one."""
    version = Checkpoints(run_dir / "checkpoints", 2, {}).newest_version() or 0
    return version, run_dir / "checkpoints" / f"version-{version:08d}"


def check(run_dir: Path) -> int:
    """What the newest checkpoint says agrees with itself and with the logs; returns its version, 0 without one."""
    version, directory = newest_checkpoint(run_dir)
    if version == 0:
        return 0
    for path in (run_dir / "checkpoints").glob("version-*"):
        files = {str(file.relative_to(path)) for file in path.rglob("*.*")}
        assert files == {"state.json", "groups.npz", "replay.npz", "engine/engine.json"}, (
            "half of a checkpoint has a name"
        )
    seen = json.loads((directory / "engine" / "engine.json").read_text())["seen"]
    assert len(seen) == version
    ledger = check_ledger(directory, seen, NUM_EXAMPLES)
    with (directory / "replay.npz").open("rb") as file:
        check_replay(ledger, read_groups(file), version)
    check_logs(run_dir, seen)
    return version


def check_ledger(checkpoint: Path, seen: list[list[int]], num_examples: int) -> dict[str, Any]:
    """Each example of an epoch ended once or is pending; those that ended as trained are what the weights have seen."""
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["version"] == len(seen)
    ledger = state["rollout"]["ledger"]
    with (checkpoint / "groups.npz").open("rb") as file:
        waiting = {group.example_id for group in read_groups(file)}
    pending = {(epoch, index) for epoch, index, _ in ledger["pending"]}
    open_ones = {(epoch, i) for epoch, marks in enumerate(ledger["outcomes"]) for i, m in enumerate(marks) if m == "."}
    assert waiting <= pending <= open_ones
    assert all(epoch == ledger["epoch"] for epoch, _ in open_ones - pending), "an example of a past epoch is lost"
    assert num_examples - ledger["position"] == len(open_ones - pending), "an example of this epoch is lost"
    trained = Counter(i for marks in ledger["outcomes"] for i, mark in enumerate(marks) if mark == "t")
    assert trained == Counter(number for batch in seen for number in batch)
    return ledger


def check_replay(ledger: dict[str, Any], groups: list[Group], version: int) -> None:
    """What may be trained again was trained, and can be in the next batch."""
    assert all(ledger["outcomes"][epoch][index] == "t" for epoch, index in (group.example_id for group in groups))
    assert all(version - group.oldest_version <= 4 for group in groups)
    assert len({group.group_id for group in groups}) == len(groups)


def check_logs(run_dir: Path, seen: list[list[int]]) -> None:
    metrics, trajectories = (read_jsonl(run_dir / f"{name}.jsonl") for name in ("metrics", "trajectories"))
    logged = [row["version"] for row in metrics]
    assert logged == list(range(1, len(logged) + 1))
    assert len(logged) >= len(seen)
    groups: dict[int, tuple[int, int]] = {}
    for version, batch in enumerate(seen, start=1):
        new = {r["group_id"]: tuple(r["example_id"]) for r in trajectories if r["version"] == version}
        assert sorted(index for _, index in new.values()) == batch
        assert not new.keys() & groups.keys(), "a group was trained twice"
        groups |= new
    assert len(groups) == len(set(groups.values())), "an example of an epoch was trained twice"


def test_killed_before_each_operation_on_a_file(lives: Lives):
    """From the first of a start, over two checkpoints that are written and the older ones that are deleted."""
    versions = [0]
    for operation in range(60):
        lives.begin(steps=10**6, killed_at=operation)
        assert lives.end() == -signal.SIGKILL
        versions.append(check(lives.run_dir))
    assert versions == sorted(versions)
    steps = versions[-1] + 5
    lives.begin(steps)
    assert lives.end() == 0
    assert check(lives.run_dir) == steps
    assert any(row["replayed_groups"] for row in read_jsonl(lives.run_dir / "metrics.jsonl"))
    assert steps * BATCH_SIZE > 2 * NUM_EXAMPLES, "it never came to a third epoch"

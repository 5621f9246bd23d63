"""kill -9 at any moment, and the same command again: no example is trained twice, none is lost."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import Nursery
from recovery.invariants import check_ledger, newest_checkpoint, trained_batches
from recovery.lives import seen_of

from arl.api.types import Group
from arl.observe.events.image_store import ImageStore
from arl.observe.events.run_record import read_run
from arl.training.batch_codec import read_groups
from arl.training.metrics_log import read_jsonl

HERE = Path(__file__).parent
NUM_EXAMPLES, GROUP_SIZE, BATCH_SIZE = 17, 2, 2


class Lives:
    """Runs lives of one run_dir, one after another."""

    def __init__(self, nursery: Nursery, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._nursery = nursery

    def begin(self, steps: int, killed_at: int | None = None) -> int:
        """Start a life, which ends before its file operation number `killed_at`; returns its process id."""
        self._life = self._nursery.fork("lives:main", {"run_dir": self.run_dir, "steps": steps, "killed_at": killed_at})
        return self._life.pid

    def end(self) -> int:
        """Wait for its end; returns its exit code, -9 where it was killed."""
        return self._life.code.result(timeout=60)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery(["lives"], [HERE]) as nursery:
        yield nursery


@pytest.fixture
def lives(nursery: Nursery, tmp_path: Path) -> Lives:
    return Lives(nursery, tmp_path / "run")


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
        check_replay(ledger, read_groups(file, ImageStore(run_dir).image), version)
    check_logs(run_dir, seen)
    return version


def check_replay(ledger: dict[str, Any], groups: list[Group], version: int) -> None:
    """What may be trained again was trained, and can be in the next batch."""
    assert all(ledger["outcomes"][epoch][index] == "t" for epoch, index in (group.example_id for group in groups))
    assert all(version - group.oldest_version <= 4 for group in groups)
    assert len({group.group_id for group in groups}) == len(groups)
    assert all(t.images == seen_of(group.example_id[1]) for group in groups for t in group.trajectories)


def check_logs(run_dir: Path, seen: list[list[int]]) -> None:
    """The event log holds what the checkpoint counts on, token by token."""
    logged = [row["version"] for row in read_jsonl(run_dir / "metrics.jsonl")]
    assert logged == list(range(1, len(logged) + 1))
    assert len(logged) >= len(seen)
    run = read_run(run_dir)
    batches = trained_batches(run)
    assert len(batches) >= len(seen)
    for batch, examples in zip(batches, seen, strict=False):
        assert sorted(group.row for group in batch) == examples
        for group in batch:
            tokens = [found for episode in group.episodes for found in run.tokens(episode)]
            assert [found.columns["token_ids"].tolist() for found in tokens] == [[1, group.row, 7, 8, 9]] * GROUP_SIZE


@pytest.mark.runs
def test_killed_before_each_operation_on_a_file(lives: Lives):
    """From the first of a start, over two checkpoints that are written and the older ones that are deleted."""
    versions = [0]
    for operation in range(90):
        lives.begin(steps=10**6, killed_at=operation)
        assert lives.end() == -signal.SIGKILL
        versions.append(check(lives.run_dir))
    assert versions == sorted(versions)
    steps = max(versions[-1] + 5, NUM_EXAMPLES + 1)
    lives.begin(steps)
    assert lives.end() == 0
    assert check(lives.run_dir) == steps
    assert any(row["replayed_groups"] for row in read_jsonl(lives.run_dir / "metrics.jsonl"))
    assert steps * BATCH_SIZE > 2 * NUM_EXAMPLES, "it never came to a third epoch"

"""kill -9 at any moment, and the same command again: no example is trained twice, none is lost."""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import Nursery
from recovery.invariants import check_ledger, newest_checkpoint, trained_batches
from recovery.lives import BATCH_SIZE, FIRST_NUMBER, GROUP_SIZE, NUM_EXAMPLES, SIZES, WEIGHTS, seen_of

from arl.api.types import Group
from arl.observe.events.image_store import ImageStore
from arl.observe.events.run_record import read_run
from arl.rollout.ledger import ExampleLedger
from arl.training.batch_codec import read_groups
from arl.training.metrics_log import read_jsonl

HERE = Path(__file__).parent


class Lives:
    """Runs lives of one run_dir, one after another."""

    def __init__(self, nursery: Nursery, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._nursery = nursery
        self._log = run_dir.with_name("log")

    def begin(self, steps: int, killed_at: int | None = None, *, has_tasks: bool = False) -> None:
        """Start a life, which ends before its file operation number `killed_at`."""
        how = {"run_dir": self.run_dir, "steps": steps, "killed_at": killed_at, "has_tasks": has_tasks}
        self._life = self._nursery.fork("lives:main", how, self._log)

    def end(self) -> int:
        """Wait for its end; returns its exit code, -9 where it was killed."""
        try:
            code = self._life.code.result(timeout=60)
        except TimeoutError:
            os.kill(self._life.pid, signal.SIGABRT)  # it writes where it is
            code = self._life.code.result(timeout=60)
        assert code in (0, -signal.SIGKILL), f"it ended with {code}:\n{self._log.read_text()}"
        return code


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
@pytest.mark.timeout(600)
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


# Two tasks


def check_tasks(run_dir: Path) -> int:
    """Of a run of two tasks: the newest checkpoint agrees with the weights and with the event log."""
    version, directory = newest_checkpoint(run_dir)
    if version == 0:
        return 0
    seen = json.loads((directory / "engine" / "engine.json").read_text())["seen"]
    state = json.loads((directory / "state.json").read_text())["rollout"]["ledger"]
    assert len(seen) == version
    with (directory / "groups.npz").open("rb") as file:
        waiting = read_groups(file, ImageStore(run_dir).image)
    for name in SIZES:
        check_task(name, state["tasks"][name], [n for batch in seen for n in batch], waiting)
    check_shares(state)
    check_log(run_dir, seen)
    return version


def check_task(name: str, state: dict[str, Any], seen: list[int], waiting: list[Any]) -> None:
    """Each of its examples ended once or is pending; those that are trained are what the weights have seen."""
    ledger = ExampleLedger(SIZES[name], shuffle=True, seed=f"0-{name}", task=name)
    ledger.load_state_dict(state)
    first = FIRST_NUMBER[name]
    trained, begun = Counter[int](), 0
    for epoch in range(len(state["epochs"])):
        outcomes = ledger.outcomes(epoch)
        ended = [index for indices in outcomes.values() for index in indices]
        assert len(set(ended)) == len(ended)
        begun += len(ended)
        trained.update(first + index for index in outcomes["t"])  # pyright: ignore[reportArgumentType]
    own = Counter(n for n in seen if first <= n < first + SIZES[name])
    assert trained == own
    pending = [tuple(one[:2]) for one in state["pending"]]
    assert len(set(pending)) == len(pending)
    assert begun + len(pending) == state["epoch"] * SIZES[name] + state["position"], "an example is lost"
    assert {group.example_id for group in waiting if group.task == name} <= set(pending)


def check_shares(state: dict[str, Any]) -> None:
    """Each task was handed out its share of the groups, to within one."""
    number, total = state["tasks"]["long"]["next_group_id"], sum(WEIGHTS.values())
    handed_out = {name: one["num_groups"] for name, one in state["fared"].items()}
    assert sum(handed_out.values()) == number
    assert all(abs(handed_out[name] - number * WEIGHTS[name] / total) < 1 for name in WEIGHTS)


def check_log(run_dir: Path, seen: list[list[int]]) -> None:
    groups = [group for group in read_run(run_dir).groups if group.step is not None]
    assert len({group.group for group in groups}) == len(groups)
    examples = [(group.task, group.epoch, group.row) for group in groups]
    assert len(set(examples)) == len(examples), "an example of an epoch was trained twice"
    for version, batch in enumerate(seen, start=1):
        of_step = [FIRST_NUMBER[group.task] + group.row for group in groups if group.step == version]
        assert sorted(of_step) == batch


@pytest.mark.runs
def test_a_run_of_tasks_that_is_killed_again_and_again_loses_and_repeats_nothing(lives: Lives) -> None:
    """Each task keeps its share."""
    versions = [0]
    for killed_at in (105, 68, 78, 92, 135):
        lives.begin(10**6, killed_at, has_tasks=True)
        assert lives.end() == -signal.SIGKILL
        versions.append(check_tasks(lives.run_dir))
    assert versions == sorted(versions)
    assert versions[-1] > 2
    lives.begin(versions[-1] + 20, has_tasks=True)
    assert lives.end() == 0
    assert check_tasks(lives.run_dir) == versions[-1] + 20

"""kill -9 of a run of two tasks, and the same again: each task keeps its share, and its examples end once."""

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from nursery import Nursery
from recovery.invariants import newest_checkpoint
from recovery.task_lives import FIRST_NUMBER, SIZES, WEIGHTS

from arl.observe.events.image_store import ImageStore
from arl.observe.events.run_record import read_run
from arl.rollout.ledger import ExampleLedger
from arl.training.batch_codec import read_groups

HERE = Path(__file__).parent


def check(run_dir: Path) -> int:
    """The newest checkpoint agrees with the weights and with the event log; returns its version."""
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
def test_a_run_of_tasks_that_is_killed_again_and_again_loses_and_repeats_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with Nursery(["task_lives"], [HERE]) as nursery:

        def live(steps: int, killed_at: int | None) -> int:
            arguments = {"run_dir": run_dir, "steps": steps, "killed_at": killed_at}
            return nursery.fork("task_lives:main", arguments).code.result(timeout=60)

        versions = [0]
        for killed_at in (105, 68, 78, 92, 135):
            assert live(10**6, killed_at) == -signal.SIGKILL
            versions.append(check(run_dir))
        assert versions == sorted(versions)
        assert versions[-1] > 2
        assert live(versions[-1] + 20, None) == 0
        assert check(run_dir) == versions[-1] + 20

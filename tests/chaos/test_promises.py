"""The campaign's checks hold of a run that nothing hit, and notice what a fault might do to one."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from life import NUM_EXAMPLES, TwoTurns
from promises import check_end, check_output, check_run_dir, rows_of
from recovery.invariants import newest_checkpoint
from scripted_launch import small, use_fakes

import arl.assembly
from arl.api.scripted import ScriptedEngine


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of 6 steps."""

    async def train() -> None:
        examples = [{"number": n} for n in range(NUM_EXAMPLES)]
        async with arl.assembly.launch(config, workflow=TwoTurns(has_workers=False), dataset=examples) as trainer:
            _ = [step async for step in trainer]

    run_dir = tmp_path_factory.mktemp("whole") / "run"
    config = small(run_dir, steps=6, log={"trajectories": 100})
    with pytest.MonkeyPatch.context() as patch:
        use_fakes(patch, ScriptedEngine(lambda request: (7, 8, 9, 7, 8)))
        patch.setattr(arl.assembly, "decoder", lambda model: None)
        asyncio.run(train())
    return run_dir


def changed(name: str, change: Callable[[list[dict[str, Any]]], None]) -> Callable[[Path], None]:
    """A change of the lines of one of the run's logs."""

    def act(run_dir: Path) -> None:
        path = run_dir / f"{name}.jsonl"
        rows = rows_of(path)
        change(rows)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return act


def trained_again(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["version"] == 4:
            row["example_id"] = next(other["example_id"] for other in rows if other["version"] == 2)


def of_the_future(rows: list[dict[str, Any]]) -> None:
    rows[0]["versions"][-1] = 999


def lost(run_dir: Path) -> None:
    """The checkpoint takes an example for handed out that never ran."""
    file = newest_checkpoint(run_dir)[1] / "state.json"
    state = json.loads(file.read_text())
    state["rollout"]["ledger"]["position"] += 1
    file.write_text(json.dumps(state))


def test_nothing_is_wrong_with_a_run_that_nothing_hit(whole: Path) -> None:
    version, outcomes = check_run_dir(whole, batch_size=2, max_staleness=2)
    assert (version, outcomes["t"]) == (6, 12)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (changed("metrics", lambda rows: rows.append(rows[-1])), "metrics.jsonl has the versions"),
        (changed("metrics", lambda rows: rows.pop(2)), "metrics.jsonl has the versions"),
        (changed("metrics", lambda rows: rows[3].update(loss=float("nan"))), "metrics that are no numbers: .'loss'"),
        (changed("trajectories", trained_again), "an example of an epoch was trained twice"),
        (changed("trajectories", lambda rows: rows.__delitem__(slice(0, 2))), "a trained group is missing"),
        (changed("trajectories", of_the_future), r"has tokens of the versions \[0, 999\]"),
        (lost, "an example of this epoch is lost"),
    ],
)
def test_a_fault_is_noticed(whole: Path, fault: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    run_dir = shutil.copytree(whole, tmp_path / "run")
    fault(run_dir)
    with pytest.raises(AssertionError, match=said):
        check_run_dir(run_dir, batch_size=2, max_staleness=2)


def test_a_traceback_in_the_output_is_noticed() -> None:
    check_output("error: no server took version 5\n")
    with pytest.raises(AssertionError, match="never retrieved"):
        check_output("trained 1\nFuture exception was never retrieved\n")


def test_a_run_that_says_another_end_than_it_had_is_noticed(whole: Path) -> None:
    check_end(whole, 0)
    with pytest.raises(AssertionError, match="ended with 143 and says that it has finished"):
        check_end(whole, 143)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("own", "trainer: SIGKILL"),
        ("own", "learner: SIGKILL"),
        ("own", "server of arl's: SIGKILL"),
        ("ranks", "rank: SIGKILL"),
    ],
)
def test_a_run_keeps_all_promises_however_often_one_of_its_processes_is_killed(place: str, fault: str) -> None:
    options = ["--seed", "0", "--run", "0", "--faults", "6", "--places", place, "--only", fault]
    command = [sys.executable, str(Path(__file__).parent / "campaign.py"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(rf"^{fault} +[1-9]", ended.stdout, re.MULTILINE), ended.stdout

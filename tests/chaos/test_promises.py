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

import msgspec
import pyarrow as pa
import pytest
from life import NUM_EXAMPLES, TwoTurns
from promises import check_end, check_error, check_output, check_run_dir, rows_of
from recovery.invariants import newest_checkpoint
from scripted_launch import small, use_fakes

import arl.run.launch
from arl.api.events import BatchTrained, EpisodeEnded, GroupAdmitted, TokensCounted, TokensKept
from arl.api.fakes import ScriptedEngine
from arl.observe.events.batches import packed, records_batch
from arl.observe.events.files import LogFiles
from arl.observe.events.run_record import read_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of 6 steps."""

    async def train() -> None:
        examples = [{"number": n} for n in range(NUM_EXAMPLES)]
        async with arl.run.launch.launch(config, workflow=TwoTurns(has_workers=False), dataset=examples) as trainer:
            _ = [step async for step in trainer]

    run_dir = tmp_path_factory.mktemp("whole") / "run"
    config = small(run_dir, steps=6)
    with pytest.MonkeyPatch.context() as patch:
        use_fakes(patch, ScriptedEngine(lambda request: (7, 8, 9, 7, 8)))
        asyncio.run(train())
    return run_dir


def changed_metrics(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Path], None]:
    def act(run_dir: Path) -> None:
        path = run_dir / "metrics.jsonl"
        rows = rows_of(path)
        change(rows)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return act


def changed_log(change: Callable[[list[Any]], object]) -> Callable[[Path], None]:
    """A change of the records in the event log's table of events."""

    def act(run_dir: Path) -> None:
        directory = run_dir / "events"
        records = [record for _, record in LogFiles(directory).new_records()]
        change(records)
        batch = records_batch("events", [msgspec.json.encode(record) for record in records])
        (directory / "events-0001-0001.arrows").write_bytes(packed(batch))

    return act


def changed_tokens(name: str, value: float) -> Callable[[Path], None]:
    """The last entry of a column of one trained trajectory is another."""

    def act(run_dir: Path) -> None:
        directory = run_dir / "events"
        episode = next(episode for episode in read_run(run_dir).episodes if episode.step == 2)
        life, segment, offset, place = episode.places[0]
        batch = LogFiles(directory).tokens(life, segment, offset)
        column, at = batch.column(name).to_pylist(), batch.schema.get_field_index(name)
        column[place][-1] = value
        batch = batch.set_column(at, batch.schema.field(at), pa.array(column, batch.schema.field(at).type))
        (directory / "tokens-0001-0009.arrows").write_bytes(packed(batch))
        begin = len(batch.schema.serialize())
        names = [(row["episode"], row["trajectory"]) for row in batch.select(["episode", "trajectory"]).to_pylist()]
        changed_log(lambda records: records.append(TokensKept(segment=9, offset=begin, rows=names)))(run_dir)

    return act


def batch_of(records: list[Any], version: int) -> BatchTrained:
    return next(record for record in records if isinstance(record, BatchTrained) and record.version == version)


def group_trained_again(records: list[Any]) -> None:
    later = batch_of(records, 4)
    later.groups[0] = batch_of(records, 2).groups[0]


def example_trained_again(records: list[Any]) -> None:
    first, again = (batch_of(records, version).groups[0] for version in (2, 4))
    groups = {record.group: record for record in records if isinstance(record, GroupAdmitted)}
    place = records.index(groups[again])
    records[place] = msgspec.structs.replace(groups[again], row=groups[first].row, epoch=groups[first].epoch)


def without_tokens(records: list[Any]) -> None:
    group = batch_of(records, 3).groups[0]
    kept = next(record for record in records if isinstance(record, TokensKept) and (f"{group}.0", 0) in record.rows)
    kept.rows[kept.rows.index((f"{group}.0", 0))] = ("none", 0)


def without_an_end(records: list[Any]) -> None:
    name = f"{batch_of(records, 3).groups[0]}.0"
    records[:] = [r for r in records if not (isinstance(r, EpisodeEnded) and r.episode == name)]


def recount(records: list[Any], **changes: int) -> None:
    """Add to the numbers of the last record of the token ledger."""
    place = max(i for i, record in enumerate(records) if isinstance(record, TokensCounted))
    numbers = {name: getattr(records[place], name) + change for name, change in changes.items()}
    records[place] = msgspec.structs.replace(records[place], **numbers)


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
        (changed_metrics(lambda rows: rows.pop(2)), "metrics.jsonl has the versions"),
        (changed_metrics(lambda rows: rows[3].update(loss=float("nan"))), "metrics that are no numbers: .'loss'"),
        (changed_log(group_trained_again), "a group was trained twice"),
        (changed_log(example_trained_again), "an example of an epoch was trained twice"),
        (changed_log(lambda records: records.append(batch_of(records, 6))), "version 6 was trained twice"),
        (changed_log(lambda records: records.remove(batch_of(records, 3))), "the event log has the batches"),
        (changed_log(lambda records: records.remove(batch_of(records, 6))), "version 6, and the event log has 5"),
        (changed_log(lambda records: batch_of(records, 3).groups.pop()), "a trained group is missing"),
        (changed_log(without_tokens), "has no tokens"),
        (changed_log(without_an_end), "has an episode that is running"),
        (changed_tokens("versions", 999), r"has tokens of the versions \[\d, 999\]"),
        (changed_tokens("behavior_logprobs", 0.5), "has logprobs above 0, or none"),
        (changed_tokens("token_ids", 10_000), "has tokens beyond the vocabulary"),
        (lost, "an example of this epoch is lost"),
        (changed_log(lambda records: recount(records, received=1)), "the token ledger of life 1 does not close"),
        (
            changed_log(lambda records: recount(records, received=1, open=1)),
            r"received \d+ tokens, and its turns",
        ),
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


def test_a_run_that_ends_with_its_trainers_process_is_noticed() -> None:
    died = "error: in train_batch, rank 1 of 2 died. The train engine is closed"
    check_error(died, "")
    check_error("error: no server took version 5", "trained 1\n")
    for error in ("error: the trainer's process was ended by SIGKILL", died):
        with pytest.raises(AssertionError, match="a process that can be replaced"):
            check_error(error, "trained 1\n")


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

"""What arl promises of a run, whatever happens to it. A check raises AssertionError with the promise that is broken."""

import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from life import NUM_EXAMPLES, SEEN
from recovery.invariants import check_ledger, newest_checkpoint, trained_batches

from arl.api.events import Lost, RunEnded, TokensCounted, TurnEnded
from arl.observe.events.records import EpisodeRecord, GroupRecord
from arl.observe.events.run_record import RunRecord
from arl.training.run_result import how_it_ended

MARK = "ARL_CHAOS"
UNTIDY = (
    "Traceback (most recent call last)",
    "Task was destroyed",
    "never retrieved",
    "was never awaited",
    "Unclosed c",
    "ResourceWarning",
)
"""What no output of a run contains, however it ended."""
KEPT = r"arl-loading-\d+\.lock$"
"""What may stay in the temporary directory: a lock that all runs share."""
LARGEST_DIVERGENCE = 0.1
"""Weights hardly move in these runs. So sampler and trainer nearly agree on each token that a server really sampled."""


def promised(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Each line but a last one that was torn."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


GROUP_SIZE = 2


def check_run_dir(run_dir: Path, *, batch_size: int, max_staleness: int) -> tuple[int, Counter[str]]:
    """The newest checkpoint agrees with itself and with the logs; returns its version and how examples ended."""
    check_metrics(rows_of(run_dir / "metrics.jsonl"))
    version, directory = newest_checkpoint(run_dir)
    run = RunRecord(run_dir)
    run.update()
    check_received(run)
    batches = trained_batches(run)
    for batch in batches:
        assert len(batch) == batch_size, "a trained group is missing in the event log"
        for group in batch:
            check_group(run, group, version, max_staleness)
    assert len(batches) >= version, f"the checkpoint is of version {version}, and the event log has {len(batches)}"
    if version == 0:
        return 0, Counter()
    logged = [sorted(group.row for group in batch) for batch in batches[:version]]
    memory = directory / "engine" / SEEN
    seen = json.loads(memory.read_text()) if memory.exists() else logged
    assert [sorted(set(batch)) for batch in logged] == [sorted(set(batch)) for batch in seen], (
        "the weights have seen other examples than the log says"
    )
    ledger = check_ledger(directory, logged, NUM_EXAMPLES)
    return version, Counter(mark for marks in ledger["outcomes"] for mark in marks)


def check_metrics(rows: list[dict[str, Any]]) -> None:
    versions = [row["version"] for row in rows]
    assert versions == list(range(1, len(rows) + 1)), f"metrics.jsonl has the versions {versions}"
    for row in rows:
        numbers = {name: value for name, value in row.items() if isinstance(value, float)}
        odd = [name for name, value in numbers.items() if not math.isfinite(value)]
        assert not odd, f"version {row['version']} has metrics that are no numbers: {odd}"
        divergence = row.get("behavior_kl_proximal", 0.0)
        assert divergence < LARGEST_DIVERGENCE, (
            f"version {row['version']} trained tokens that its server did not sample so: {divergence=:.3f}"
        )


def check_received(run: RunRecord) -> None:
    """The token ledger closes at each step of each life, and has received what the turns of that life say."""
    before = 0
    for life in sorted(run.lives):
        own = [record for number, record in run.system if number == life]
        turns = [turn for turn in run.files.calls(0.0, math.inf, life) if isinstance(turn, TurnEnded)]
        is_whole = any(isinstance(r, RunEnded) for r in own) and not any(isinstance(r, Lost) for r in own)
        counted = [record for record in own if isinstance(record, TokensCounted)]
        for record in counted:
            where, sum_of_fates = f"the token ledger of life {life}", sum(t.tokens for t in record.fates.values())
            assert record.received == record.open + record.waiting + sum_of_fates, f"{where} does not close: {record}"
            logged = sum(turn.output for turn in turns if turn.t <= record.t)
            received = record.received - counted[0].received
            assert received == logged or (received > logged and not is_whole), (
                f"{where} has received {received} tokens, and its turns {logged}"
            )
        if counted:
            assert counted[0].received >= before, f"the token ledger of life {life} has forgotten an earlier life"
            before = counted[0].received


def check_group(run: RunRecord, group: GroupRecord, saved: int, max_staleness: int) -> None:
    """saved: the version of the newest checkpoint. A kill may take tokens of later ones."""
    assert group.step is not None
    episodes = sorted(episode.episode for episode in group.episodes)
    where = f"group {group.group} of version {group.step}"
    assert episodes == [f"{group.group}.{index}" for index in range(GROUP_SIZE)], f"{where} has the episodes {episodes}"
    for episode in group.episodes:
        assert episode.how == "finished", f"{where} has an episode that is {episode.how}"
        assert len(episode.trajectories) == 1, f"{where} has an episode of {len(episode.trajectories)} trajectories"
        assert episode.places or group.step > saved, f"{where} has no tokens"
        if episode.places:
            check_tokens(run, episode, f"episode {episode.episode} of version {group.step}", max_staleness)


def check_tokens(run: RunRecord, episode: EpisodeRecord, where: str, max_staleness: int) -> None:
    assert episode.group is not None
    assert episode.step is not None
    (tokens,) = run.tokens(episode)
    columns, is_sampled = tokens.columns, tokens.columns["loss_mask"]
    sampled, trained_at = columns["versions"][is_sampled].tolist(), episode.step - 1
    assert trained_at - max_staleness <= min(sampled) <= max(sampled) <= trained_at, (
        f"{where} has tokens of the versions {sorted(set(sampled))}"
    )
    assert episode.staleness == trained_at - min(sampled), f"{where} says that its staleness is {episode.staleness}"
    assert len(sampled) == 10, f"{where} has {len(sampled)} sampled tokens in place of 10"
    assert (columns["versions"][~is_sampled] == -1).all(), f"{where} has versions of tokens that were not sampled"
    assert columns["token_ids"][1] == episode.group.row, f"{where} has tokens of another example"
    assert (columns["behavior_logprobs"] <= 0).all(), f"{where} has logprobs above 0, or none"
    assert ((columns["token_ids"] >= 0) & (columns["token_ids"] < 10_000)).all(), (
        f"{where} has tokens beyond the vocabulary"
    )


def check_output(output: str) -> None:
    found = [line for line in output.splitlines() if any(sign in line for sign in UNTIDY)]
    assert not found, f"the output has {found[0]!r}"


def check_error(error: str, output: str) -> None:
    """The end of the trainer's process, or of its ranks, ends no run that has begun to train."""
    is_lost = re.match(r"error: (the trainer's process (was ended|ended|closed)|.*\brank \d+ of \d+ died)", error)
    assert not (is_lost and "trained" in output), f"the run ended with a process that can be replaced: {error}"


def check_end(run_dir: Path, code: int) -> None:
    """What it leaves says how it ended, unless it had no room. A signal may come before a start has taken run_dir."""
    end = how_it_ended(run_dir)
    how = end and end.how
    assert how != "running", f"END.json is missing and run.lock is held after the exit code {code}: {end}"
    assert code != 0 or how in ("finished", None), f"the run ended with 0 and says that it was {how}: {end}"
    is_stopped = code in (130, 138, 143)
    assert not (is_stopped and how == "finished"), f"the run ended with {code} and says that it has finished: {end}"


# What a run leaves on the machine.


def processes(mark: str) -> Iterator[tuple[int, str]]:
    """The id and the command line of each process that was started in this campaign."""
    wanted = f"{MARK}={mark}\0".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (path / "environ").read_bytes():
                yield int(path.name), (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue


def check_processes(
    mark: str, known: Callable[[], Collection[int]], *, meanwhile: Callable[[], None], patience_s: float = 90.0
) -> None:
    """known: those that may still run. Others get time to notice that their parent is gone; Ray's agents take it."""
    deadline = time.monotonic() + patience_s
    while left := {pid: command for pid, command in processes(mark) if pid not in known()}:
        assert time.monotonic() < deadline, f"processes are left: {left}"
        meanwhile()
        time.sleep(0.05)


def check_files(run_dir: Path, temporary: Path, pids: Collection[int]) -> None:
    """After the end of a run that was not killed last. pids: of all processes that trained."""
    checkpoints = [path.name for path in (run_dir / "checkpoints").iterdir()]
    assert all(re.fullmatch(r"version-\d{8}", name) for name in checkpoints), f"checkpoints/ holds {checkpoints}"
    owners = [re.match(r"arl-weights-.*-(\d+)-\w+", name) for name in os.listdir("/dev/shm")]
    left = [owner[0] for owner in owners if owner and int(owner[1]) in pids]
    assert not left, f"/dev/shm holds {left}"
    left = [name for name in os.listdir(temporary) if not re.match(KEPT, name)]
    assert not left, f"the temporary directory holds {left}"

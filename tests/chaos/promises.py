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
from recovery.invariants import check_ledger, newest_checkpoint

from arl.training.run_end import how_it_ended

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
OF_FORK_SERVER = "pymp-"
"""What stays, too, if a fork server was killed, and the process that started it before it noticed."""
LARGEST_DIVERGENCE = 0.1
"""Weights hardly move in these runs. So sampler and trainer nearly agree on each token that a server really sampled."""


def promised(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Each line but a last one that was torn."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def check_run_dir(run_dir: Path, *, batch_size: int, max_staleness: int) -> tuple[int, Counter[str]]:
    """The newest checkpoint agrees with itself and with the logs; returns its version and how examples ended."""
    check_metrics(rows_of(run_dir / "metrics.jsonl"))
    version, directory = newest_checkpoint(run_dir)
    trajectories = rows_of(run_dir / "trajectories.jsonl")
    for row in trajectories:
        check_tokens(row, max_staleness)
    if version == 0:
        return 0, Counter()
    kept = [row for row in trajectories if row["version"] <= version]
    groups = {(row["version"], row["group_id"]): tuple(row["example_id"]) for row in kept}
    assert len({group_id for _, group_id in groups}) == len(groups), "a group was trained twice"
    assert len(set(groups.values())) == len(groups), "an example of an epoch was trained twice"
    assert len(groups) == batch_size * version, "a trained group is missing in trajectories.jsonl"
    logged = [sorted(index for (v, _), (_, index) in groups.items() if v == n) for n in range(1, version + 1)]
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


def check_tokens(row: dict[str, Any], max_staleness: int) -> None:
    where = f"group {row['group_id']} of version {row['version']}"
    sampled = [version for version in row["versions"] if version >= 0]
    trained_at = row["version"] - 1
    assert trained_at - max_staleness <= min(sampled) <= max(sampled) <= trained_at, (
        f"{where} has tokens of the versions {sorted(set(sampled))}"
    )
    assert len(sampled) == 10, f"{where} has {len(sampled)} sampled tokens in place of 10"
    assert all(logprob <= 0 for logprob in row["behavior_logprobs"]), f"{where} has logprobs above 0, or none"
    assert all(0 <= token < 10_000 for token in row["token_ids"]), f"{where} has tokens beyond the vocabulary"


def check_output(output: str) -> None:
    found = [line for line in output.splitlines() if any(sign in line for sign in UNTIDY)]
    assert not found, f"the output has {found[0]!r}"


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


def check_files(run_dir: Path, temporary: Path, pids: Collection[int], *, had_fork_server_killed: bool) -> None:
    """After the end of a run that was not killed last. pids: of all processes that trained."""
    checkpoints = [path.name for path in (run_dir / "checkpoints").iterdir()]
    assert all(re.fullmatch(r"version-\d{8}", name) for name in checkpoints), f"checkpoints/ holds {checkpoints}"
    owners = [re.match(r"arl-weights-.*-(\d+)-\w+", name) for name in os.listdir("/dev/shm")]
    left = [owner[0] for owner in owners if owner and int(owner[1]) in pids]
    assert not left, f"/dev/shm holds {left}"
    kept = f"{KEPT}|{OF_FORK_SERVER}" if had_fork_server_killed else KEPT
    left = [name for name in os.listdir(temporary) if not re.match(kept, name)]
    assert not left, f"the temporary directory holds {left}"

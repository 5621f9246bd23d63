"""What the event log costs an episode, and how long `arl view` takes to open a run of many episodes.

    python benchmarks/events.py [--episodes 100000] [--turns 1 8]

The costs are CPU times of emitting (in a run, on the event loop), of packing tokens (in the trainer's process) and of
writing (in a thread beside the event loop). An episode has some turns of 12 trained tokens, and a reward. Then
`arl view` is started on the log, and asked over HTTP: for the list of runs, until all is read, for a page of the table
and for an episode.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from arl.api.events import (
    BatchTaken,
    BatchTrained,
    GroupAdmitted,
    GroupEnded,
    KeptTokens,
    RewardEnded,
    RunBegan,
    TrainedSummary,
)
from arl.api.settings.run import EventsConfig
from arl.api.types import ModelRequest, ModelResponse, Trajectory, TurnSpan
from arl.observe.events.batches import frames_of
from arl.observe.events.files import SegmentFiles
from arl.observe.events.writer import EventLog
from arl.rollout.episode_events import EpisodeReport

GROUP, BATCH = 8, 32
"""Episodes of a group, and groups of a batch."""
GIVEN, SAID = 20, 12
"""Tokens of a turn."""
COLUMNS = ("proximal_logprobs", "current_logprobs", "advantages", "weights", "clipped", "entropy")


def trajectory(num_turns: int, version: int, rng: np.random.Generator) -> Trajectory:
    turn, size = GIVEN + SAID, num_turns * (GIVEN + SAID)
    mask = np.tile(np.r_[np.zeros(GIVEN, bool), np.ones(SAID, bool)], num_turns)
    return Trajectory(
        token_ids=rng.integers(0, 30_000, size, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=(-rng.random(size) * mask).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        reward=float(rng.integers(0, 2)),
        turns=tuple(TurnSpan(start=i * turn + GIVEN, stop=(i + 1) * turn) for i in range(num_turns)),
        metrics={"tool_calls": 1.0},
    )


def write(run_dir: Path, num_episodes: int, num_turns: int) -> tuple[float, float, float]:
    """Write the log of a run; returns the microseconds of CPU an episode, of emitting, packing tokens and writing."""
    rng, emitting, packing, writing, number = np.random.default_rng(0), 0.0, 0.0, 0.0, 0
    log = EventLog(run_dir, EventsConfig(max_gb=100.0))
    files = SegmentFiles(log.directory, 10**12)
    log.emit(RunBegan(version=0, arl="0", host="h", pid=1, workflow="W", num_examples=9, settings={"steps": 1}))
    made = [trajectory(num_turns, 3, rng) for _ in range(64)]
    said = (3,) * SAID
    response = ModelResponse(
        output_ids=said, output_logprobs=(-0.5,) * SAID, output_versions=said, stop_reason="stop", server="http://a:1"
    )
    requests = [ModelRequest(input_ids=range(1, 21)) for _ in range(64)]
    values = {name: rng.random(BATCH * GROUP * num_turns * SAID).astype(np.float32) for name in COLUMNS}
    while number < num_episodes:
        began = time.thread_time()
        groups = range(number // GROUP, number // GROUP + BATCH)
        trained: list[TrainedSummary] = []
        rows: list[tuple[str, int, Trajectory]] = []
        for group in groups:
            log.emit(GroupAdmitted(group=group, epoch=0, row=group, stamp=0, example={"question": "What is 1 + 1?"}))
            for index in range(GROUP):
                report = EpisodeReport(log, f"{group}.{index}")
                report.begin()
                for _ in range(num_turns):
                    report.answered(requests[number % 64], response, 0.1)
                log.emit(RewardEnded(episode=report.episode, reward="NumericMatch", seconds=1e-4, value=1.0))
                report.end((made[number % 64],), made[number % 64].reward, 1, None)
                rows.append((report.episode, 0, made[number % 64]))
                trained.append(TrainedSummary(report.episode, 0, 0.5, 1.25, 0.125, 0.75))
                number += 1
            log.emit(GroupEnded(group=group, outcome="kept"))
        step = number // GROUP // BATCH
        log.emit(BatchTaken(version=step - 1, groups=list(groups), waited_s=0.1))
        log.emit(BatchTrained(version=step, groups=list(groups), seconds=0.5, trajectories=trained))
        emitted = time.thread_time()
        tokens = [*frames_of([KeptTokens(rows=rows, trained=values)])]
        packed = time.thread_time()
        for frame in tokens:
            log.keep(frame)
        log._write(files)
        emitting, packing, writing = (
            emitting + emitted - began,
            packing + packed - emitted,
            writing + time.thread_time() - packed,
        )
    files.close()
    return 1e6 * emitting / number, 1e6 * packing / number, 1e6 * writing / number


def get(address: str, path: str) -> object:
    with urllib.request.urlopen(f"{address}/api/{path}") as answer:
        return json.load(answer)


def timed(address: str, path: str) -> float:
    began = time.perf_counter()
    get(address, path)
    return time.perf_counter() - began


def look(run_dir: Path) -> dict[str, float]:
    """Seconds that `arl view` takes on the log, and its memory."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "arl", "view", str(run_dir), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            found = None
            while found is None:
                found = re.search(r"http://\S+", process.stdout.readline())
            address = found[0].rstrip("/")
            get(address, "runs")
            seconds = {"first answer": time.perf_counter() - began}
            while True:
                runs: list[dict[str, dict[str, int]]] = get(address, "runs")  # pyright: ignore[reportAssignmentType]
                loading = runs[0]["loading"]
                if loading["done"] >= loading["total"]:
                    break
                time.sleep(0.05)
            seconds["all read"] = time.perf_counter() - began
            seconds["table"] = timed(address, "runs/0/episodes?sort=reward&limit=100")
            seconds["an episode"] = timed(address, "runs/0/episodes/1/77.3")
            status = Path(f"/proc/{process.pid}/status").read_text()
            seconds["memory, MB"] = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1e3  # pyright: ignore[reportOptionalSubscript]
            return seconds
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 8])
    args = parser.parse_args()
    table = Table(box=None, header_style="bold")
    for name in ("turns", "emit, µs", "pack, µs", "write, µs", "MB", "first answer, s", "all read, s", "table, s",
                 "an episode, s", "memory, MB"):  # fmt: skip
        table.add_column(name, justify="right")
    for num_turns in args.turns:
        run_dir = Path(tempfile.mkdtemp())
        try:
            costs = write(run_dir, args.episodes, num_turns)
            size = sum(path.stat().st_size for path in (run_dir / "events").iterdir()) / 1e6
            seen = look(run_dir)
        finally:
            shutil.rmtree(run_dir)
        numbers = (*costs, size, *seen.values())
        table.add_row(str(num_turns), *(f"{number:.3g}" if number < 100 else f"{number:.0f}" for number in numbers))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()

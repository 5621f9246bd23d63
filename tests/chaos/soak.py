"""Runs at full speed for long: nothing may grow.

    python tests/chaos/soak.py --seconds 3600
    python tests/chaos/soak.py --seconds 300 --parts scripted

| part | is |
|---|---|
| real | the tiny training of the campaign on an embedded server, with workers, evaluations and checkpoints |
| scripted | the same loop over the official fakes: hundreds of steps a second |

They share the time. Each second they count memory, open files, threads, tasks and bytes in /dev/shm, and
compare the last quarter of the run with the second quarter.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

sys.path.insert(1, str(Path(__file__).parents[1]))

import pytest
from life import TwoTurns
from one_turn import OneTurn
from rich.console import Console
from rich.table import Table
from scripted_launch import small, use_fakes

import arl.run.launch
from arl.api.fakes import ScriptedEngine, ScriptedTrainEngine
from arl.api.settings.run import Config
from arl.api.types import ModelRequest
from arl.engine.tiny import TinyShape, write_tiny_model

PERIOD_S = 1.0
SLACK = {
    "rss_mib": (1.03, 8),
    "server_rss_mib": (1.03, 8),
    "files": (1.1, 4),
    "threads": (1.0, 1),
    "tasks": (1.1, 8),
    "shm_mib": (1.1, 1),
}
"""Of what is counted, the last quarter may be this many times the second quarter, and so much more."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a run holds at a moment."""

    rss_mib: float
    server_rss_mib: float
    """Of its servers and workers together."""
    files: int
    threads: int
    tasks: int
    shm_mib: float


def sample() -> Sample:
    children = list(descendants(os.getpid()))
    return Sample(
        rss_mib=rss_mib(os.getpid()),
        server_rss_mib=sum(map(rss_mib, children)),
        files=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        tasks=len(asyncio.all_tasks()),
        shm_mib=sum(path.stat().st_size for path in shared_files()) / 2**20,
    )


def descendants(pid: int) -> Sequence[int]:
    with suppress(OSError):
        files = Path(f"/proc/{pid}/task").glob("*/children")
        children = [int(word) for file in files for word in file.read_text().split()]
        return [*children, *(other for child in children for other in descendants(child))]
    return []


def rss_mib(pid: int) -> float:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0


def shared_files() -> Sequence[Path]:
    mine = f"-{os.getpid()}-"
    with suppress(OSError):  # it is removed meanwhile
        return [f for home in Path("/dev/shm").glob("arl-weights-*") if mine in home.name for f in home.rglob("*.*")]
    return []


async def watched(config: Config, workflow: TwoTurns | OneTurn, num_examples: int, seconds: float) -> list[Sample]:
    """Train for so long, and count each second."""
    samples: list[Sample] = []

    async def watch() -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            samples.append(sample())

    examples = [{"number": n} for n in range(num_examples)]
    async with arl.run.launch.launch(config, workflow=workflow, dataset=examples, eval_dataset=examples[:4]) as trainer:
        watching, deadline = asyncio.create_task(watch()), time.monotonic() + seconds
        async for _ in trainer:
            if time.monotonic() > deadline:
                break
        watching.cancel()
        sys.stdout.write(f"{trainer.version} steps\n")
    return samples


SETTINGS = {
    "steps": 10**9,
    "rollout": {"batch_size": 2, "group_size": 2, "max_staleness": 2, "max_concurrent_episodes": 16},
    "evaluation": {"every": 50},
    "checkpoint": {"every": 50},
    "train": {"optimizer": {"lr": 1e-6}},
}


def soak_real(directory: Path, seconds: float) -> list[Sample]:
    shape = TinyShape(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16)
    model = write_tiny_model(directory / "model", shape=shape)
    config = small(directory / "real", **{**SETTINGS, "model": str(model)})
    return asyncio.run(watched(config, TwoTurns(has_workers=True), 200, seconds))


def soak_scripted(directory: Path, seconds: float) -> list[Sample]:
    with pytest.MonkeyPatch.context() as patch:
        forgetful_fakes(patch)
        config = small(directory / "scripted", **SETTINGS)
        return asyncio.run(watched(config, OneTurn(), 1000, seconds))


def forgetful_fakes(patch: pytest.MonkeyPatch) -> None:
    """The official fakes without their memory of all requests and batches."""

    async def answer(_: ModelRequest) -> Sequence[int]:
        engine.requests.clear()
        await asyncio.sleep(random.expovariate(1000))
        return 7, 8, 9

    engine = ScriptedEngine(answer)
    train_engine = ScriptedTrainEngine(lambda _: train_engine.batches.clear())
    use_fakes(patch, engine, train_engine)


def grown(samples: Sequence[Sample], name: str, table: Table) -> list[str]:
    """A sentence for each count that grew; a row for each count."""
    quarter = len(samples) // 4
    faults: list[str] = []
    for count, (times, more) in SLACK.items():
        values = [asdict(one)[count] for one in samples]
        second, last = median(values[quarter : 2 * quarter]), median(values[-quarter:])
        table.add_row(name, count, f"{second:.1f}", f"{last:.1f}", f"{times:g} x + {more}")
        if last > times * second + more:
            faults.append(f"{name}: {count} grew from {second:.1f} in the second quarter to {last:.1f} in the last")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, help="of the soaks together")
    parser.add_argument("--parts", nargs="+", default=["real", "scripted"], choices=["real", "scripted"])
    args = parser.parse_args()
    table = Table(box=None, header_style="bold")
    for column in ("part", "what", "second quarter", "last quarter", "may be"):
        table.add_column(column, justify="left" if column in ("part", "what") else "right")
    faults: list[str] = []
    soaks = {"real": soak_real, "scripted": soak_scripted}
    with tempfile.TemporaryDirectory(prefix="arl-soak-") as directory:
        for part in args.parts:
            faults += grown(soaks[part](Path(directory), args.seconds / len(args.parts)), part, table)
    Console().print(table)
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()

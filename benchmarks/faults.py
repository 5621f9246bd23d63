"""Throughput under faults: three embedded servers, of which one is killed again and again, and requests that fail.

    python benchmarks/faults.py --seconds 60

Trains the tiny model of the tests' campaign twice for so long: in quiet, and with a share of all requests going wrong
while every `--kill-every` seconds one server is killed and, `--down` seconds later, started again. Prints the episodes
trained a second of both, their ratio, and the episodes that were lost. `--kinds hangs` lets requests hang in place of
failing; they cost a second or two each, so they weigh less the longer an episode takes: `--tool` lets each wait.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "chaos"))

from faulty_proxy import ANY_REQUEST
from life import NUM_EXAMPLES, TwoTurns
from nursery import Forked, Nursery
from rich.console import Console
from rich.table import Table

from arl.api.engine import Sampler
from arl.api.settings.run import Config
from arl.api.types import Example, Trajectory
from arl.engine.client.server_processes import reserved_ports
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.run.launch import launch
from arl.training.metrics_log import read_jsonl

TESTS = Path(__file__).parents[1] / "tests"
NUM_SERVERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    episodes_per_s: float
    lost: int
    """Episodes that failed for good, or whose group was dropped."""
    retried: int
    faults: int
    kills: int


@dataclass
class Servers:
    """Embedded servers behind proxies."""

    nursery: Nursery
    directory: Path
    model: Path
    ports: Sequence[int]
    processes: list[Forked] = field(default_factory=list)
    proxies: list[Forked] = field(default_factory=list)
    kills: int = 0

    @property
    def addresses(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports[NUM_SERVERS:]]

    async def start(self, rate: float, kinds: Sequence[str]) -> None:
        for index in range(NUM_SERVERS):
            self.processes.append(self._serve(index))
            target, port = f"http://127.0.0.1:{self.ports[index]}", self.ports[NUM_SERVERS + index]
            faults = {
                "waits": True,
                "rate": rate,
                "kinds": list(kinds),
                "seed": str(index),
                "log": self.directory / "faults.jsonl",
            }
            self.proxies.append(self.nursery.fork("life:relay", {"target": target, "port": port, **faults}))
        await asyncio.to_thread(self._until_they_listen)

    def _until_they_listen(self) -> None:
        while not all('"ready"' in self._log(index).read_text() for index in range(NUM_SERVERS)):
            time.sleep(0.05)

    def begin_faults(self) -> None:
        for proxy in self.proxies:
            os.kill(proxy.pid, signal.SIGUSR1)

    async def kill_in_turns(self, every_s: float, down_s: float) -> None:
        for index in itertools.cycle(range(NUM_SERVERS)):
            await asyncio.sleep(every_s - down_s)
            os.kill(self.processes[index].pid, signal.SIGKILL)
            self.kills += 1
            await asyncio.sleep(down_s)
            self.processes[index] = self._serve(index)

    def _serve(self, index: int) -> Forked:
        flags = ["--model", str(self.model), "--port", str(self.ports[index]), "--parent-pid", str(os.getpid())]
        return self.nursery.fork("life:serve", {"flags": flags}, self._log(index))

    def _log(self, index: int) -> Path:
        return self.directory / f"server-{index}.log"


@asynccontextmanager
async def served(directory: Path, model: Path, rate: float, kinds: Sequence[str]) -> AsyncIterator[Servers]:
    with reserved_ports(2 * NUM_SERVERS) as ports, Nursery(["life", "faulty_proxy"], [TESTS / "chaos"]) as nursery:
        servers = Servers(nursery, directory, model, ports)
        await servers.start(rate, kinds)
        yield servers


class Unhurried(TwoTurns):
    """Waits for a tool before it asks."""

    def __init__(self, tool_s: float) -> None:
        super().__init__(has_workers=False)
        self._tool_s = tool_s

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        await asyncio.sleep(random.uniform(0, 2 * self._tool_s))
        return await super().arun_episode(engine, data)


async def train(servers: Servers, args: argparse.Namespace, *, kill: bool) -> Outcome:
    """From the first step on, for args.seconds."""
    config = Config.model_validate(
        {
            "model": str(servers.model),
            "run_dir": servers.directory / "run",
            "steps": 10**9,
            "engine": {
                "kind": "sglang",
                "addresses": servers.addresses,
                "request_timeout_s": args.request_timeout,
                "update_timeout_s": 10,
            },
            "rollout": {"batch_size": 4, "group_size": 4, "max_staleness": 2, "max_concurrent_episodes": 48},
            "log": {"console": False},
        }
    )
    examples = [{"number": n} for n in range(NUM_EXAMPLES)]
    async with launch(config, workflow=Unhurried(args.tool), dataset=examples) as trainer:
        await anext(trainer)
        servers.begin_faults()
        killing = asyncio.create_task(servers.kill_in_turns(args.kill_every, args.down)) if kill else None
        began, episodes = time.monotonic(), 0
        async for step in trainer:
            episodes += step.num_episodes
            if time.monotonic() - began > args.seconds:
                break
        seconds = time.monotonic() - began
        if killing:
            killing.cancel()
        counters = step.metrics
    log = servers.directory / "faults.jsonl"
    return Outcome(
        episodes_per_s=episodes / seconds,
        lost=int(counters["episodes_failed"] + counters["episodes_dropped"]),
        retried=int(counters["episodes_retried"]),
        faults=len(read_jsonl(log)) if log.exists() else 0,
        kills=servers.kills,
    )


async def measure(args: argparse.Namespace, directory: Path) -> None:
    shape = TinyShape(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16)
    model = write_tiny_model(directory / "model", shape=shape)
    outcomes: dict[str, Outcome] = {}
    for name, rate in (("quiet", 0.0), ("faults", args.rate)):
        (directory / name).mkdir()
        async with served(directory / name, model, rate, args.kinds) as servers:
            outcomes[name] = await train(servers, args, kill=name == "faults")
    table = Table(box=None, header_style="bold")
    for column in ("run", "episodes/s", "lost", "retried", "bad requests", "kills"):
        table.add_column(column, justify="right")
    for name, o in outcomes.items():
        table.add_row(name, f"{o.episodes_per_s:.1f}", str(o.lost), str(o.retried), str(o.faults), str(o.kills))
    Console().print(table)
    ratio = outcomes["faults"].episodes_per_s / outcomes["quiet"].episodes_per_s
    print(f"ratio {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the two runs")
    parser.add_argument("--rate", type=float, default=0.01, help="the share of requests that go wrong")
    parser.add_argument("--kinds", nargs="+", default=["fails", "is cut", "its answer is lost"], choices=ANY_REQUEST)
    parser.add_argument("--kill-every", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--down", type=float, default=3.0, help="seconds until a killed server is started again")
    parser.add_argument("--tool", type=float, default=0.0, help="mean seconds that an episode waits for a tool")
    parser.add_argument("--request-timeout", type=float, default=10.0, help="engine.request_timeout_s")
    random.seed(0)
    with tempfile.TemporaryDirectory(prefix="arl-faults-") as directory:
        asyncio.run(measure(parser.parse_args(), Path(directory)))


if __name__ == "__main__":
    main()

"""Samples per second of whole runs: many short episodes, long answers, slow rewards, slow tools, async and sync.

    python benchmarks/samples.py [--workloads short long] [--max-staleness 4 0] [--seeds 0 1 2] [--target 0.4]
    python benchmarks/samples.py --workloads short --max-staleness 4 --events on off    # what the event log costs

Each run is a real one of `launch`, with the embedded server, on a Qwen3 of 75 thousand parameters made on the spot. A
question is a digit, and the reward is the share of the answer's tokens that are digits of the same parity. Runs of
one workload train equally many batches of the same examples, so their rewards compare. The CPU time of each process
is the operating system's, and says more than the wall clock where other programs run. The first steps do not count in
rates. "s to" is the time until the mean reward of ten steps reaches the target, without that of loading.

"at most" is what max_staleness allows if nothing but the waits of rewards and tools took time: a batch can be trained
only if the groups left behind are still fresh enough after it, so the slowest of (max_staleness + 1) batches' episodes
holds them all up.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from arl import load_tokenizer
from arl.api.settings.run import Config
from arl.api.types import Example, SamplingParams, StepStats
from arl.api.workflow import RolloutWorkflow
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.rewards import InlineReward
from arl.rollout.monitors import LagMonitor
from arl.run.launch import launch
from arl.workflow.agent import MultiTurnWorkflow, SingleTurnWorkflow

SHAPE = TinyShape(hidden_size=64, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16)
"""75,000 parameters with the 288 tokens of the tokenizer."""
SIGMA, UNCOUNTED_STEPS, LAST_STEPS = 1.0, 10, 10
"""sigma of lognormal waits; steps before rates are measured; steps of a mean reward, as that of the last ones."""
QUESTIONS = [f"Question {i}" for i in range(10)]
DIGITS = (re.compile("[02468]"), re.compile("[13579]"))
COLUMNS = (
    "samples/s", "at most", "tokens/s", "s to {target:g}", "reward mean / last", "staleness", "loop µs", "beside it",
    "trainer", "server", "lag p50 / p99, ms",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Workload:
    """groups, group_size: of a batch. reward_s, tool_s: mean seconds of a wait; a tool is called once an episode."""

    max_new_tokens: int = 4
    groups: int = 8
    group_size: int = 16
    reward_s: float = 0.0
    tool_s: float = 0.0
    steps: int = 200


WORKLOADS = {
    "short": Workload(),
    "long": Workload(max_new_tokens=64, groups=4, steps=100),
    "slow-reward": Workload(reward_s=0.05),
    "tool-200ms": Workload(tool_s=0.2, steps=100),
    "tool-1s": Workload(tool_s=1.0, steps=40),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run, or the medians of several. Rates are per second; CPU times in microseconds per sample."""

    samples: float
    tokens: float
    target_s: float
    """Infinite where it did not get there."""
    mean_reward: float
    """Of the whole run: how fast it learned."""
    reward: float
    """Of the last steps."""
    staleness: float
    loop_us: float
    """Of the thread with the event loop."""
    beside_us: float
    """Of all other threads of that process."""
    trainer_us: float
    """Of the trainer's process, if it has one: of every process but the server."""
    server_us: float
    lag_p50_ms: float
    lag_p99_ms: float


@dataclass(frozen=True)
class Clocks:
    """Seconds since some time: of the wall, and of the CPUs."""

    wall: float
    loop: float
    process: float
    trainer: float
    server: float

    @classmethod
    def read(cls) -> Clocks:
        servers, others = 0.0, 0.0
        for pid in descendants():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                cpu_s = cpu_seconds(pid)
            except OSError:  # it has just ended
                continue
            if b"arl.engine.local" in command:
                servers += cpu_s
            else:
                others += cpu_s
        return cls(time.perf_counter(), time.thread_time(), time.process_time(), others, servers)


def descendants() -> list[int]:
    """This process's children, and theirs."""
    found = [os.getpid()]
    for pid in found:
        for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, tasks.read_text().split())
    return found[1:]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def agent(workload: Workload, model: Path, seed: int) -> RolloutWorkflow:
    rng = random.Random(seed)

    async def wait(mean_s: float) -> None:
        await asyncio.sleep(rng.lognormvariate(math.log(mean_s) - SIGMA**2 / 2, SIGMA))

    def score(answer: str, data: Example) -> float:
        return len(DIGITS[data["parity"]].findall(answer)) / workload.max_new_tokens

    async def slow_score(answer: str, data: Example) -> float:
        await wait(workload.reward_s)
        return score(answer, data)

    async def tool(answer: str, data: Example, attempt: int) -> str:
        await wait(workload.tool_s)
        return data["question"]

    reward = slow_score if workload.reward_s else InlineReward(score)
    tokenizer, sampling = load_tokenizer(model), SamplingParams(max_new_tokens=workload.max_new_tokens)
    if workload.tool_s:
        return MultiTurnWorkflow(tokenizer, reward, sampling=sampling, feedback=tool, max_turns=2)
    return SingleTurnWorkflow(tokenizer, reward, sampling=sampling)


async def measure(
    workload: Workload, max_staleness: int, seed: int, events: str, args: argparse.Namespace, run_dir: Path
) -> Result:
    model = write_tiny_model(run_dir / "model", QUESTIONS, SHAPE, seed)
    config = Config.model_validate(
        {
            "model": str(model),
            "run_dir": run_dir / "run",
            "steps": args.steps or workload.steps,
            "seed": seed,
            "rollout": {
                "batch_size": workload.groups,
                "group_size": workload.group_size,
                "max_staleness": max_staleness,
            },
            "train": {"optimizer": {"lr": args.lr}, "num_threads": args.threads},
            "engine": {"num_threads": args.threads},
            "checkpoint": {"every_s": None},
            "log": {"console": False, **({} if events == "on" else {"events": None})},
        }
    )
    examples = [{"question": QUESTIONS[i % 10], "parity": i % 2} for i in range(1000)]
    lag = LagMonitor("the benchmark", period_s=0.005, keep=1_000_000)
    steps, tokens, began = list[StepStats](), 0.0, Clocks.read()
    workflow = agent(workload, model, seed)
    async with launch(config, workflow=workflow, dataset=examples) as trainer, asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(lag.run())
        async for step in trainer:
            steps.append(step)
            tokens += step.num_episodes * step.metrics["length/trained_tokens"]
            if len(steps) == UNCOUNTED_STEPS:
                began, tokens = Clocks.read(), 0.0
                lag.recent_s.clear()
        ended = Clocks.read()
        watching.cancel()
    samples, wall_s = sum(step.num_episodes for step in steps[UNCOUNTED_STEPS:]), ended.wall - began.wall
    lags, loop_s = sorted(lag.recent_s), ended.loop - began.loop
    return Result(
        samples=samples / wall_s,
        tokens=tokens / wall_s,
        target_s=seconds_to(args.target, steps),
        mean_reward=fmean(step.reward for step in steps),
        reward=fmean(step.reward for step in steps[-LAST_STEPS:]),
        staleness=fmean(step.mean_staleness for step in steps[UNCOUNTED_STEPS:]),
        loop_us=1e6 * loop_s / samples,
        beside_us=1e6 * (ended.process - began.process - loop_s) / samples,
        trainer_us=1e6 * (ended.trainer - began.trainer) / samples,
        server_us=1e6 * (ended.server - began.server) / samples,
        lag_p50_ms=1e3 * lags[len(lags) // 2],
        lag_p99_ms=1e3 * lags[int(len(lags) * 0.99)],
    )


def seconds_to(target: float, steps: Sequence[StepStats]) -> float:
    for i in range(LAST_STEPS, len(steps) + 1):
        if fmean(step.reward for step in steps[i - LAST_STEPS : i]) >= target:
            return steps[i - 1].metrics["time_s"]
    return math.inf


def bound(workload: Workload, max_staleness: int, steps: int = 400, seed: int = 0) -> float:
    """Samples/s of the workload if nothing but its waits took time; infinite without waits."""
    mean_s = workload.reward_s or workload.tool_s
    if not mean_s:
        return math.inf
    rng, now = random.Random(seed), 0.0
    running: list[tuple[int, float]] = []  # (deadline, when its slowest episode ends) of each group

    def can_be_left(groups: Sequence[tuple[int, float]], step: int) -> bool:
        return all(step + 1 + i // workload.groups <= deadline for i, (deadline, _) in enumerate(sorted(groups)))

    for step in range(steps):
        while len(running) < (max_staleness + 1) * workload.groups:
            waits = (rng.lognormvariate(math.log(mean_s) - SIGMA**2 / 2, SIGMA) for _ in range(workload.group_size))
            running.append((step + max_staleness, now + max(waits)))
        for now in sorted({max(now, end) for _, end in running}):
            taken = sorted(group for group in running if group[1] <= now)[: workload.groups]
            left = [group for group in running if group not in taken]
            if len(taken) == workload.groups and can_be_left(left, step):
                break
        running = left
    return steps * workload.groups * workload.group_size / now


def medians(results: Sequence[Result]) -> Result:
    names = [field.name for field in dataclasses.fields(Result)]
    return Result(**{name: median(getattr(result, name) for result in results) for name in names})


def add_row(table: Table, name: str, r: Result, most: float) -> None:
    times = (r.loop_us, r.beside_us, r.trainer_us, r.server_us)
    table.add_row(
        name,
        f"{r.samples:,.0f}",
        f"{most:,.0f}",
        f"{r.tokens:,.0f}",
        f"{r.target_s:.1f}",
        f"{r.mean_reward:.3f} / {r.reward:.3f}",
        f"{r.staleness:.2f}",
        *(f"{microseconds:,.0f}" for microseconds in times),
        f"{r.lag_p50_ms:.1f} / {r.lag_p99_ms:.1f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--max-staleness", type=int, nargs="+", default=[4, 0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="batches of each run; unset: the workload's own number")
    parser.add_argument("--threads", type=int, default=1, help="of the server, and of the trainer")
    parser.add_argument("--events", nargs="+", choices=("on", "off"), default=["on"], help="the event log; in turns")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--target", type=float, default=0.4, help="mean reward of ten steps")
    args = parser.parse_args()
    table = Table(box=None, header_style="bold", title="medians over seeds; µs of CPU per sample")
    table.add_column("workload")
    for column in COLUMNS:
        table.add_column(column.format(target=args.target), justify="right")
    for name in args.workloads:
        for max_staleness in args.max_staleness:
            results: dict[str, list[Result]] = {events: [] for events in args.events}
            for i, seed in enumerate(args.seeds):
                for events in args.events[:: -1 if i % 2 else 1]:  # what runs second may run faster
                    run_dir = Path(tempfile.mkdtemp())
                    try:
                        result = asyncio.run(measure(WORKLOADS[name], max_staleness, seed, events, args, run_dir))
                        results[events].append(result)
                    finally:
                        shutil.rmtree(run_dir)
            most = bound(WORKLOADS[name], max_staleness)
            for events, own in results.items():
                said = f", event log {events}" if len(args.events) > 1 else ""
                add_row(table, f"{name}, max_staleness {max_staleness}{said}", medians(own), most)
            if set(args.events) == {"on", "off"}:
                ratios = sorted(on.samples / off.samples for on, off in zip(results["on"], results["off"], strict=True))
                print(f"{name}, {max_staleness}: samples/s on / off, median {median(ratios):.3f} of", end=" ")
                print(*(f"{ratio:.3f}" for ratio in ratios))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()

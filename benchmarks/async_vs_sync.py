"""Synchronous against asynchronous training of the math agent, with a calculator that takes its time to answer.

    python benchmarks/async_vs_sync.py --steps 40 --target 0.8

The tool's latency is lognormal (mean 200 ms, sigma 1). Every run has the same two cores, the same warm-started model
and the same questions: with max_staleness 0 the phases alternate and each has both cores; otherwise sampling and
training have one each. Reported are samples/s over whole runs, the time until the mean training reward of five steps
reaches the target, staleness, the time the trainer waited for data, and the time the server was paused.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "agents"))

import math_agent
import math_tasks
from calculator import calculator
from rich.console import Console
from rich.table import Table

from arl.api.types import SamplingParams
from arl.assembly import launch
from arl.cli import load_config
from arl.engine.model_files import load_tokenizer
from arl.rewards import InlineReward
from arl.training.run_files import read_jsonl, write_atomically

MEAN_S, SIGMA = 0.2, 1.0
WINDOW = 5


def slow_calculator(seed: int) -> math_agent.Tool:
    """The calculator, which the model sees unchanged, after a lognormal delay."""
    rng = random.Random(seed)

    async def delayed(expression: str) -> str:
        await asyncio.sleep(rng.lognormvariate(math.log(MEAN_S) - SIGMA**2 / 2, SIGMA))
        return calculator(expression)

    return dataclasses.replace(math_agent.CALCULATOR, function=delayed)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run. Times in seconds; to_target_s is None where the reward never got there."""

    max_staleness: int
    samples_per_s: float
    to_target_s: float | None
    steps: int
    wall_s: float
    reward: float
    staleness_mean: float
    staleness_max: float
    waited_s: float
    paused_s: float


async def train(max_staleness: int, args: argparse.Namespace) -> Result:
    run_dir = args.run_dir / f"staleness-{max_staleness}-seed-{args.seed}"
    threads = "2" if max_staleness == 0 else "1"
    flags = ["--run_dir", str(run_dir), "--steps", str(args.steps), "--seed", str(args.seed), "--no-log.console"]
    flags += ["--rollout.max_staleness", str(max_staleness), "--evaluation.every", "null"]
    flags += ["--engine.num_threads", threads, "--train.num_threads", threads]
    config = load_config(math_agent.MathAgentConfig, flags)
    training, held_out = math_agent.questions(config)
    model = math_agent.tiny_model(args.run_dir / f"model-{args.seed}", held_out, args.seed)
    agent = math_agent.MathAgent(
        tokenizer=load_tokenizer(model),
        score=InlineReward(math_tasks.score),
        sampling=SamplingParams(max_new_tokens=config.max_new_tokens, temperature=config.temperature),
        max_turns=config.max_turns,
        calculator=slow_calculator(args.seed),
    )
    config = config.model_copy(update={"model": str(model)})
    async with launch(config, workflow=agent, dataset=training) as trainer:
        rewards: list[float] = []
        async for step in trainer:
            rewards.append(step.reward)
            if args.stop_at_target and fmean(rewards[-WINDOW:]) >= args.target and len(rewards) >= WINDOW:
                break
    return summarize(max_staleness, read_jsonl(run_dir / "metrics.jsonl"), args.target)


def summarize(max_staleness: int, rows: Sequence[dict[str, float]], target: float) -> Result:
    means = [fmean(row["reward"] for row in rows[i - WINDOW : i]) for i in range(WINDOW, len(rows) + 1)]
    reached = next((i + WINDOW - 1 for i, mean in enumerate(means) if mean >= target), None)
    wall_s = rows[-1]["time_s"]
    return Result(
        max_staleness=max_staleness,
        samples_per_s=rows[-1]["episodes_trained"] / wall_s,
        to_target_s=None if reached is None else rows[reached]["time_s"],
        steps=len(rows),
        wall_s=wall_s,
        reward=means[-1] if means else math.nan,
        staleness_mean=fmean(row["staleness/mean"] for row in rows),
        staleness_max=max(row["staleness/max"] for row in rows),
        waited_s=sum(row["time/wait_s"] for row in rows),
        paused_s=sum(row.get("weights/pause_s", 0.0) for row in rows),
    )


def report(results: Sequence[Result], target: float) -> None:
    table = Table(box=None, header_style="bold")
    columns = ("max_staleness", "samples/s", f"s to {target:g}", "steps", "wall s", "reward")
    for column in (*columns, "staleness mean / max", "waited", "paused"):
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(
            str(r.max_staleness),
            f"{r.samples_per_s:.1f}",
            "-" if r.to_target_s is None else f"{r.to_target_s:.0f}",
            str(r.steps),
            f"{r.wall_s:.0f}",
            f"{r.reward:.3f}",
            f"{r.staleness_mean:.2f} / {r.staleness_max:.0f}",
            f"{100 * r.waited_s / r.wall_s:.0f} %",
            f"{100 * r.paused_s / r.wall_s:.1f} %",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max_staleness", type=int, nargs="+", default=[0, 2, 4])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--target", type=float, default=0.8, help="training reward, mean of five steps")
    parser.add_argument("--stop_at_target", action="store_true", help="end a run there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run_dir", type=Path, default=Path("runs/async_vs_sync"))
    args = parser.parse_args()
    results = [asyncio.run(train(eta, args)) for eta in args.max_staleness]
    report(results, args.target)
    path = args.run_dir / f"results-seed-{args.seed}.json"
    write_atomically(path, json.dumps([dataclasses.asdict(result) for result in results], indent=2) + "\n")


if __name__ == "__main__":
    main()

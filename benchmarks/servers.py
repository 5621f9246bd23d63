"""The quickstart's training on the embedded server and on stock SGLang or vLLM, from the same models, over seeds.

    python benchmarks/servers.py --servers embedded sglang --sglang-python .venv-sglang/bin/python --seeds 0 1 2
    python benchmarks/servers.py --servers embedded vllm --vllm-python .venv-vllm/bin/python --seeds 0 1 2

Each seed has one warm-started model, from which every kind of server starts. Reported per seed are the held-out
reward before and after, the mean training reward over the run, wall time and staleness; at the end, whether the curves
of the two kinds differ by more than seeds do: at each step, the difference of the means over seeds, against the
standard error of that difference. Written to docs/: a plot of the curves.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "agents"))

import math_agent
import math_tasks
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from arl.api.types import SamplingParams
from arl.engine.model_files import load_tokenizer
from arl.rewards import InlineReward
from arl.run.launch import launch
from arl.run.script import load_config
from arl.training.metrics_log import read_jsonl
from arl.training.run_dir import write_atomically

WINDOW = 5
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run. rewards: of each training step. Times in seconds."""

    server: str
    transport: str
    seed: int
    before: float
    after: float
    rewards: tuple[float, ...]
    wall_s: float
    pause_s: float
    staleness_max: float


def engine_flags(server: str, args: argparse.Namespace) -> list[str]:
    if server == "embedded":
        return ["--engine.kind", "local"]
    arguments = (ROOT / "scripts" / f"{server}_cpu" / "arguments").read_text().split()
    flags = ["--engine.kind", f"{server}_processes", "--engine.gpus_per_server", "0"]
    python = args.sglang_python if server == "sglang" else args.vllm_python
    return [*flags, "--engine.python", str(python), "--engine.arguments", json.dumps(arguments)]


async def train(server: str, transport: str, seed: int, args: argparse.Namespace) -> Curve:
    run_dir = args.run_dir / f"{server}-{transport}-seed-{seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    flags = ["--run_dir", str(run_dir), "--steps", str(args.steps), "--seed", str(seed), "--no-log.console"]
    flags += ["--evaluation.every", "null", "--weights.transport", transport]
    config = load_config(math_agent.MathAgentConfig, [*flags, *engine_flags(server, args)])
    training, held_out = math_agent.questions(config)
    model = math_agent.tiny_model(args.run_dir / f"model-{seed}", held_out, seed)
    agent = math_agent.MathAgent(
        tokenizer=load_tokenizer(model),
        score=InlineReward(math_tasks.score),
        sampling=SamplingParams(max_new_tokens=config.max_new_tokens, temperature=config.temperature),
        max_turns=config.max_turns,
    )
    config = config.model_copy(update={"model": str(model)})
    async with launch(config, workflow=agent, dataset=training, eval_dataset=held_out) as trainer:
        before = await trainer.evaluate()
        async for _ in trainer:
            pass
        after = await trainer.evaluate()
    rows = read_jsonl(run_dir / "metrics.jsonl")
    return Curve(
        server=server,
        transport=transport,
        seed=seed,
        before=before.reward,
        after=after.reward,
        rewards=tuple(row["reward"] for row in rows),
        wall_s=rows[-1]["time_s"],
        pause_s=fmean(row["weights/pause_s"] for row in rows if "weights/pause_s" in row),
        staleness_max=max(row["staleness/max"] for row in rows),
    )


def report(curves: Sequence[Curve]) -> None:
    table = Table(box=None, header_style="bold")
    for column in ("server", "transport", "seed", "before", "after", "mean reward", "wall s", "pause ms", "staleness"):
        table.add_column(column, justify="right")
    for c in curves:
        numbers = (f"{c.before:.3f}", f"{c.after:.3f}", f"{fmean(c.rewards):.3f}", f"{c.wall_s:.0f}")
        table.add_row(c.server, c.transport, str(c.seed), *numbers, f"{1000 * c.pause_s:.1f}", f"{c.staleness_max:.0f}")
    Console().print(table)


def smoothed(rewards: Sequence[float]) -> list[float]:
    return [fmean(rewards[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(rewards))]


def compare(ours: Sequence[Curve], theirs: Sequence[Curve]) -> str:
    """The largest difference of the mean curves, in standard errors of seeds, and where."""
    if min(len(ours), len(theirs)) < 2:
        return "one seed has no noise to compare with"
    steps = range(min(len(c.rewards) for c in (*ours, *theirs)))
    a, b = ([smoothed(c.rewards) for c in curves] for curves in (ours, theirs))
    scores: list[tuple[float, int, float]] = []
    for i in steps:
        left, right = [r[i] for r in a], [r[i] for r in b]
        error = math.sqrt(variance(left) / len(left) + variance(right) / len(right))
        gap = fmean(left) - fmean(right)
        scores.append((abs(gap) / max(error, 1e-9), i + 1, gap))
    worst, step, gap = max(scores)
    within = sum(score <= 2 for score, _, _ in scores) / len(scores)
    return (
        f"means of {WINDOW} steps over seeds differ by at most {worst:.1f} standard errors "
        f"({gap:+.3f} at step {step}); "
        f"{100 * within:.0f} % of the steps are within 2"
    )


def plot(curves: Sequence[Curve], path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    colours = {name: f"C{i}" for i, name in enumerate(sorted({c.server for c in curves}))}
    for c in curves:
        label = c.server if c.seed == min(x.seed for x in curves) and c.transport == curves[0].transport else None
        style = "-" if c.transport == curves[0].transport else "--"
        axes.plot(range(1, len(c.rewards) + 1), smoothed(c.rewards), style, color=colours[c.server], label=label)
    axes.set(xlabel="step", ylabel=f"training reward, mean of {WINDOW} steps", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang-python", type=Path, default=Path(".venv-sglang/bin/python"))
    parser.add_argument("--vllm-python", type=Path, default=Path(".venv-vllm/bin/python"))
    parser.add_argument("--servers", nargs="+", default=["embedded", "sglang"], choices=["embedded", "sglang", "vllm"])
    parser.add_argument("--transport", default="disk", choices=["disk", "distributed"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--run_dir", type=Path, default=Path("runs/servers"))
    parser.add_argument("--plot", type=Path, default=None, help="where to write the curves, as a PNG")
    args = parser.parse_args()
    curves: list[Curve] = []
    for seed in args.seeds:
        for server in args.servers:
            curves.append(asyncio.run(train(server, args.transport, seed, args)))
            report(curves)
            content = json.dumps([dataclasses.asdict(curve) for curve in curves], indent=2)
            write_atomically(args.run_dir / f"curves-{args.transport}.json", content + "\n")
    kinds = {server: [c for c in curves if c.server == server] for server in args.servers}
    if len(kinds) == 2:
        Console().print(compare(*kinds.values()))
    if args.plot:
        plot(curves, args.plot)


if __name__ == "__main__":
    main()

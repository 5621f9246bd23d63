"""How well `arl plan` predicts: costs fitted on five steps of one setting, against real runs of settings never fitted.

    python benchmarks/plan.py [--seconds 25] [--results runs/plan/results.json] [--only 8]
    python benchmarks/plan.py --sglang .venv-sglang/bin/python --seconds 40        # stock SGLang on the CPU

Each run is a real one of `launch`: a tiny Qwen3, episodes of two turns with a tool between them that waits (lognormal),
on this machine. The learning rate is next to nothing, so that the work stays what it was. A setting is measured from
the step that ends its filling (max_staleness + 2) on, for --seconds and at least MOST_SHORT steps. Then the fitted
setting is predicted, and every other one, from the five steps alone.

Tools take the quantiles of their distribution in a random order, so that a few hundred episodes have the same mean and
the same slowest tools: what is left is the error of the prediction, not of the sample.

The speed of a shared machine drifts, by a quarter in minutes. So the table shows errors twice: as measured, and with
all costs but tools multiplied by one factor, by which the machine was slower in that run than in the fitted one. It is
the geometric mean of two: CPU seconds of the trainer for a sample (of one rank: more of them also wait for each other),
and CPU seconds of embedded servers for iterations with as many requests. Settings come in an order that is shuffled
once, so that no kind of them has all its runs in one hour.

Results go to a JSON file after each run. The same command goes on where it was ended, and prints the table again when
all is measured; --report prints what there is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import shutil
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import NormalDist, fmean, geometric_mean, median
from typing import Any

import numpy as np
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

import arl
from arl import load_tokenizer
from arl.api.events import CpuUsed, ServerWorked
from arl.api.settings.run import Config
from arl.api.types import Example, SamplingParams, StepStats
from arl.cluster.plan.costs import Costs, read_costs, write_costs
from arl.cluster.plan.fitting import fitted
from arl.cluster.plan.prediction import Prediction, predict
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.rewards import InlineReward
from arl.run.launch import launch
from arl.training.run_dir import write_atomically
from arl.workflow.agent import MultiTurnWorkflow

SHAPE = TinyShape(hidden_size=128, intermediate_size=256, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=32)
ROOT = Path(__file__).parents[1]
QUESTIONS = [f"Question {i}" for i in range(10)]
MAX_NEW_TOKENS, TOOL_S, SIGMA = 48, 0.2, 0.8
FITTED_STEPS, MOST_SHORT = 5, 8
QUANTILES = [NormalDist().inv_cdf((i + 0.5) / 128) for i in range(128)]
CLOSE, FEW = 0.10, 4
CPU_COLUMN = "CPU ms a sample: controller,\ntrainer, servers"
BASE: dict[str, Any] = {"batch_size": 8, "group_size": 8, "max_staleness": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "synchronous": {"max_staleness": 0},
    "staleness 1": {"max_staleness": 1},
    "staleness 3": {"max_staleness": 3},
    "staleness 4": {"max_staleness": 4},
    "groups of 4": {"group_size": 4},
    "groups of 16": {"group_size": 16},
    "4 groups": {"batch_size": 4},
    "16 groups": {"batch_size": 16},
    "4 groups of 16": {"batch_size": 4, "group_size": 16},
    "16 groups of 4, staleness 1": {"batch_size": 16, "group_size": 4, "max_staleness": 1},
    "16 groups of 16, synchronous": {"batch_size": 16, "group_size": 16, "max_staleness": 0},
    "tools 3 times as slow": {"tool_factor": 3.0},
    "tools 3 times as slow, staleness 4": {"tool_factor": 3.0, "max_staleness": 4},
    "tools 3 times as slow, synchronous": {"tool_factor": 3.0, "max_staleness": 0},
    "tools 6 times as slow, staleness 1": {"tool_factor": 6.0, "max_staleness": 1},
    "tools 4 times as fast": {"tool_factor": 0.25},
    "tools 4 times as fast, synchronous": {"tool_factor": 0.25, "max_staleness": 0},
    "2 servers": {"num_servers": 2},
    "2 servers, synchronous": {"num_servers": 2, "max_staleness": 0},
    "2 servers, rolling": {"num_servers": 2, "update_order": "rolling"},
    "2 servers, rolling, slow tools": {"num_servers": 2, "update_order": "rolling", "tool_factor": 3.0},
    "retract": {"pause_mode": "retract"},
    "abort": {"pause_mode": "abort"},
    "abort, staleness 4": {"pause_mode": "abort", "max_staleness": 4},
    "2 servers, abort": {"num_servers": 2, "pause_mode": "abort"},
    "16 episodes at once": {"max_concurrent_episodes": 16},
    "48 episodes at once": {"max_concurrent_episodes": 48},
    "24 episodes at once, slow tools": {"max_concurrent_episodes": 24, "tool_factor": 3.0},
    "2 servers, 32 episodes at once": {"num_servers": 2, "max_concurrent_episodes": 32},
    "2 ranks": {"num_ranks": 2},
    "2 ranks, synchronous": {"num_ranks": 2, "max_staleness": 0},
    "2 extra episodes": {"extra_episodes": 2},
    "1 worker": {"num_workers": 1},
    "2 workers, synchronous": {"num_workers": 2, "max_staleness": 0},
}
_ENGINE = ("num_servers", "update_order", "pause_mode")
_NOT_MODELLED = ("num_workers",)


@dataclass(kw_only=True)
class SlowTool(MultiTurnWorkflow):
    """Two turns, and a tool between them."""

    tool_s: float = TOOL_S
    left: list[float] = field(default_factory=list[float])

    async def afeedback(self, answer: str, data: Example, attempt: int) -> str | None:
        if not self.left:
            self.left = random.sample(QUANTILES, len(QUANTILES))
        await asyncio.sleep(self.tool_s * math.exp(SIGMA * self.left.pop() - SIGMA**2 / 2))
        return str(data["question"])


def score(answer: str, data: Example) -> float:
    return sum(letter in "02468" for letter in answer) / MAX_NEW_TOKENS


@dataclass(kw_only=True)
class Measurement:
    """Of one run, after its filling."""

    name: str
    changes: dict[str, Any]
    at: float = 0.0
    """When it was in its middle, in seconds since 1970."""
    num_steps: int = 0
    seconds: float = 0.0
    samples_per_s: float = 0.0
    wait_share: float = 0.0
    """Of the trainer's time, that it waited for batches."""
    staleness: float = 0.0
    cpu_ms: dict[str, float] = field(default_factory=dict[str, float])
    """Of the controller, the trainer and the servers, for each trained sample: other programs change these least."""
    iterations_ms: dict[str, float] = field(default_factory=dict[str, float])
    """Of one of embedded servers that decoded about so many requests, and read nothing."""
    error: str = ""


@dataclass(kw_only=True)
class Results:
    """What a results file holds."""

    measured: list[Measurement] = field(default_factory=list[Measurement])

    @classmethod
    def read(cls, path: Path) -> Results:
        if not path.exists():
            return cls()
        return cls(measured=[Measurement(**one) for one in json.loads(path.read_text())["measured"]])

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self), indent=1) + "\n")

    def of(self, name: str) -> list[Measurement]:
        return [one for one in self.measured if one.name == name and not one.error]


def config_of(changes: dict[str, Any], run_dir: Path, model: Path, steps: int, args: argparse.Namespace) -> Config:
    chosen = {**BASE, **changes}
    chosen.pop("tool_factor", None)
    engine: dict[str, Any] = {name: chosen.pop(name) for name in _ENGINE if name in chosen}
    train: dict[str, Any] = {"optimizer": {"lr": 1e-12}, "num_ranks": chosen.pop("num_ranks", 1)}
    if args.sglang:
        arguments = (ROOT / "scripts" / "sglang_cpu" / "arguments").read_text().split()
        engine |= {"kind": "sglang_processes", "python": str(args.sglang), "gpus_per_server": 0, "arguments": arguments}
    return Config.model_validate(
        {
            "model": str(model),
            "run_dir": run_dir,
            "steps": steps,
            "rollout": chosen,
            "engine": engine,
            "train": train,
            "checkpoint": {"every_s": None},
            "log": {"console": False},
        }
    )


def workflow_of(changes: dict[str, Any], model: Path) -> SlowTool:
    return SlowTool(
        tokenizer=load_tokenizer(model),
        reward=InlineReward(score),
        sampling=SamplingParams(max_new_tokens=MAX_NEW_TOKENS),
        max_turns=2,
        tool_s=TOOL_S * changes.get("tool_factor", 1.0),
    )


async def run(name: str, changes: dict[str, Any], run_dir: Path, args: argparse.Namespace, steps: int) -> Measurement:
    """Run `steps` steps, or fewer: until it is measured. The run's files stay in run_dir."""
    shutil.rmtree(run_dir, ignore_errors=True)
    model = write_tiny_model(run_dir / "model", QUESTIONS, SHAPE, 0)
    config = config_of(changes, run_dir / "run", model, steps, args)
    filling, done = config.rollout.max_staleness + 2, list[tuple[float, StepStats]]()
    examples = [{"question": QUESTIONS[i % 10]} for i in range(1000)]
    async with launch(config, workflow=workflow_of(changes, model), dataset=examples) as trainer:
        async for step in trainer:
            done.append((time.time(), step))
            lasted = done[-1][0] - done[min(filling, len(done)) - 1][0]
            if lasted >= args.seconds and len(done) >= filling + MOST_SHORT:
                break
    began, ended, counted = done[min(filling, len(done)) - 1][0], done[-1][0], [s for _, s in done[filling:]]
    if len(counted) < MOST_SHORT:  # a fitted run
        return Measurement(name=name, changes=changes, at=ended)
    samples = sum(s.num_episodes for s in counted)
    return Measurement(
        name=name,
        changes=changes,
        at=(began + ended) / 2,
        num_steps=len(counted),
        seconds=ended - began,
        samples_per_s=samples / (ended - began),
        wait_share=sum(s.wait_s for s in counted) / (ended - began),
        staleness=fmean(s.mean_staleness for s in counted),
        iterations_ms=iterations_ms(run_dir / "run"),
        cpu_ms={who: 1e3 * seconds / samples for who, seconds in cpu_s(run_dir / "run", began, ended).items()},
    )


def iterations_ms(run_dir: Path) -> dict[str, float]:
    told = {one.server: one for _, one in arl.read_run(run_dir).system if isinstance(one, ServerWorked)}
    rows = [row for one in told.values() for row in one.iterations if not row.reads]
    return {f"{row.decoded / row.number:.1f}": round(1e3 * row.seconds / row.number, 2) for row in rows}


def cpu_s(run_dir: Path, began: float, ended: float) -> dict[str, float]:
    """What the processes of a run used in this time, by its event log."""
    read = [record for _, record in arl.read_run(run_dir).system if isinstance(record, CpuUsed) and record.processes]
    if not read:
        return {}

    def between(used: list[float]) -> float:
        first, last = np.interp([began, ended], [record.t for record in read], used)
        return float(last - first)

    servers = {name for record in read for name in record.processes if name.startswith("http")}
    return {
        "controller": between([record.controller for record in read]),
        "trainer": between([record.processes.get("trainer", 0.0) for record in read]),
        "servers": between([sum(record.processes.get(name, 0.0) for name in servers) for record in read]),
    }


def fit(args: argparse.Namespace, results: Results) -> None:
    """On five steps of BASE, once: the costs stay beside the results."""
    path = args.results.with_suffix(".costs.json")
    if path.exists() and results.of("fitted"):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    measure("fitted", {}, results, args, FITTED_STEPS)
    write_costs(path, fitted(args.runs / "fitted" / "run"))


def slowness(costs: Costs, one: Measurement) -> float:
    """How many times as long the same work took in this run as in the fitted one."""
    said = predict(replace(costs, shared=None), costs.deployment.changed(**_modelled(one.changes)))
    factors = list[float]()
    if said.deployment.num_ranks == 1 and one.cpu_ms:
        factors.append(one.cpu_ms["trainer"] * said.episodes_per_s / said.trainer_trains / 1e3)
    ratios = [
        ms / 1e3 / float(costs.decode.iteration_s(np.array(float(n)), 0.0))
        for n, ms in one.iterations_ms.items()
        if float(n) >= FEW
    ]
    if ratios:
        factors.append(fmean(ratios))
    return geometric_mean(factors or [1.0])


def _modelled(changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if name not in _NOT_MODELLED}


def costs_at(costs: Costs, slowness: float) -> Costs:
    """The same on a machine where everything but tools takes so many times as long."""

    def slower(record: Any, *names: str) -> Any:
        return replace(record, **{name: slowness * getattr(record, name) for name in names})

    decode = replace(costs.decode, points=tuple((n, slowness * s) for n, s in costs.decode.points))
    return replace(
        costs,
        decode=slower(decode, "per_context_token_s"),
        prefill=slower(costs.prefill, "per_token_s", "per_request_s"),
        trainer=slower(costs.trainer, "base_s", "per_episode_s", "per_token_s", "snapshot_s"),
        publish=slower(costs.publish, "transfer_s", "load_s"),
        controller=slower(costs.controller, "per_request_s", "per_episode_s", "latency_s"),
    )


def measure_all(args: argparse.Namespace) -> None:
    results, names = Results.read(args.results), order(args)
    todo = [name for name in names if not results.of(name)]
    # The fitted setting also at the beginning of what is left, in its middle, and at the end.
    places = {round(i * len(todo) / max(args.bases - 1, 1)) for i in range(args.bases)} if todo else set[int]()
    for i in range(len(todo) + 1):
        if i in places:
            measure("fitted setting", {}, results, args)
        if i < len(todo):
            measure(todo[i], SETTINGS[todo[i]], results, args)


def order(args: argparse.Namespace) -> list[str]:
    names = list(SETTINGS)
    random.Random(0).shuffle(names)
    return [name for name in names if name in (args.settings or SETTINGS)][: args.only]


def measure(name: str, changes: dict[str, Any], results: Results, args: argparse.Namespace, steps: int = 10**6) -> None:
    run_dir = args.runs / ("fitted" if name == "fitted" else "measured")
    try:
        found = asyncio.run(run(name, changes, run_dir, args, steps))
    except Exception as error:  # noqa: BLE001 (the series goes on)
        traceback.print_exc()
        found = Measurement(name=name, changes=changes, at=time.time(), error=f"{type(error).__name__}: {error}")
    if name != "fitted":
        shutil.rmtree(run_dir, ignore_errors=True)
    results.measured = [one for one in results.measured if one.name != name or not one.error] + [found]
    results.write(args.results)
    print(
        f"{time.strftime('%H:%M:%S')} {name}: {found.error or f'{found.samples_per_s:.1f} samples/s'} "
        f"({found.num_steps} steps, {found.seconds:.0f} s; load {os.getloadavg()[0]:.1f})",
        flush=True,
    )


def report(args: argparse.Namespace) -> None:
    results = Results.read(args.results)
    if not results.of("fitted"):
        raise SystemExit("nothing was measured yet")
    costs = read_costs(args.results.with_suffix(".costs.json"))
    print("fitted on five steps:", *costs.measured.notes, sep="\n  ")
    print(costs.decode, costs.prefill, costs.trainer, costs.controller, costs.publish, sep="\n  ")
    table = Table(box=None, header_style="bold", title="predicted / measured, with costs for the machine's speed")
    names = ("setting", "slower", "samples/s", "error %", "uncorrected %", "trainer waits", "staleness", CPU_COLUMN)
    for column in names:
        table.add_column(column, justify="left" if column == "setting" else "right")
    errors: dict[str, tuple[float, float]] = {}
    for one in [*results.of("fitted setting"), *(one for name in SETTINGS for one in results.of(name)[-1:])]:
        deployment, slower = costs.deployment.changed(**_modelled(one.changes)), slowness(costs, one)
        plain, said = predict(costs, deployment), predict(costs_at(costs, slower), deployment)
        errors[one.name] = said.episodes_per_s / one.samples_per_s - 1, plain.episodes_per_s / one.samples_per_s - 1
        table.add_row(
            one.name,
            f"{slower:.2f}",
            f"{said.episodes_per_s:.1f} / {one.samples_per_s:.1f}",
            *(f"{100 * error:+.1f}" for error in errors[one.name]),
            f"{said.trainer_idle:.0%} / {one.wait_share:.0%}",
            f"{said.mean_staleness:.2f} / {one.staleness:.2f}",
            f"{_cpu_said(said)} / {', '.join(f'{ms:.1f}' for ms in one.cpu_ms.values())}",
        )
    Console(width=140).print(table)
    others = [error for name, error in errors.items() if name != "fitted setting"]
    for kind, i in (("corrected", 0), ("uncorrected", 1)):
        sizes = [abs(error[i]) for error in others] or [0.0]
        close = sum(size <= CLOSE for size in sizes)
        print(
            f"{kind}: {close} of {len(others)} settings within {CLOSE:.0%}; errors: median {median(sizes):.1%}, "
            f"largest {max(sizes):.1%}"
        )
    failed = {one.name: one.error for one in results.measured if one.error}
    print(*(f"{name} failed: {error}" for name, error in failed.items()), sep="\n")


def _cpu_said(said: Prediction) -> str:
    """As Measurement.cpu_ms, where one thread of each process computes."""
    shares = (said.controller, said.trainer_trains * said.deployment.num_ranks)
    shares += (said.servers_compute * said.deployment.num_servers,)
    return ", ".join(f"{1e3 * share / said.episodes_per_s:.1f}" for share in shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=25.0, help="that each setting is measured for")
    parser.add_argument("--only", type=int, default=len(SETTINGS), help="settings to measure, in the shuffled order")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, metavar="NAME", help="measure these alone")
    parser.add_argument("--bases", type=int, default=3, help="times that the fitted setting is measured, at least 2")
    parser.add_argument("--sglang", type=Path, help="a Python that has SGLang, in place of embedded servers")
    parser.add_argument("--runs", type=Path, default=Path("runs/plan"), help="where the runs are made")
    parser.add_argument("--results", type=Path, help="default: results.json, or results-sglang.json, in --runs")
    parser.add_argument("--report", action="store_true", help="measure nothing, and print what there is")
    args = parser.parse_args()
    if args.results is None:
        args.results = args.runs / ("results-sglang.json" if args.sglang else "results.json")
    if not args.report:
        fit(args, Results.read(args.results))
        measure_all(args)
    report(args)


if __name__ == "__main__":
    main()

"""Every preset on the quickstart's agent for the same wall time; and what staleness costs with and without decoupling.

    python benchmarks/algorithms.py                    # each preset, 15 s of RL, seeds 0 1 2
    python benchmarks/algorithms.py --staleness        # naive and decoupled_ppo at eta 0 to 16, seeds 0 to 4
    python benchmarks/algorithms.py --staleness --remedies none m2po --etas 0 4 8 16 32    # against decoupled_ppo

Each seed has one warm-started model, kept in --run_dir, from which all presets start, with the same questions,
learning rate and servers. A run that is done is not done again, so the command may be stopped and repeated. What some
presets ask for, the workflow gives to all: turns with states, named rewards, and for `distillation` a teacher, which is
the model that decoupled_ppo has made of the same seed. Presets of more than --minibatches optimizer steps a batch have
so many.

With --staleness all runs have the same number of steps, and before each the trainer waits until every group that may
be admitted has finished: (eta + 1) batches. Batch t was then generated min(t, eta) versions before; the table says what
was seen. --remedies are changes of decoupled_ppo that may hold it on old tokens. Written: a JSON file for each run, and
a Markdown table, in --run_dir; a plot, to docs/.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "agents"))

import math_agent
import math_tasks
import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from arl.api.engine import Sampler
from arl.api.errors import ArlError
from arl.api.settings.algorithm import AlgorithmConfig, preset
from arl.api.settings.engines import OptimizerConfig, TrainConfig
from arl.api.settings.presets import PRESETS
from arl.api.types import Example, Group, SamplingParams, Trajectory
from arl.engine.model_files import load_tokenizer
from arl.rewards import InlineReward
from arl.rollout.buffer import ReplayBuffer
from arl.run.launch import launch
from arl.run.script import load_config
from arl.training.metrics_log import read_jsonl
from arl.training.run_dir import write_atomically
from arl.training.trainer import Trainer
from arl.workflow.teachers import DistillationWorkflow

LAST = 5
"""Steps at the end of a run, of which means are told."""

OVERHEAD_S, STEP_S = 15.0, 0.8
"""About what a run takes beside its training, and a step of --staleness, on two cores."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change of decoupled_ppo that may hold it on old tokens."""

    algorithm: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 1.0
    """A factor of the learning rate."""


def _alone(**algorithm: Any) -> Remedy:
    """In place of decoupled_ppo's own rejections."""
    return Remedy(algorithm={"rejections": [], **algorithm})


REMEDIES = {
    "none": _alone(),
    "cap_2": _alone(weights=[{"level": "token", "upper": 2.0}]),
    "cap_1": _alone(weights=[{"level": "token", "upper": 1.0}]),
    "outward_5": Remedy(algorithm={"rejections": [{"level": "token", "lower": 0.2, "upper": 5.0, "outward": True}]}),
    "token_mask": Remedy(algorithm={"rejections": [{"level": "token", "lower": 0.2, "upper": 5.0}]}),
    "narrow_mask": Remedy(algorithm={"rejections": [{"level": "token", "lower": 0.5, "upper": 2.0}]}),
    "geometric_mask": Remedy(algorithm={"rejections": [{"level": "geometric", "lower": 0.5, "upper": 2.0}]}),
    "m2po": _alone(selection={"kind": "second_moment"}),
    "m2po_wide": _alone(selection={"kind": "second_moment", "limit": 0.2}),
    "half_lr": Remedy(lr=0.5),
    "quarter_lr": Remedy(lr=0.25),
    "sequence_mean": Remedy(algorithm={"aggregation": "sequence_mean"}),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained: until `seconds` of training have passed, or for `steps`, then with the buffer kept full."""

    preset: str
    seed: int
    max_staleness: int
    seconds: float | None
    steps: int | None
    remedy: str | None = None

    @property
    def name(self) -> str:
        return f"{self.label}-eta-{self.max_staleness}-seed-{self.seed}"

    @property
    def label(self) -> str:
        return self.preset if self.remedy is None else f"{self.preset}-{self.remedy}"

    @property
    def changes(self) -> Remedy:
        return REMEDIES[self.remedy] if self.remedy is not None else Remedy()


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of it. before, after: held-out score; after is the mean of several evaluations. Entropy, effective
    sample size and clip fraction: of the last steps. staleness: of tokens, from the step on at which it can be eta.
    sample_sizes: the effective sample size of each step. error: what ended the run early, if so."""

    run: Run
    before: float
    after: float
    steps: int
    episodes: int
    wall_s: float
    entropy: float
    effective_sample_size: float
    clip_fraction: float
    staleness: float
    rewards: list[float]
    sample_sizes: list[float] = field(default_factory=list)
    error: str = ""


class InlineTeacher:
    """Another model's logprobs of sampled tokens, computed in this process, for many episodes at once."""

    def __init__(self, model: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._waiting: list[tuple[Sequence[int], asyncio.Future[list[float]]]] = []
        self._is_busy = False

    async def logprobs(self, token_ids: Sequence[int], start: int = 1) -> tuple[float, ...]:
        """Of each token; 0 before `start`. The first who asks answers for those who ask meanwhile."""
        answer: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self._waiting.append((token_ids, answer))
        if not self._is_busy:
            self._is_busy = True
            try:
                await self._answer_all()
            finally:
                self._is_busy = False
        return (*[0.0] * start, *(await answer)[start:])

    async def _answer_all(self) -> None:
        while self._waiting:
            asked, self._waiting = self._waiting, []
            rows = await asyncio.to_thread(self._forward, [ids for ids, _ in asked])
            for (_, answer), row in zip(asked, rows, strict=True):
                if not answer.cancelled():
                    answer.set_result(row)

    @torch.no_grad()
    def _forward(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        # Padded on the right, where no token looks.
        ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        logprobs = self._model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return [[0.0, *logprobs[i, : len(row) - 1].tolist()] for i, row in enumerate(rows)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Agent(math_agent.MathAgent):
    """The math agent, who also says what some algorithms ask for."""

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        (done,) = await super().arun_episode(engine, data)  # the tiny model's template never rewrites turns
        # A turn's state is what the calculator had said before it: episodes of a group share their question.
        ends = [0, *(turn.stop for turn in done.turns)]
        seen = [str(done.token_ids[end : turn.start].tolist()) for end, turn in zip(ends, done.turns, strict=False)]
        states = ["|".join(seen[1 : i + 1]) for i in range(len(seen))]
        turns = [dataclasses.replace(turn, state=state) for turn, state in zip(done.turns, states, strict=True)]
        rewards = {"answer": done.reward, "brief": float(len(turns) <= 2)}
        metrics = {**done.metrics, "score": done.reward}
        return dataclasses.replace(done, turns=tuple(turns), rewards=rewards, metrics=metrics)


def algorithm_of(run: Run, args: argparse.Namespace) -> AlgorithmConfig:
    config = preset(run.preset)
    minibatches = args.minibatches if args.staleness else min(config.minibatches, args.minibatches)
    # The tiny model learns at rates far above those that presets are made for; so do its critic and reward model.
    rates = {"critic": 10 * args.lr, "reward_model": 2 * args.lr}
    beside = {role: {"lr": rates[role]} for role in config.trained_models[1:]}
    return preset(run.preset, minibatches=minibatches, **beside, **run.changes.algorithm)


def config_of(run: Run, args: argparse.Namespace) -> math_agent.MathAgentConfig:
    flags = ["--run_dir", str(args.run_dir / "runs" / run.name), "--seed", str(run.seed), "--no-log.console"]
    flags += ["--rollout.max_staleness", str(run.max_staleness), "--evaluation.every", "null"]
    flags += ["--steps", str(run.steps or 1_000_000), "--rollout.batch_size", str(args.batch_size)]
    config = load_config(math_agent.MathAgentConfig, flags)
    decay: dict[str, Any] = {}
    if run.steps is not None:  # as the quickstart does: at the end, a constant rate is what scores differ by
        decay = {"schedule": "linear", "total_steps": run.steps * args.minibatches, "min_lr_ratio": 0.1}
    train = TrainConfig(optimizer=OptimizerConfig(lr=args.lr * run.changes.lr, **decay))
    return config.model_copy(update={"train": train, "algorithm": algorithm_of(run, args)})


async def train(run: Run, args: argparse.Namespace) -> Result:
    config = config_of(run, args)
    shutil.rmtree(config.run_dir, ignore_errors=True)
    training, held_out = math_agent.questions(config)
    model = math_agent.tiny_model(args.run_dir / f"model-{run.seed}", held_out, run.seed)
    agent = Agent(
        tokenizer=load_tokenizer(model),
        score=InlineReward(math_tasks.score),
        sampling=SamplingParams(max_new_tokens=config.max_new_tokens, temperature=config.temperature),
        max_turns=config.max_turns,
    )
    workflow = agent
    if run.preset == "distillation":
        workflow = DistillationWorkflow(agent, InlineTeacher(teacher_of(run, args)))
    config = config.model_copy(update={"model": str(model)})
    scores, error = [float("nan"), float("nan")], ""
    try:
        async with launch(config, workflow=workflow, dataset=training, eval_dataset=held_out) as trainer:
            scores[0] = (await trainer.evaluate()).metrics["episode/score"]
            try:
                await steps_of(run, trainer)
            finally:
                evaluations = [await trainer.evaluate() for _ in range(args.evaluations)]
                scores[1] = fmean(evaluation.metrics["episode/score"] for evaluation in evaluations)
            if run.preset == "decoupled_ppo" and not args.staleness:
                await trainer.thread(export, trainer, teacher_of(run, args))
    except ArlError as reason:
        error = str(reason)
    return summary(run, scores, read_jsonl(config.run_dir / "metrics.jsonl"), error)


async def steps_of(run: Run, trainer: Trainer) -> None:
    if run.steps is not None:
        trainer.buffer.take_batch = full_before(trainer.buffer)
    async for step in trainer:
        if run.seconds is not None and step.metrics["time_s"] >= run.seconds:
            break


def full_before(buffer: ReplayBuffer) -> Callable[[int], Awaitable[list[Group]]]:
    """The buffer's take_batch, once all that may be generated before this batch is taken has been."""
    take_batch = buffer.take_batch

    async def take_when_full(version: int) -> list[Group]:
        while buffer.num_finished < buffer.capacity:  # noqa: ASYNC110  who waits is told of a batch, no sooner
            await asyncio.sleep(0.02)
        return await take_batch(version)

    return take_when_full


def teacher_of(run: Run, args: argparse.Namespace) -> Path:
    directory = args.run_dir / f"teacher-{run.seed}"
    if run.preset == "distillation" and not directory.exists():
        raise SystemExit(f"distillation needs {directory}: run decoupled_ppo with seed {run.seed} before it")
    return directory


def export(trainer: Trainer, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    snapshot = trainer.learner.engine.snapshot()
    snapshot.write(directory)
    snapshot.release()


def summary(run: Run, scores: Sequence[float], rows: Sequence[dict[str, float]], error: str) -> Result:
    def at_the_end(name: str) -> float:
        return fmean([row[name] for row in rows[-LAST:] if name in row] or [float("nan")])

    steady = [row["staleness/mean"] for row in rows[run.max_staleness :]] or [float("nan")]
    return Result(
        run=run,
        before=scores[0],
        after=scores[1],
        steps=len(rows),
        episodes=int(rows[-1]["episodes_trained"]) if rows else 0,
        wall_s=rows[-1]["time_s"] if rows else 0.0,
        entropy=at_the_end("entropy"),
        effective_sample_size=at_the_end("effective_sample_size"),
        clip_fraction=at_the_end("clip_fraction"),
        staleness=fmean(steady),
        rewards=[row["episode/score"] for row in rows],
        sample_sizes=[row["effective_sample_size"] for row in rows],
        error=error,
    )


def results_of(runs: Sequence[Run], args: argparse.Namespace) -> list[Result]:
    """Of all runs; those whose files are there are read, the others done and written."""
    directory = args.run_dir / results_directory(args)
    results: list[Result] = []
    left = [run for run in runs if not (directory / f"{run.name}.json").exists()]
    seconds = sum(OVERHEAD_S + (run.seconds or (run.steps or 0) * STEP_S + run.max_staleness) for run in left)
    say = Console().print
    say(f"{len(runs) - len(left)} of {len(runs)} runs are done; the others take about {seconds / 60:.0f} minutes")
    for number, run in enumerate(runs, start=1):
        path = directory / f"{run.name}.json"
        if not path.exists():
            directory.mkdir(parents=True, exist_ok=True)
            content = dataclasses.asdict(asyncio.run(train(run, args)))
            write_atomically(path, json.dumps(content, indent=2) + "\n")
        stored = json.loads(path.read_text())
        result = Result(**{**stored, "run": Run(**stored["run"])})
        results.append(result)
        say(f"{number}/{len(runs)} {run.name}: {result.before:.3f} -> {result.after:.3f} {result.error}")
    return results


def results_directory(args: argparse.Namespace) -> str:
    """Named by the settings that results depend on."""
    length = f"{args.steps}-steps" if args.staleness else f"{args.seconds:g}-s"
    return f"results-{length}-batch-{args.batch_size}-lr-{args.lr:g}-minibatches-{args.minibatches}"


def mean_score(result: Result) -> float:
    """Over all steps: it is higher the earlier a run has learned."""
    return fmean(result.rewards or [float("nan")])


def table(results: Sequence[Result], key: Callable[[Run], str], columns: dict[str, Callable[[Result], float]]) -> str:
    """Markdown, with a row for each key: means over seeds, and of the score afterwards the range."""
    head = ["", "seeds", "before", "after", "worst to best", *columns]
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    for name in dict.fromkeys(key(result.run) for result in results):
        rows = [result for result in results if key(result.run) == name]
        after = [result.after for result in rows]
        cells = [name, str(len(rows)), f"{fmean(r.before for r in rows):.3f}", f"{fmean(after):.3f}"]
        cells.append(f"{min(after):.3f} to {max(after):.3f}")
        means = [fmean(map(column, rows)) for column in columns.values()]
        cells += [f"{mean:.0f}" if mean >= 100 else f"{mean:.3g}" for mean in means]
        failed = sum(bool(result.error) for result in rows)
        lines.append(" | ".join(cells) + (f" ({failed} ended early)" if failed else ""))
    return "".join(f"| {line} |\n" for line in lines)


def plot_presets(results: Sequence[Result], path: Path) -> None:
    by_preset = {r.run.preset: [x.after for x in results if x.run.preset == r.run.preset] for r in results}
    ranked = sorted(by_preset, key=lambda name: fmean(by_preset[name]))
    figure = Figure(figsize=(7, 1 + 0.24 * len(ranked)), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(ranked):
        axes.plot(by_preset[name], [place] * len(by_preset[name]), "o", color="C0", alpha=0.5)
        axes.plot(fmean(by_preset[name]), place, "|", color="black", markersize=12)
    axes.axvline(fmean(r.before for r in results), color="grey", linestyle=":", label="before")
    axes.set_yticks(range(len(ranked)), ranked)
    axes.set(xlabel="held-out score after training (a dot a seed)", xlim=(0, 1))
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=120)


def plot_staleness(results: Sequence[Result], path: Path) -> None:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels: dict[str, Callable[[Result], float]] = {
        "held-out score after training": lambda r: r.after,
        "training score, mean of all steps": mean_score,
    }
    for axes, (label, value) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for colour, name in enumerate(dict.fromkeys(r.run.label for r in results)):
            rows = [r for r in results if r.run.label == name]
            etas = sorted({r.run.max_staleness for r in rows})
            means = [fmean(value(r) for r in rows if r.run.max_staleness == eta) for eta in etas]
            places = [etas.index(r.run.max_staleness) for r in rows]
            axes.plot(places, [value(r) for r in rows], "o", color=f"C{colour}", alpha=0.4)
            axes.plot(range(len(etas)), means, color=f"C{colour}", label=name)
            axes.set_xticks(range(len(etas)), map(str, etas))
        axes.set(xlabel="max_staleness", ylabel=label, ylim=(0.6, 1))
        axes.legend(loc="lower left")
    figure.savefig(path, dpi=120)


def measure_presets(args: argparse.Namespace) -> None:
    fields: dict[str, Any] = {"max_staleness": 2, "seconds": args.seconds, "steps": None}
    runs = [Run(preset=name, seed=seed, **fields) for seed in args.seeds or (0, 1, 2) for name in args.presets]
    results = results_of(runs, args)
    text = table(
        sorted(results, key=lambda result: args.presets.index(result.run.preset)),
        lambda run: run.preset,
        {
            "training score, mean": mean_score,
            "steps": lambda r: r.steps,
            "episodes": lambda r: r.episodes,
            "entropy": lambda r: r.entropy,
            "effective sample size": lambda r: r.effective_sample_size,
            "clipped": lambda r: r.clip_fraction,
        },
    )
    report(text, args.run_dir / f"{results_directory(args)}.md")
    plot_presets(results, args.plot or Path("docs/algorithms.png"))


def measure_staleness(args: argparse.Namespace) -> None:
    variants = [("decoupled_ppo", None), *(("decoupled_ppo", name) for name in args.remedies)]
    variants = variants if args.remedies else [("naive", None), *variants]
    runs = [
        Run(preset=name, remedy=remedy, seed=seed, max_staleness=eta, seconds=None, steps=args.steps)
        for seed in args.seeds or range(5)
        for eta in args.etas
        for name, remedy in variants
    ]
    results = results_of(runs, args)
    text = table(
        sorted(results, key=lambda r: (r.run.max_staleness, variants.index((r.run.preset, r.run.remedy)))),
        lambda run: f"eta {run.max_staleness}, {run.label}",
        {
            "staleness": lambda r: r.staleness,
            "entropy": lambda r: r.entropy,
            "effective sample size": lambda r: r.effective_sample_size,
            "its smallest": lambda r: min(r.sample_sizes, default=float("nan")),
            "clipped": lambda r: r.clip_fraction,
            "training score, mean": mean_score,
        },
    )
    of_remedies = "-remedies" if args.remedies else ""
    report(text, args.run_dir / f"{results_directory(args)}{of_remedies}.md")
    plot_staleness(results, args.plot or Path(f"docs/algorithms_staleness{of_remedies.replace('-', '_')}.png"))


def report(text: str, path: Path) -> None:
    print(text)
    write_atomically(path, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=list(PRESETS), metavar="PRESET")
    parser.add_argument("--seconds", type=float, default=15.0, help="of training, for each run")
    parser.add_argument("--staleness", action="store_true", help="naive against decoupled_ppo, over --etas")
    parser.add_argument("--etas", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16])
    parser.add_argument("--remedies", nargs="+", default=[], choices=list(REMEDIES), help="with --staleness")
    parser.add_argument("--steps", type=int, default=60, help="of each run with --staleness")
    parser.add_argument("--seeds", type=int, nargs="+", default=None)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--batch_size", type=int, default=None, help="32 groups unless set, 16 with --staleness")
    parser.add_argument("--minibatches", type=int, default=None, help="at most 4 unless set; 2 with --staleness")
    parser.add_argument(
        "--evaluations", type=int, default=4, help="after each run; answers are sampled, so these differ"
    )
    parser.add_argument("--run_dir", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--plot", type=Path, default=None, help="where to write the plot, as a PNG")
    args = parser.parse_args()
    args.minibatches = args.minibatches or (2 if args.staleness else 4)
    args.batch_size = args.batch_size or (16 if args.staleness else 32)
    (measure_staleness if args.staleness else measure_presets)(args)


if __name__ == "__main__":
    main()

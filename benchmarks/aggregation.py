"""Which preset when losing episodes are longer than winning ones, and when they are shorter: a controlled comparison.

    python benchmarks/aggregation.py                     # every task, algorithm and seed that is not done yet
    python benchmarks/aggregation.py --tasks ramble --seeds 0

Three tasks of a tiny model. In `ramble` a long answer is mostly wrong, in `guess` (an agent with turns) an episode that
loses has used up its turns, and in `count` an answer that stops too early loses. The algorithms differ in what weighs
the same in a batch: tokens, trajectories, or neither. Each task and seed has one warm-started model for all of them,
with the same examples, learning rate and servers. A run that is done is not done again. Written to --directory: the
runs, results.json, table.md and curves.png.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.figure import Figure

import arl
from arl.rewards import InlineReward

SHAPE = arl.TinyShape(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16)
"""Some 100,000 parameters."""
PHRASES = ("Largest of", "Count from", "Guess a digit.", "higher", "lower", " then ", "?")
DIGITS = "0123456789"
MAX_GUESSES = 6
NUM_HELD_OUT = 100
LAST = 3
"""Evaluations at the end of a run, of which the mean is told; and batches at its beginning, whose lengths are."""

Example = Mapping[str, Any]
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task, its demonstrations and the workflow that plays it."""

    examples: Callable[[], list[dict[str, Any]]]
    demonstration: Callable[[Example, random.Random], Messages]
    """Of a teacher who is often wrong: a question and an answer, or a whole conversation."""
    workflow: Callable[[Any], arl.RolloutWorkflow]
    """Of a tokenizer."""


def asked(example: Example) -> Messages:
    return [{"role": "user", "content": example["question"]}]


def answered(example: Example, answer: str) -> Messages:
    return [*asked(example), {"role": "assistant", "content": answer}]


def ends_right(answer: str, data: Example) -> float:
    return float(answer.strip()[-1:] == data["answer"])


def is_right(answer: str, data: Example) -> float:
    return float(answer.strip() == data["answer"])


# The tasks ---------------------------------------------------------------------------------------------------------


def largest() -> list[dict[str, Any]]:
    drawn = random.Random(0).sample(list(product(DIGITS, repeat=3)), 1000)
    return [{"question": f"Largest of {' '.join(digits)}?", "answer": max(digits)} for digits in drawn]


def rambling(example: Example, draw: random.Random) -> Messages:
    """A short answer, mostly right, or a long one that ends with any of the digits."""
    digits = example["question"].removesuffix("?").split()[-3:]
    if draw.random() < 0.7:
        return answered(example, example["answer"] if draw.random() < 0.7 else draw.choice(digits))
    steps = [draw.choice(digits) for _ in range(draw.randint(8, 20))]
    return answered(example, " then ".join(steps))


def counts() -> list[dict[str, Any]]:
    drawn = random.Random(0)
    pairs = [drawn.sample(range(10), 2) for _ in range(1000)]
    return [{"question": f"Count from {first} to {last}.", "answer": counted(first, last)} for first, last in pairs]


def counted(first: int, last: int) -> str:
    step = 1 if last > first else -1
    return " ".join(map(str, range(first, last + step, step)))


def incomplete(example: Example, draw: random.Random) -> Messages:
    """Mostly stops too early, and sometimes goes wrong."""
    digits = example["answer"].split()
    if draw.random() < 0.7:
        digits = digits[: draw.randint(1, len(digits))]
    if draw.random() < 0.1:
        digits[-1] = draw.choice(DIGITS)
    return answered(example, " ".join(digits))


def secrets() -> list[dict[str, Any]]:
    drawn = random.Random(0)
    return [{"question": "Guess a digit.", "answer": drawn.choice(DIGITS)} for _ in range(1000)]


def feedback(answer: str, data: Example, attempt: int) -> str | None:
    guess = answer.strip()
    if guess == data["answer"]:
        return None
    return "higher" if guess < data["answer"] else "lower"


async def afeedback(answer: str, data: Example, attempt: int) -> str | None:
    return feedback(answer, data, attempt)


def guessing(example: Example, draw: random.Random) -> Messages:
    """Guesses of a player who listens to half of what it is told."""
    chat, low, high = asked(example), 0, 9
    for attempt in range(MAX_GUESSES):
        guess = draw.randint(low, high) if draw.random() < 0.5 else draw.randint(0, 9)
        chat.append({"role": "assistant", "content": str(guess)})
        said = feedback(str(guess), example, attempt)
        if said is None or attempt == MAX_GUESSES - 1:
            return chat
        chat.append({"role": "user", "content": said})
        low, high = (max(low, min(9, guess + 1)), high) if said == "higher" else (low, min(high, max(0, guess - 1)))
        if low > high:
            low, high = 0, 9
    return chat


def ramble(tokenizer: Any) -> arl.RolloutWorkflow:
    return arl.SingleTurnWorkflow(tokenizer, InlineReward(ends_right), sampling=arl.SamplingParams(max_new_tokens=48))


def count(tokenizer: Any) -> arl.RolloutWorkflow:
    return arl.SingleTurnWorkflow(tokenizer, InlineReward(is_right), sampling=arl.SamplingParams(max_new_tokens=48))


def guess(tokenizer: Any) -> arl.RolloutWorkflow:
    return arl.MultiTurnWorkflow(
        tokenizer,
        InlineReward(ends_right),
        feedback=afeedback,
        max_turns=MAX_GUESSES,
        sampling=arl.SamplingParams(max_new_tokens=4),
    )


TASKS: Mapping[str, Task] = {
    "ramble": Task(examples=largest, demonstration=rambling, workflow=ramble),
    "guess": Task(examples=secrets, demonstration=guessing, workflow=guess),
    "count": Task(examples=counts, demonstration=incomplete, workflow=count),
}

ALGORITHMS: Mapping[str, Any] = {
    "decoupled_ppo": "decoupled_ppo",
    "decoupled_ppo, sequence_mean": arl.preset("decoupled_ppo", aggregation="sequence_mean"),
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
}


# The runs ----------------------------------------------------------------------------------------------------------


def warm_start(task: Task, directory: Path, seed: int, num_demonstrations: int = 4000) -> Path:
    """Write the model with which all runs of a seed begin, unless it is there."""
    if directory.exists():
        return directory
    blank, draw = directory.with_name(f"{directory.name}-blank"), random.Random(seed)
    shutil.rmtree(blank, ignore_errors=True)
    arl.write_tiny_model(blank, PHRASES, SHAPE)
    tokenizer = arl.load_tokenizer(blank)
    shown: list[Any] = []
    for example in draw.choices(task.examples()[NUM_HELD_OUT:], k=num_demonstrations):
        chat = task.demonstration(example, draw)
        conversation = arl.Conversation(tokenizer, chat[:1])
        for message in chat[1:]:
            if message["role"] == "assistant":
                conversation.demonstrate(message["content"])
            else:
                conversation.add(message)
        shown.append((conversation.token_ids, conversation.loss_mask))
    optimizer = arl.OptimizerConfig(lr=3e-3, schedule="cosine", total_steps=-(-len(shown) // 16), min_lr_ratio=0.1)
    engine = arl.load_train_engine(blank, arl.TrainConfig(optimizer=optimizer, num_threads=1), seed=seed)
    try:
        arl.finetuning.finetune(engine, shown, batch_size=16)
        engine.export(directory)
    finally:
        engine.close()
        shutil.rmtree(blank)
    return directory


def run(name: str, algorithm: str, seed: int, directory: Path, steps: int) -> dict[str, Any]:
    """One run's evaluations, and the mean length of its first batches' winning and losing episodes."""
    run_dir = directory / f"{name}-{algorithm.replace(', ', '-')}-{seed}"
    result = run_dir / "result.json"
    if result.exists():
        return json.loads(result.read_text())
    task, rows = TASKS[name], TASKS[name].examples()
    model = warm_start(task, directory / f"{name}-model-{seed}", seed)
    config = arl.Config.model_validate(
        {
            "model": str(model),
            "evaluation": {"every": 10},
            "rollout": {"seed_requests": True, "batch_size": 16, "group_size": 8, "max_staleness": 2},
            "engine": {"num_threads": 1},
            "train": {"num_threads": 1, "optimizer": {"lr": 5e-4}},
            "checkpoint": {"every_s": None},
            "log": {"console": False, "events": None},
        }
    )
    arl.train(
        workflow=task.workflow(arl.load_tokenizer(model)),
        dataset=rows[NUM_HELD_OUT:],
        eval_dataset=rows[:NUM_HELD_OUT],
        steps=steps,
        algorithm=ALGORITHMS[algorithm],
        seed=seed,
        run_dir=run_dir,
        config=config,
    )
    lines, metrics = ([*_rows(run_dir / f"{kind}.jsonl")] for kind in ("evaluations", "metrics"))
    measured = {
        "task": name,
        "algorithm": algorithm,
        "seed": seed,
        "rewards": [[line["version"], line["reward"]] for line in lines],
        **{f"{outcome}_tokens": fmean(_lengths(metrics, outcome)) for outcome in ("winning", "losing")},
    }
    result.write_text(json.dumps(measured))
    return measured


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    yield from map(json.loads, path.read_text().splitlines())


def _lengths(metrics: Sequence[Mapping[str, Any]], outcome: str) -> list[float]:
    """Trained tokens of the first batches' episodes that win, or lose."""
    return [row[name] for row in metrics[:LAST] if (name := f"length/{outcome}_tokens") in row]


# The table ---------------------------------------------------------------------------------------------------------


def table(results: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| task | algorithm | held-out before | last three | mean of all | tokens: wins | losses |",
        "|---|---|---|---|---|---|---|",
    ]
    for task, algorithm in product(TASKS, ALGORITHMS):
        runs = [r for r in results if (r["task"], r["algorithm"]) == (task, algorithm)]
        if not runs:
            continue
        rewards = [[reward for _, reward in r["rewards"]] for r in runs]
        cells = [
            _spread([r[0] for r in rewards]),
            _spread([fmean(r[-LAST:]) for r in rewards]),
            _spread([fmean(r[1:]) for r in rewards]),
            f"{fmean(r['winning_tokens'] for r in runs):.1f}",
            f"{fmean(r['losing_tokens'] for r in runs):.1f}",
        ]
        lines.append(f"| {task} | {algorithm} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The held-out reward over the steps: a thin line for each run, a thick one for an algorithm's mean."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(TASKS)), TASKS, strict=True):
        for number, algorithm in enumerate(ALGORITHMS):
            runs = [dict(r["rewards"]) for r in results if (r["task"], r["algorithm"]) == (task, algorithm)]
            for one in runs:
                axes.plot(one.keys(), one.values(), color=f"C{number}", alpha=0.3, linewidth=1)
            shared = sorted(set[int]().union(*runs)) if runs else []
            means = [fmean(one[version] for one in runs if version in one) for version in shared]
            axes.plot(shared, means, color=f"C{number}", linewidth=2, label=algorithm)
        axes.set(title=task, xlabel="step", ylabel="held-out reward", ylim=(0, 1))
    figure.axes[0].legend()
    figure.savefig(path, dpi=80)


def _spread(values: Sequence[float]) -> str:
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{spread}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--directory", type=Path, default=Path("runs/aggregation"))
    given = parser.parse_args()
    results: list[dict[str, Any]] = []
    for seed, name, algorithm in product(given.seeds, given.tasks, given.algorithms):
        results.append(run(name, algorithm, seed, given.directory, given.steps))
        last = results[-1]
        print(name, algorithm, seed, [round(reward, 2) for _, reward in last["rewards"]], flush=True)
    (given.directory / "results.json").write_text(json.dumps(results))
    (given.directory / "table.md").write_text(table(results))
    plot(results, given.directory / "curves.png")
    print(table(results))

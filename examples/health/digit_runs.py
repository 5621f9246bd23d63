"""A healthy run and five sick ones, of a tiny model: each takes less than a minute on one core.

    python examples/health/digit_runs.py healthy
    python examples/health/digit_runs.py hacking collapse stale starved template
    arl view runs/health

The question is which of three digits is the largest. The model has learned to answer from demonstrations of a careless
teacher. Each sick run differs from the healthy one in what its function changes, and in nothing else. docs/healthy.md
shows all six, and says how you would have noticed.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import arl
from arl.rewards import InlineReward

SHAPE = arl.TinyShape(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16)
"""Some 100,000 parameters."""
PHRASES = ("Largest of", "?")
Settings = dict[str, Any]
"""Arguments of `arl.train`."""


# The task ----------------------------------------------------------------------------------------------------------


def questions() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """900 to train on, and 100 that are held out."""
    drawn = random.Random(0).sample(list(product("0123456789", repeat=3)), 1000)
    made = [{"question": f"Largest of {' '.join(digits)}?", "answer": max(digits)} for digits in drawn]
    return made[:900], made[900:]


def exact(answer: str, data: Mapping[str, Any]) -> float:
    """What is wanted: the largest digit, and nothing else."""
    return float(answer.strip() == data["answer"])


def mentions(answer: str, data: Mapping[str, Any]) -> float:
    """What is easily written instead: the largest digit is somewhere in the answer."""
    return float(data["answer"] in answer)


# The model ---------------------------------------------------------------------------------------------------------


def careless(example: Mapping[str, str], draw: random.Random) -> str:
    """A teacher's answer: right, another of the digits, or two of them."""
    digits = example["question"].removesuffix("?").split()[-3:]
    answers = (example["answer"], draw.choice(digits), "".join(draw.sample(digits, 2)))
    return draw.choices(answers, weights=(0.5, 0.3, 0.2))[0]


def warm_start(directory: Path, num_demonstrations: int = 3200) -> Path:
    """Write the model that all runs begin with, unless it is there."""
    if directory.exists():
        return directory
    blank, draw = directory.with_name("blank"), random.Random(0)
    shutil.rmtree(blank, ignore_errors=True)  # of a warm start that was interrupted
    arl.write_tiny_model(blank, PHRASES, SHAPE)
    tokenizer = arl.load_tokenizer(blank)
    shown: list[Any] = []
    for example in draw.choices(questions()[0], k=num_demonstrations):
        chat = arl.Conversation(tokenizer, [{"role": "user", "content": example["question"]}])
        chat.demonstrate(careless(example, draw))
        shown.append((chat.token_ids, chat.loss_mask))
    optimizer = arl.OptimizerConfig(lr=3e-3, schedule="cosine", total_steps=-(-len(shown) // 16), min_lr_ratio=0.1)
    engine = arl.load_train_engine(blank, arl.TrainConfig(optimizer=optimizer, num_threads=1), seed=0)
    try:
        arl.finetuning.finetune(engine, shown, batch_size=16)
        engine.export(directory)
    finally:
        engine.close()
        shutil.rmtree(blank)
    return directory


# The runs ----------------------------------------------------------------------------------------------------------


def healthy(model: Path) -> Settings:
    training, held_out = questions()
    return {
        "model": model,
        "reward": {"exact": InlineReward(exact)},
        "dataset": training,
        "eval_dataset": held_out,
        "max_new_tokens": 12,
        "steps": 100,
        "batch_size": 16,
        "group_size": 8,
        "max_staleness": 2,
        "lr": 5e-4,
        "seed": 0,
    }


def hacking(model: Path) -> Settings:
    """The reward looks for the digit anywhere in the answer. `exact` has no weight: it only watches."""
    return healthy(model) | {"reward": {"mentions": InlineReward(mentions), "exact": (0.0, InlineReward(exact))}}


def collapse(model: Path) -> Settings:
    """A learning rate six times as large, four epochs on each batch, and no upper clip: an answer that was right once
    becomes certain at once."""
    unclipped = {"clip_high": None}
    return healthy(model) | {"lr": 3e-3, "algorithm": arl.preset("decoupled_ppo", loss=unclipped, epochs=4)}


def stale(model: Path) -> Settings:
    """Tokens may be 32 versions old, eight steps on each batch move the policy fast, and nothing bounds the weights.

    The eight steps take longer than generation does, on any machine: so the tokens do become that old.
    """
    uncorrected = arl.preset("decoupled_ppo", weights=[{"level": "token"}], minibatches=4, epochs=2)
    return healthy(model) | {"max_staleness": 32, "lr": 1e-3, "algorithm": uncorrected}


def starved(model: Path) -> Settings:
    """Nine of ten examples spell their answer out, which the model never does: all of their episodes have reward 0."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    training, _ = questions()
    spelt = [example | {"answer": words[int(example["answer"])]} for example in training[90:]]
    return healthy(model) | {"dataset": [*training[:90], *spelt]}


def template(model: Path) -> Settings:
    """A chat template that ends turns with <|endoftext|>, for a model that has learned to end them with <|im_end|>."""
    learned, other = "<|im_end|>", "<|endoftext|>"
    directory = model.with_name("another-template")
    if not directory.exists():
        shutil.copytree(model, directory)
        tokenizer = arl.load_tokenizer(model)
        eos = (f'"eos_token_id": {tokenizer.convert_tokens_to_ids(token)}' for token in (learned, other))
        for name, old, new in (
            ("chat_template.jinja", learned, other),
            ("tokenizer_config.json", f'"eos_token": "{learned}"', f'"eos_token": "{other}"'),
            ("config.json", *eos),
        ):
            text = (directory / name).read_text()
            (directory / name).write_text(text.replace(old, new))
        (directory / "generation_config.json").unlink()
    return healthy(model) | {"model": directory}


RUNS: Mapping[str, Callable[[Path], Settings]] = {
    run.__name__: run for run in (healthy, hacking, collapse, stale, starved, template)
}


def train(name: str, directory: Path, **changes: Any) -> Mapping[str, float]:
    """One of RUNS, in directory/NAME; its summary. changes: of the arguments of `arl.train`."""
    config = arl.Config.model_validate(
        {
            "model": "",
            "evaluation": {"every": 10},
            "rollout": {"seed_requests": True},  # so that all evaluations of a model read the same
            "engine": {"num_threads": 1},
            "train": {"num_threads": 1},
            "checkpoint": {"every_s": None},
            "log": {"console": False},
        }
    )
    settings = RUNS[name](warm_start(directory / "model"))
    return arl.train(**settings | {"config": config, "run_dir": directory / name} | changes).summary


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train healthy and sick runs of a tiny model.")
    parser.add_argument("names", nargs="+", choices=RUNS)
    parser.add_argument("--directory", type=Path, default=Path("runs/health"))
    given = parser.parse_args()
    for name in given.names:
        print(f"{name}: {train(name, given.directory)}")

"""Trains in an environment of verifiers, with its tasks, rollouts and rewards.

    python examples/agents/verifiers_env.py

builds a tiny model, warm-starts it on demonstrations, and trains it in the environment of backwards_env.py on two CPU
cores in minutes. The same with any installed environment and a real model:

    python examples/agents/verifiers_env.py --model Qwen/Qwen3-0.6B --env '{"taskset": {"id": "gsm8k-v1"}}' \\
        --engine.kind sglang --engine.addresses http://127.0.0.1:30000 \\
        --train.device cuda --train.dtype bfloat16 --run_dir runs/gsm8k_env

Read and score its episodes without training:

    arl try examples/agents/verifiers_env.py --n 4
    arl eval examples/agents/verifiers_env.py --n 8
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import islice
from string import ascii_lowercase
from typing import Any, ClassVar

from backwards_env import SYSTEM, TRY_AGAIN, question, words
from pydantic import Field, PositiveFloat, PositiveInt

from arl import (
    Example,
    Experiment,
    ExperimentConfig,
    SamplingParams,
    Setup,
    VerifiersWorkflow,
    finetuning,
    load_tokenizer,
)

NUM_CAREFUL, NUM_MIXED = 10000, 1000
"""First only careful demonstrations, which teach a model to spell; then mixed ones, which teach it bad habits."""
CARE = 0.3
"""The share of careful work in mixed demonstrations."""
DEMONSTRATION_SEED = 1


class VerifiersEnvConfig(ExperimentConfig):
    """The settings for training in an environment, in addition to the settings of every run."""

    tiny_settings: ClassVar[Mapping[str, Any]] = {
        "run_dir": "runs/verifiers_env",
        "steps": 30,
        "rollout": {"batch_size": 8, "group_size": 8, "max_staleness": 2},
        "train": {"optimizer": {"lr": 1e-4, "schedule": "linear", "total_steps": 30, "min_lr_ratio": 0.1}},
        "evaluation": {"every": 15},
        "max_new_tokens": 12,
    }

    env: dict[str, Any] = Field(default={"taskset": {"id": "backwards_env"}})
    """A verifiers config: {"taskset": {"id": NAME}, ...}. NAME is the name of an installed environment. Agents run in
    this process unless the config says otherwise."""
    num_tasks: PositiveInt = 1024
    """How many of the environment's first tasks to train on."""
    num_held_out: PositiveInt = 96
    """How many of the tasks after these to evaluate on."""
    max_new_tokens: PositiveInt = 1024
    """Tokens that each turn may have."""
    temperature: PositiveFloat = 1.0
    """The temperature that turns are sampled at."""


def prepare(config: VerifiersEnvConfig) -> Setup:
    model = config.model
    if config.is_tiny:
        model = str(finetuning.warm_start(config.run_dir / "model", lambda: lessons(config.seed), seed=config.seed))
    sampling = SamplingParams(max_new_tokens=config.max_new_tokens, temperature=config.temperature)
    workflow = VerifiersWorkflow(config.env, load_tokenizer(model), sampling=sampling)
    dataset = workflow.rows(workflow.env.taskset.take(config.num_tasks))
    held_out = workflow.rows(workflow.env.taskset.skip(config.num_tasks).take(config.num_held_out))
    return Setup(model=model, workflow=workflow, dataset=dataset, eval_dataset=held_out)


def lessons(seed: int) -> list[list[Example]]:
    """The tiny model's demonstrations: words spelled backwards, at first always with care."""
    rng = random.Random(seed)
    shown = list(islice(words(DEMONSTRATION_SEED, 4, 6), NUM_CAREFUL + NUM_MIXED))
    careful = [spelling(word, rng, care=1.0) for word in shown[:NUM_CAREFUL]]
    return [careful, [spelling(word, rng, care=CARE) for word in shown[NUM_CAREFUL:]]]


def spelling(word: str, rng: random.Random, care: float) -> Example:
    """A spelling that is right at once, at the second try, or never. care: how likely each try is right."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question(word)}]
    for _ in range(2):
        is_right = rng.random() < care
        messages.append({"role": "assistant", "content": word[::-1] if is_right else slip(word[::-1], rng)})
        if is_right:
            break
        messages.append({"role": "user", "content": TRY_AGAIN})
    return {"messages": messages if messages[-1]["role"] == "assistant" else messages[:-1]}


def slip(word: str, rng: random.Random) -> str:
    """The word with one letter left out or replaced."""
    at = rng.randrange(len(word))
    return word[:at] + rng.choice(["", rng.choice(ascii_lowercase)]) + word[at + 1 :]


experiment = Experiment(config=VerifiersEnvConfig, prepare=prepare)

if __name__ == "__main__":
    experiment.main()

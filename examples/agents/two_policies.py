"""Two agents that want different things of the same prompt: an author is to write vowels, a critic is to write digits.

    python examples/agents/two_policies.py --config examples/agents/two_policies.yaml

builds a tiny model with random weights and trains both roles from it in a minute on two CPU cores, each as a policy of
its own. Nothing in the prompts tells the roles apart, so one policy for both learns less of either:

    python examples/agents/two_policies.py

With adapters, both policies share servers. Adapters leave the model's head as it is, and a head with random
weights keeps all characters nearly equally likely. So this first teaches the tiny model to say vowels, consonants or
digits, as it happens:

    python examples/agents/two_policies.py --config examples/agents/two_policies.yaml \\
        --warm_start --weights.transport adapter --train.lora.rank 8

With a real model:

    python examples/agents/two_policies.py --config examples/agents/two_policies.yaml --model Qwen/Qwen3-0.6B \\
        --weights.transport adapter --train.lora.rank 16 --train.device cuda --engine.device cuda

Score the trained pair, each role played by its policy:

    arl eval examples/agents/two_policies.py --config examples/agents/two_policies.yaml --trained
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PositiveInt

from arl import (
    ArlError,
    Conversation,
    Example,
    Experiment,
    ExperimentConfig,
    RolloutWorkflow,
    Sampler,
    SamplingParams,
    Setup,
    TinyShape,
    Trajectory,
    finetuning,
    load_tokenizer,
    write_tiny_model,
)

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

WANTED = {"author": "aeiou", "critic": "0123456789"}
"""The characters that each role is rewarded for."""
ENOUGH = 8
"""So many wanted characters are worth the whole reward."""
SHAPE = TinyShape(hidden_size=64, num_layers=2)


class TwoPoliciesConfig(ExperimentConfig):
    """The settings of every run, with defaults for the tiny model."""

    tiny_settings: ClassVar[Mapping[str, Any]] = {
        "run_dir": "runs/one_policy",
        "steps": 80,
        "rollout": {"batch_size": 8, "group_size": 8, "max_staleness": 2},
        "train": {"optimizer": {"lr": 3e-3}},
        "max_new_tokens": 8,
    }

    max_new_tokens: PositiveInt = 1024
    """Tokens of an answer."""
    warm_start: bool = False
    """Whether the tiny model first learns to say vowels, consonants or digits. Adapters learn little without it."""


class Pair(RolloutWorkflow):
    """Both answer the same question. The reward counts the wanted characters of the answer, up to 1 for ENOUGH."""

    declared_roles = frozenset(WANTED)

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sampling: SamplingParams) -> None:
        self.tokenizer = tokenizer
        self.sampling = sampling

    async def arun_episode(self, engine: Sampler, data: Example) -> Sequence[Trajectory]:
        made: list[Trajectory] = []
        for role, wanted in WANTED.items():
            chat = Conversation(self.tokenizer, [{"role": "user", "content": data["question"]}], role=role)
            turn = await chat.agenerate(engine, self.sampling)
            reward = min(sum(map(turn.text.count, wanted)) / ENOUGH, 1.0)
            made += chat.trajectories(reward, {f"{role}_reward": reward})
        return made


def questions(first: int, count: int) -> list[Example]:
    return [{"question": f"Say something about {number}."} for number in range(first, first + count)]


def lessons(seed: int) -> list[list[Example]]:
    """The tiny model's demonstrations: answers of vowels, consonants or digits, to questions that nobody asks later."""
    rng = random.Random(seed)
    kinds = (*WANTED.values(), "bcdfghjklmnpqrstvwxyz")
    return [[answered(row, "".join(rng.choices(rng.choice(kinds), k=ENOUGH))) for row in questions(2000, 2000)]]


def answered(row: Example, text: str) -> Example:
    return {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": text}]}


def tiny_model(config: TwoPoliciesConfig) -> Path:
    directory = config.run_dir / "model"
    if config.warm_start:
        demonstrations = partial(lessons, config.seed)
        return finetuning.warm_start(directory, demonstrations, seed=config.seed, shape=SHAPE, lr=3e-3, num_threads=1)
    return write_tiny_model(directory, shape=SHAPE, seed=config.seed)


def prepare(config: TwoPoliciesConfig) -> Setup:
    if config.warm_start and not config.is_tiny:
        raise ArlError(f"warm_start is for the tiny model, and model is {config.model}; leave out one of them")
    model = str(tiny_model(config)) if config.is_tiny else config.model
    pair = Pair(load_tokenizer(model), SamplingParams(max_new_tokens=config.max_new_tokens))
    return Setup(model=model, workflow=pair, dataset=questions(0, 200), eval_dataset=questions(1000, 50))


experiment = Experiment(config=TwoPoliciesConfig, prepare=prepare)

if __name__ == "__main__":
    experiment.main()

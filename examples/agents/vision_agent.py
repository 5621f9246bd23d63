"""An agent that sees: it looks at a table with two dice, zooms in on one, and says what that die shows.

    python examples/agents/vision_agent.py

builds a tiny Qwen2.5-VL and trains it on two CPU cores in a minute. Its warm start shows it players who zoom in and
read the die, and then players who mostly guess. Reinforcement learning teaches it to rely on what it sees. The same
agent with a real model:

    python examples/agents/vision_agent.py --model Qwen/Qwen2.5-VL-3B-Instruct \\
        --engine.kind sglang --engine.addresses http://127.0.0.1:30000 \\
        --train.device cuda --train.dtype bfloat16 --run_dir runs/dice

Read and score its episodes without training:

    arl try examples/agents/vision_agent.py --n 4
    arl eval examples/agents/vision_agent.py --n 8
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import vision_tasks
from pydantic import PositiveFloat, PositiveInt

from arl import (
    Example,
    Experiment,
    ExperimentConfig,
    SamplingParams,
    Setup,
    Tool,
    ToolAgentWorkflow,
    finetuning,
    load_tokenizer,
)
from arl.rewards import InlineReward, Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM = "There are two dice on the table. Zoom in on the one in question, and answer with the number that it shows."


class VisionAgentConfig(ExperimentConfig):
    """The seeing agent's settings, in addition to the settings of every run."""

    tiny_settings: ClassVar[Mapping[str, Any]] = {
        "run_dir": "runs/vision",
        "steps": 40,
        "rollout": {"batch_size": 8, "group_size": 8, "max_staleness": 2},
        "train": {"optimizer": {"lr": 1e-3, "schedule": "linear", "total_steps": 40, "min_lr_ratio": 0.1}},
        "evaluation": {"every": 20},
        "max_new_tokens": 32,
    }

    num_tables: PositiveInt = 4000
    """How many tables to train on."""
    num_held_out: PositiveInt = 192
    """How many held-out tables to evaluate on."""
    max_new_tokens: PositiveInt = 1024
    """Tokens that each turn may have."""
    temperature: PositiveFloat = 1.0
    """The temperature that turns are sampled at."""


@asynccontextmanager
async def opened(data: Example) -> AsyncIterator[list[Tool]]:
    """The zoom of one episode, into its table."""
    yield [Tool.from_function(vision_tasks.Table(data["image"]).zoom)]


def is_right(answer: str, data: Example) -> float:
    return float(answer.rpartition("</think>")[2].strip() == str(data["answer"]))


@dataclass(kw_only=True, eq=False, repr=False)
class VisionAgent(ToolAgentWorkflow):
    """Looks, zooms, answers. Metric: found, 1 if it zoomed in on the die in question."""

    async def ascore_episode(self, episode) -> Score:
        score = await super().ascore_episode(episode)
        parts = [r.call.arguments.get("part") for r in episode.results if r.failure is None]
        return replace(score, metrics={"found": float(episode.data["part"] in parts)})


def agent(config: VisionAgentConfig, tokenizer: PreTrainedTokenizerBase) -> VisionAgent:
    return VisionAgent(
        tokenizer,
        InlineReward(is_right),
        system=SYSTEM,
        open_tools=opened,
        sampling=SamplingParams(max_new_tokens=config.max_new_tokens, temperature=config.temperature),
        max_turns=3,
    )


def prepare(config: VisionAgentConfig) -> Setup:
    model = config.model
    if config.is_tiny:
        model = str(
            finetuning.warm_start(
                config.run_dir / "model",
                lambda: vision_tasks.lessons(SYSTEM, 100 + config.seed),
                shape=(vision_tasks.SHAPE, vision_tasks.VISION),
                seed=config.seed,
                lr=3e-3,
                num_threads=1,
            )
        )
    return Setup(
        model=model,
        workflow=agent(config, load_tokenizer(model)),
        dataset=vision_tasks.tables(1, config.num_tables),
        eval_dataset=vision_tasks.tables(2, config.num_held_out),
    )


experiment = Experiment(config=VisionAgentConfig, prepare=prepare)

if __name__ == "__main__":
    experiment.main()

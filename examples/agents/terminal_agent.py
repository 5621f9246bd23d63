"""A terminal agent: it solves tasks in a shell, in a sandbox, and the tasks' own tests say how well.

    python examples/agents/terminal_agent.py

writes tasks in Harbor's format, builds a tiny model, warm-starts it on good and bad sessions, and trains it on two CPU
cores in minutes. Tasks run in bubblewrap (`make bubblewrap`, as root). The same agent with a real model and a directory
of Harbor's tasks, which run in Docker where they need an image:

    python examples/agents/terminal_agent.py --model Qwen/Qwen3-8B --tasks path/to/tasks --sandbox auto \\
        --engine.kind sglang --engine.addresses http://127.0.0.1:30000 \\
        --train.device cuda --train.dtype bfloat16 --run_dir runs/harbor

Read and score its episodes without training:

    arl try examples/agents/terminal_agent.py --n 4
    arl eval examples/agents/terminal_agent.py --n 8
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import terminal_tasks
from pydantic import PositiveFloat, PositiveInt

from arl import (
    Example,
    Experiment,
    ExperimentConfig,
    HarborWorkflow,
    SamplingParams,
    Setup,
    finetuning,
    harbor_tasks,
    load_tokenizer,
)
from arl.sandbox import find_sandbox

SYSTEM = "Solve the task in the terminal: look at what is there, then work. When you are done, answer without a call."


class TerminalAgentConfig(ExperimentConfig):
    """The terminal agent's settings, in addition to the settings of every run."""

    tiny_settings: ClassVar[Mapping[str, Any]] = {
        "run_dir": "runs/terminal",
        "steps": 24,
        "rollout": {"batch_size": 8, "group_size": 8, "max_staleness": 2},
        "train": {"optimizer": {"lr": 2e-4, "schedule": "linear", "total_steps": 24, "min_lr_ratio": 0.1}},
        "evaluation": {"every": 12},
        "max_new_tokens": 64,
        "max_turns": 4,
        "sandbox": "bubblewrap",
    }

    tasks: Path | None = None
    """A directory of tasks in Harbor's format. Unset: the example writes its own into run_dir."""
    num_tasks: PositiveInt = 384
    """How many tasks to write."""
    num_held_out: PositiveInt = 128
    """How many tasks to evaluate on, at most: of a directory, the last ones."""
    sandbox: Literal["auto", "bubblewrap", "docker"] = "auto"
    """Where tasks run: see HarborWorkflow."""
    max_turns: PositiveInt = 20
    """How many turns the agent may take in an episode."""
    max_output_chars: PositiveInt = 4000
    """Characters of a command's output that the agent reads."""
    max_new_tokens: PositiveInt = 1024
    """Tokens that each turn may have."""
    temperature: PositiveFloat = 1.0
    """The temperature that turns are sampled at."""


def prompt(instruction: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]


def rows(config: TerminalAgentConfig) -> tuple[Sequence[Example], Sequence[Example]]:
    """Training and held-out tasks."""
    if config.tasks is not None:
        found = harbor_tasks(config.tasks)
        return found[: -config.num_held_out], found[-config.num_held_out :]
    places = {"training": config.num_tasks, "held_out": config.num_held_out}
    written = [terminal_tasks.write_tasks(config.run_dir / "tasks", region, size) for region, size in places.items()]
    training, held_out = map(harbor_tasks, written)
    return training, held_out


async def prepare(config: TerminalAgentConfig) -> Setup:
    if config.sandbox != "docker":
        async with find_sandbox("bubblewrap"):
            pass  # fail before the model is made if there is no sandbox
    training, held_out = await asyncio.to_thread(rows, config)
    model = config.model
    if config.is_tiny:
        model = str(await asyncio.to_thread(tiny_model, config))
    agent = HarborWorkflow(
        load_tokenizer(model),
        system=SYSTEM,
        sampling=SamplingParams(max_new_tokens=config.max_new_tokens, temperature=config.temperature),
        sandbox=config.sandbox,
        max_turns=config.max_turns,
        max_output_chars=config.max_output_chars,
    )
    return Setup(model=model, workflow=agent, dataset=training, eval_dataset=held_out)


def tiny_model(config: TerminalAgentConfig) -> Path:
    """A tiny model, warm-started on good and bad sessions."""

    def lessons() -> list[list[Example]]:
        return terminal_tasks.lessons(prompt, HarborWorkflow.tool(), config.seed)

    return finetuning.warm_start(config.run_dir / "model", lessons, phrases=terminal_tasks.phrases(), seed=config.seed)


experiment = Experiment(config=TerminalAgentConfig, prepare=prepare)

if __name__ == "__main__":
    experiment.main()

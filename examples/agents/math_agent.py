"""A math agent: it reads a question, may call a calculator over several turns, and answers.

    python examples/agents/math_agent.py

builds a tiny model, warm-starts it on demonstrations, and trains it on reasoning-gym on two CPU cores in minutes. The
same agent with a real model and data:

    python examples/agents/math_agent.py --model Qwen/Qwen3-0.6B --dataset openai/gsm8k \\
        --engine.kind sglang --engine.addresses http://127.0.0.1:30000 \\
        --train.device cuda --train.dtype bfloat16 --run_dir runs/gsm8k

Read and score its episodes without training:

    arl try examples/agents/math_agent.py --n 4
    arl eval examples/agents/math_agent.py --n 8
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import math_tasks
from calculator import calculator
from pydantic import PositiveFloat, PositiveInt

from arl import (
    Conversation,
    Example,
    Experiment,
    ExperimentConfig,
    RolloutWorkflow,
    Sampler,
    SamplingParams,
    Setup,
    Tool,
    Trajectory,
    acall_tools,
    finetuning,
    load_splits,
    load_tokenizer,
    parse_tool_calls,
)
from arl.rewards import InlineReward, NumericMatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM = "Solve the problem. You may use the calculator, several times if need be. End with the answer, a number."
CALCULATOR = Tool.from_function(calculator)


class MathAgentConfig(ExperimentConfig):
    """The math agent's settings, in addition to the settings of every run."""

    tiny_settings: ClassVar[Mapping[str, Any]] = {
        "run_dir": "runs/quickstart",
        "steps": 60,
        "rollout": {"batch_size": 32, "group_size": 8, "max_staleness": 2},
        "train": {"optimizer": {"lr": 1e-4, "schedule": "linear", "total_steps": 60, "min_lr_ratio": 0.1}},
        "evaluation": {"every": 20},
        "max_new_tokens": 32,
        "max_turns": 4,
    }

    dataset: str = "reasoning-gym"
    """Columns `question` and `answer`: a dataset on the hub, a file or a directory; `reasoning-gym` makes its own."""
    eval_dataset: str | None = None
    """The dataset of held-out questions: a file, or a dataset's `test` split. Unset: `dataset`'s `test` split, or the
    last num_held_out rows if `dataset` is a single file."""
    num_questions: PositiveInt = 4096
    """How many training questions to make (reasoning-gym only)."""
    num_held_out: PositiveInt = 192
    """How many held-out questions to evaluate on, at most."""
    max_turns: PositiveInt = 6
    """How many turns the agent may take in an episode."""
    max_new_tokens: PositiveInt = 1024
    """Tokens that each turn may have."""
    temperature: PositiveFloat = 1.0
    """The temperature that turns are sampled at."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MathAgent(RolloutWorkflow):
    """Speaks until it answers without calling a tool. The answer's score is the reward."""

    tokenizer: PreTrainedTokenizerBase
    score: Callable[[str, Example], Awaitable[float]]
    sampling: SamplingParams
    max_turns: int
    calculator: Tool = CALCULATOR

    async def arun_episode(self, engine: Sampler, data: Example) -> tuple[Trajectory, ...]:
        conversation = Conversation(self.tokenizer, prompt(data["question"]), tools=[self.calculator])
        num_calls, reward = 0, 0.0
        for _ in range(self.max_turns):
            turn = await conversation.agenerate(engine, self.sampling)
            calls = parse_tool_calls(turn.text)
            if not calls:
                reward = await self.score(turn.text, data)
                break
            num_calls += len(calls)
            conversation.add(*await acall_tools(calls, [self.calculator]))
        return conversation.trajectories(reward, {"tool_calls": num_calls, "turns": conversation.num_turns})


def prompt(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def answer_score(config: MathAgentConfig) -> Callable[[str, Example], Awaitable[float]]:
    """1 if the last number of an answer is right."""
    return InlineReward(math_tasks.score) if config.dataset == "reasoning-gym" else NumericMatch()


def questions(config: MathAgentConfig) -> tuple[Sequence[Example], Sequence[Example]]:
    """Training and held-out questions. No question is in both."""
    if config.dataset == "reasoning-gym":
        held_out = math_tasks.held_out(config.num_held_out)
        return math_tasks.training(config.num_questions, held_out), held_out
    return load_splits(
        config.dataset, config.eval_dataset, num_held_out=config.num_held_out, columns=("question", "answer")
    )


def tiny_model(directory: Path, held_out: Sequence[Example], seed: int) -> Path:
    """A tiny model, warm-started on good and bad solutions of questions that are not held out."""
    return finetuning.warm_start(directory, lambda: math_tasks.lessons(prompt, CALCULATOR, held_out, seed), seed=seed)


def prepare(config: MathAgentConfig) -> Setup:
    training, held_out = questions(config)
    model = config.model
    if config.is_tiny:
        model = str(tiny_model(config.run_dir / "model", math_tasks.held_out(config.num_held_out), config.seed))
    agent = MathAgent(
        tokenizer=load_tokenizer(model),
        score=answer_score(config),
        sampling=SamplingParams(max_new_tokens=config.max_new_tokens, temperature=config.temperature),
        max_turns=config.max_turns,
    )
    return Setup(model=model, workflow=agent, dataset=training, eval_dataset=held_out)


experiment = Experiment(config=MathAgentConfig, prepare=prepare)

if __name__ == "__main__":
    experiment.main()

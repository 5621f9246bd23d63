"""Two agents in one episode: a solver answers, a checker accepts or rejects the answer, and the solver may try again.

    python examples/agents/multi_agent.py

builds a tiny model that plays both agents, each with a calculator, warm-starts it, and trains both roles at once on two
CPU cores in minutes. The solver is rewarded for right answers, the checker for right verdicts. Advantages compare each
only with its own role. The same pair with a real model and data:

    python examples/agents/multi_agent.py --model Qwen/Qwen3-0.6B --dataset openai/gsm8k \\
        --engine.kind sglang --engine.addresses http://127.0.0.1:30000 \\
        --train.device cuda --train.dtype bfloat16 --run_dir runs/gsm8k_pair

Read and score their episodes without training:

    arl try examples/agents/multi_agent.py --n 4
    arl eval examples/agents/multi_agent.py --n 8
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import math_agent
import multi_tasks
from math_agent import CALCULATOR, MathAgentConfig
from multi_tasks import Teacher
from pydantic import PositiveInt

from arl import (
    Example,
    Experiment,
    Member,
    SamplingParams,
    Setup,
    SolverCheckerWorkflow,
    finetuning,
    load_tokenizer,
    tiny_tokenizer,
)
from arl.rewards import Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SOLVER = "Solve the problem. You may use the calculator. End with the answer, a number."
CHECKER = "Check the answer. You may use the calculator. End with one word: ACCEPT if it is right, REJECT if not."


class MultiAgentConfig(MathAgentConfig):
    """The pair's settings, in addition to the math agent's and the settings of every run."""

    tiny_settings: ClassVar[Mapping[str, Any]] = {
        **MathAgentConfig.tiny_settings,
        "run_dir": "runs/multi_agent",
        "steps": 50,
        "rollout": {"batch_size": 16, "group_size": 8, "max_staleness": 2},
        "train": {"optimizer": {"lr": 1e-4, "schedule": "linear", "total_steps": 50, "min_lr_ratio": 0.1}},
        "evaluation": {"every": 25},
        "max_turns": 3,
    }

    max_attempts: PositiveInt = 2
    """How many times the solver may answer."""


@dataclass(kw_only=True, eq=False, repr=False)
class SolverAndChecker(SolverCheckerWorkflow):
    """Both may calculate before they answer. max_turns: how many turns each may take for an answer."""

    max_turns: int = 6

    def members(self) -> tuple[Member, Member]:
        solver, checker = super().members()
        own = {"tools": [CALCULATOR], "max_turns": self.max_turns}
        return replace(solver, **own), replace(checker, **own)


def pair(config: MultiAgentConfig, tokenizer: PreTrainedTokenizerBase) -> SolverAndChecker:
    score = math_agent.answer_score(config)

    async def solver_reward(answer: str, data: Example) -> Score:
        value = await score(answer, data)
        return Score(value, metrics={"solver_reward": value})

    return SolverAndChecker(
        tokenizer,
        solver_reward,
        sampling=SamplingParams(max_new_tokens=config.max_new_tokens, temperature=config.temperature),
        system=SOLVER,
        checker_system=CHECKER,
        max_attempts=config.max_attempts,
        max_turns=config.max_turns,
    )


def questions(config: MultiAgentConfig) -> tuple[Sequence[Example], Sequence[Example]]:
    """The math agent's questions; from reasoning-gym, only questions of one calculation."""
    training, held_out = math_agent.questions(config)
    if config.dataset != "reasoning-gym":
        return training, held_out
    return multi_tasks.short(training), multi_tasks.short(held_out)


def prepare(config: MultiAgentConfig) -> Setup:
    training, held_out = questions(config)
    model = config.model
    if config.is_tiny:
        teacher = Teacher(pair(config, tiny_tokenizer()), CALCULATOR, held_out, config.seed)
        model = str(finetuning.warm_start(config.run_dir / "model", teacher.lessons, seed=config.seed))
    agents = pair(config, load_tokenizer(model))
    return Setup(model=model, workflow=agents, dataset=training, eval_dataset=held_out)


experiment = Experiment(config=MultiAgentConfig, prepare=prepare)

if __name__ == "__main__":
    experiment.main()

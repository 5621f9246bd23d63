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

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

import math_agent
import multi_tasks
from math_agent import CALCULATOR, MathAgentConfig
from multi_tasks import CHECKER, SOLVER, Teacher, objection, to_check
from pydantic import PositiveInt

from arl import (
    Example,
    Experiment,
    Member,
    RolloutWorkflow,
    Sampler,
    SamplingParams,
    Setup,
    Team,
    TeamSettings,
    Trajectory,
    finetuning,
    load_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


@dataclass(frozen=True, kw_only=True, eq=False)
class SolverAndChecker(RolloutWorkflow):
    """The solver's reward is its last answer's; the checker's is the share of its verdicts that are right.

    A verdict is right if it accepts a right answer, or rejects a wrong one. One that can't be read is wrong, and counts
    as a rejection. Metrics: turns, tool calls, attempts, accepted (1 or 0), solver_reward, right_verdicts (share).
    """

    tokenizer: PreTrainedTokenizerBase
    score: Callable[[str, Example], Awaitable[float]]
    sampling: SamplingParams
    max_attempts: int
    """How many times the solver may answer."""
    max_turns: int
    """How many turns each may take for an answer, to calculate."""

    declared_roles = frozenset({"solver", "checker"})

    async def arun_episode(self, engine: Sampler, data: Example) -> Sequence[Trajectory]:
        members = [
            Member(name=name, system=system, tools=[CALCULATOR], max_turns=self.max_turns)
            for name, system in (("solver", SOLVER), ("checker", CHECKER))
        ]
        team = Team(engine, members, TeamSettings(tokenizer=self.tokenizer, sampling=self.sampling))
        said, is_accepted = data["question"], False
        scores: list[float] = []
        rights: list[bool] = []
        while not is_accepted and len(scores) < self.max_attempts:
            answer = await team.ask("solver", said)
            if answer is None:  # it calculated and calculated, or its context is full
                break
            scores.append(await self.score(answer, data))
            verdict = await team.ask("checker", to_check(data["question"], answer, len(scores) - 1))
            if verdict is None:
                break
            words = re.findall(r"\b(ACCEPT|REJECT)\b", verdict)
            is_accepted = words[-1:] == ["ACCEPT"]
            rights.append(bool(words) and is_accepted == (scores[-1] == 1.0))
            said = objection(verdict)
        rewards = {"solver": scores[-1] if scores else 0.0, "checker": fmean(rights) if rights else 0.0}
        metrics = {
            "attempts": float(len(scores)),
            "accepted": float(is_accepted),
            "solver_reward": rewards["solver"],
            "right_verdicts": rewards["checker"],
        }
        return team.trajectories(rewards, metrics)


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
        teacher = Teacher(CALCULATOR, held_out, config.seed)
        model = str(finetuning.warm_start(config.run_dir / "model", teacher.lessons, seed=config.seed))
    agents = SolverAndChecker(
        tokenizer=load_tokenizer(model),
        score=math_agent.answer_score(config),
        sampling=SamplingParams(max_new_tokens=config.max_new_tokens, temperature=config.temperature),
        max_attempts=config.max_attempts,
        max_turns=config.max_turns,
    )
    return Setup(model=model, workflow=agents, dataset=training, eval_dataset=held_out)


experiment = Experiment(config=MultiAgentConfig, prepare=prepare)

if __name__ == "__main__":
    experiment.main()

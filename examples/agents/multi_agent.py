"""Two agents in one episode: a solver answers, a checker accepts or rejects what it answered, and it may try again.

    python examples/agents/multi_agent.py

builds a tiny model that plays both, with a calculator each, warm-starts it, and trains both roles at once on two CPU
cores in minutes. The solver is paid for right answers, the checker for right verdicts; advantages compare each with its
like. The same pair on a real model and data:

    python examples/agents/multi_agent.py --model Qwen/Qwen3-0.6B --dataset openai/gsm8k \\
        --engine.kind sglang --engine.addresses http://127.0.0.1:30000
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import math_agent
import math_tasks
from math_agent import CALCULATOR, MathAgentConfig, final_answer, numeric_match
from pydantic import PositiveInt
from warm_start import Demonstration, tool_call, warm_start

from arl.api import Example, SamplingParams
from arl.engine.model import load_tokenizer
from arl.engine.tiny import tiny_tokenizer
from arl.experiment import Experiment, Setup
from arl.workflow.reward import InlineReward, Score
from arl.workflow.solver_checker import SolverCheckerWorkflow
from arl.workflow.team import Member

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SOLVER = "Solve the problem. You may use the calculator. End with the answer, a number."
CHECKER = "Check the answer. You may use the calculator. End with one word: ACCEPT if it is right, REJECT if not."

NUM_CAREFUL, NUM_MIXED = 6000, 1000
"""Demonstrations of each role: first only careful ones, then mixed ones, for bad habits."""


class MultiAgentConfig(MathAgentConfig):
    """The pair's settings, beside those of the math agent and of every run."""

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
    """How often the solver may answer."""


@dataclass(kw_only=True, eq=False, repr=False)
class SolverAndChecker(SolverCheckerWorkflow):
    """Both may calculate before they speak. max_turns: how often each may speak before it has answered."""

    max_turns: int = 6

    def members(self) -> tuple[Member, Member]:
        solver, checker = super().members()
        own = {"tools": [CALCULATOR], "max_turns": self.max_turns}
        return replace(solver, **own), replace(checker, **own)


def pair(config: MultiAgentConfig, tokenizer: PreTrainedTokenizerBase) -> SolverAndChecker:
    score = math_tasks.score if config.dataset == "reasoning-gym" else numeric_match

    def solver_reward(answer: str, data: Example) -> Score:
        value = score(final_answer(answer), data)
        return Score(value, metrics={"solver_reward": value})

    return SolverAndChecker(
        tokenizer,
        InlineReward(solver_reward),
        sampling=SamplingParams(max_new_tokens=config.max_new_tokens, temperature=config.temperature),
        system=SOLVER,
        checker_system=CHECKER,
        max_attempts=config.max_attempts,
        max_turns=config.max_turns,
    )


def questions(config: MultiAgentConfig) -> tuple[Sequence[Example], Sequence[Example]]:
    """The math agent's; of reasoning-gym's, those that take one calculation, which all but equations do."""
    training, held_out = math_agent.questions(config)
    if config.dataset != "reasoning-gym":
        return training, held_out
    return short(training), short(held_out)


def short(entries: Sequence[Example]) -> list[Example]:
    return [entry for entry in entries if entry["metadata"]["source_dataset"] != "simple_equations"]


class Teacher:
    """Demonstrates both roles, with the words that the workflow puts between them."""

    def __init__(self, agents: SolverAndChecker, excluded: Sequence[Example], seed: int) -> None:
        self._agents = agents
        self._excluded = excluded
        self._rng = random.Random(seed)
        self._seed = math_tasks.DEMONSTRATION_SEED + seed * 100_000_000

    def lessons(self) -> list[list[Demonstration]]:
        """Careful demonstrations of both roles, then mixed ones."""
        num = NUM_CAREFUL + NUM_MIXED
        entries = short(math_tasks.training(2 * num, self._excluded, self._seed))
        careful, mixed = entries[:NUM_CAREFUL], entries[NUM_CAREFUL:num]
        return [
            [shown(entry) for entry in careful for shown in (self.careful_solver, self.careful_checker)],
            [shown(entry) for entry in mixed for shown in (self.hasty_solver, self.hasty_checker)],
        ]

    def careful_solver(self, entry: Example) -> Demonstration:
        solution = math_tasks.solved(entry)
        return self._shown(self._agents.messages(entry), *self._calculated(entry), said(solution.answer))

    def hasty_solver(self, entry: Example) -> Demonstration:
        """Mostly answers at once; calculates where it was rejected."""
        if self._rng.random() < 0.4:
            return self.careful_solver(entry)
        guess, answer = math_tasks.garbled(entry["answer"], self._rng, 0.7), math_tasks.solved(entry).answer
        guessed = (self._agents.messages(entry), said(guess))
        if guess == answer:
            return self._shown(*guessed)
        return self._shown(*guessed, told(self._agents.objection("REJECT")), *self._calculated(entry), said(answer))

    def careful_checker(self, entry: Example) -> Demonstration:
        answer = math_tasks.solved(entry).answer
        first, second = self._proposed(answer), self._proposed(answer)
        checked = (self._asked(entry, first, 0), *self._calculated(entry), verdict(first == answer))
        if first == answer:
            return self._shown(*checked)
        return self._shown(*checked, self._asked(entry, second, 1), verdict(second == answer))

    def hasty_checker(self, entry: Example) -> Demonstration:
        """Mostly believes what it is told, or doubts it."""
        if self._rng.random() < 0.4:
            return self.careful_checker(entry)
        answer = math_tasks.solved(entry).answer
        return self._shown(self._asked(entry, self._proposed(answer), 0), verdict(self._rng.random() < 0.7))

    def _proposed(self, answer: str) -> str:
        return math_tasks.garbled(answer, self._rng, 0.7) if self._rng.random() < 0.5 else answer

    def _asked(self, entry: Example, answer: str, attempt: int) -> list[Mapping[str, Any]]:
        question = told(self._agents.to_check(entry, answer, attempt))
        return question if attempt else [{"role": "system", "content": CHECKER}, *question]

    def _calculated(self, entry: Example) -> list[list[Mapping[str, Any]]]:
        ((expression, result),) = math_tasks.solved(entry).calls
        call = tool_call(CALCULATOR.name, expression=expression)
        return [said(call), [{"role": "tool", "content": result}]]

    def _shown(self, *parts: Sequence[Mapping[str, Any]]) -> Demonstration:
        return Demonstration(messages=[message for part in parts for message in part], tools=[CALCULATOR])


def said(text: str) -> list[Mapping[str, Any]]:
    return [{"role": "assistant", "content": text}]


def told(text: object) -> list[Mapping[str, Any]]:
    return [{"role": "user", "content": text}]


def verdict(is_accepted: bool) -> list[Mapping[str, Any]]:
    return said("ACCEPT" if is_accepted else "REJECT")


def prepare(config: MultiAgentConfig) -> Setup:
    training, held_out = questions(config)
    model = config.model
    if config.is_tiny:
        teacher = Teacher(pair(config, tiny_tokenizer()), math_tasks.held_out(config.num_held_out), config.seed)
        model = str(warm_start(config.run_dir / "model", teacher.lessons, seed=config.seed))
    agents = pair(config, load_tokenizer(model))
    return Setup(model=model, workflow=agents, dataset=training, eval_dataset=held_out)


experiment = Experiment(config=MultiAgentConfig, prepare=prepare)

if __name__ == "__main__":
    experiment.main()

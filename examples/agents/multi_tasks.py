"""What the solver and the checker are told, questions of one calculation, and demonstrations of both roles."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import math_tasks
from calculator import calculator

from arl import Example, Tool, finetuning

SOLVER = "Solve the problem. You may use the calculator. End with the answer, a number."
CHECKER = "Check the answer. You may use the calculator. End with one word: ACCEPT if it is right, REJECT if not."

NUM_CAREFUL, NUM_MIXED = 6000, 1500
"""Demonstrations of each role: careful ones, which teach a model to copy; then mixed ones, with bad habits."""

SHARE_HASTY = (0.15, 0.85)
"""The share of guesses in the first and the second lesson, for both roles. Some solvers guess from the start, since
rejected guesses teach the model to try again."""


def to_check(question: str, answer: str, attempt: int) -> str:
    """What the checker is asked. attempt: the number of answers that it has seen before."""
    if attempt:
        return f"The next answer:\n{answer}\n\nACCEPT or REJECT?"
    return f"Question:\n{question}\n\nAnswer:\n{answer}\n\nACCEPT or REJECT?"


def objection(verdict: str) -> str:
    """What the solver is told after a rejection."""
    return f"A checker rejected your answer:\n{verdict}\n\nTry again."


def short(entries: Sequence[Example]) -> list[Example]:
    """The questions that take one calculation: all but equations."""
    return [entry for entry in entries if entry["metadata"]["source_dataset"] != "simple_equations"]


class Teacher:
    """Demonstrates both roles, with the agent's messages between them."""

    def __init__(self, tool: Tool, excluded: Sequence[Example], seed: int) -> None:
        self._tool = tool
        self._excluded = excluded
        self._rng = random.Random(seed)
        self._seed = math_tasks.DEMONSTRATION_SEED + seed * 100_000_000

    def lessons(self) -> list[list[Example]]:
        """Mostly careful demonstrations of both roles, then mostly hasty ones."""
        entries = short(math_tasks.training(2 * (NUM_CAREFUL + NUM_MIXED), self._excluded, self._seed))
        careful, mixed = entries[:NUM_CAREFUL], entries[NUM_CAREFUL : NUM_CAREFUL + NUM_MIXED]
        return [self._lesson(careful, SHARE_HASTY[0]), self._lesson(mixed, SHARE_HASTY[1])]

    def _lesson(self, entries: Sequence[Example], hasty: float) -> list[Example]:
        habits = (self.careful_solver, self.hasty_solver), (self.careful_checker, self.hasty_checker)
        return [role[self._rng.random() < hasty](entry) for entry in entries for role in habits]

    def careful_solver(self, entry: Example) -> Example:
        (expression,) = math_tasks.expressions(entry)
        return self._shown(asked(entry), *self._calculated(expression), said(solved(entry)))

    def hasty_solver(self, entry: Example) -> Example:
        """Answers at once, and calculates after a rejection."""
        guess = math_tasks.garbled(solved(entry), self._rng, 0.7)
        guessed = (asked(entry), said(guess))
        if guess == solved(entry):
            return self._shown(*guessed)
        rejected = told(objection("REJECT"))
        (expression,) = math_tasks.expressions(entry)
        return self._shown(*guessed, rejected, *self._calculated(expression), said(solved(entry)))

    def careful_checker(self, entry: Example) -> Example:
        """Subtracts the answer from the right one; a difference of 0 means that it is right."""
        first, second = self._proposed(entry), self._proposed(entry)
        checked = (self._asked(entry, first, 0), *self._checked(entry, first))
        if first == solved(entry):
            return self._shown(*checked)
        return self._shown(*checked, self._asked(entry, second, 1), *self._checked(entry, second))

    def hasty_checker(self, entry: Example) -> Example:
        """Accepts or rejects at random."""
        return self._shown(self._asked(entry, self._proposed(entry), 0), verdict(self._rng.random() < 0.5))

    def _proposed(self, entry: Example) -> str:
        answer = solved(entry)
        return str(int(math_tasks.garbled(answer, self._rng, 0.7))) if self._rng.random() < 0.5 else answer

    def _asked(self, entry: Example, answer: str, attempt: int) -> list[Mapping[str, Any]]:
        question = told(to_check(entry["question"], answer, attempt))
        return question if attempt else [{"role": "system", "content": CHECKER}, *question]

    def _checked(self, entry: Example, answer: str) -> list[Sequence[Mapping[str, Any]]]:
        (expression,) = math_tasks.expressions(entry)
        return [*self._calculated(f"{expression} - {answer}"), verdict(answer == solved(entry))]

    def _calculated(self, expression: str) -> list[Sequence[Mapping[str, Any]]]:
        call = finetuning.tool_call(self._tool.name, expression=expression)
        return [said(call), [{"role": "tool", "content": calculator(expression)}]]

    def _shown(self, *parts: Sequence[Mapping[str, Any]]) -> Example:
        return {"messages": [message for part in parts for message in part], "tools": [self._tool.spec]}


def solved(entry: Example) -> str:
    return math_tasks.solved(entry).answer


def asked(entry: Example) -> list[Mapping[str, Any]]:
    return [{"role": "system", "content": SOLVER}, *told(entry["question"])]


def said(text: str) -> list[Mapping[str, Any]]:
    return [{"role": "assistant", "content": text}]


def told(text: object) -> list[Mapping[str, Any]]:
    return [{"role": "user", "content": text}]


def verdict(is_accepted: bool) -> list[Mapping[str, Any]]:
    return said("ACCEPT" if is_accepted else "REJECT")

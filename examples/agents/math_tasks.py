"""The math agent's tasks: questions and scores from reasoning-gym, and demonstrations of good and bad habits."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import reasoning_gym
from calculator import calculator

from arl import Example, Tool, ToolError, finetuning
from arl.rewards import last_number

GENERATORS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    "basic_arithmetic": {"max_terms": 2, "max_digits": 2, "operators": ("+", "-", "*"), "allow_parentheses": False},
    "products": {"min_digits": 1, "max_digits": 2},
    "simple_equations": {"min_terms": 2, "max_terms": 2, "max_value": 20},
    "gcd": {"max_value": 100},
    "lcm": {"max_value": 60},
}
"""reasoning-gym's generators and their parameters."""

TURNS = ("simple_equations", "chain_sum", "gcd", "basic_arithmetic", "simple_equations", "products", "lcm")
"""The order of generators, repeated. Equations need two calls, and come twice as often as the others."""

HELD_OUT_SEED, TRAIN_SEED, DEMONSTRATION_SEED = 1_000_000_000, 2_000_000_000, 3_000_000_000
"""reasoning-gym draws item i of seed s from seed s + i, so the seeds lie far apart."""

NUM_CAREFUL, NUM_MIXED = 10000, 2000
"""First only careful demonstrations, which teach a model to copy; then mixed ones, which teach it bad habits."""

NUM_SUMS = 4000, 400
"""Sums without the calculator, which the README's first agent trains on: added carefully, and by guess."""

MIX = (0.5, 0.1, 0.4)
"""Shares of guesses, slips and careful work in mixed demonstrations."""

Entry = dict[str, Any]
Prompt = Callable[[str], list[dict[str, str]]]


def held_out(size: int) -> list[Entry]:
    """The questions for evaluation: always the same."""
    return _questions(HELD_OUT_SEED, size, frozenset())


def training(size: int, held_out: Sequence[Example], seed: int = TRAIN_SEED) -> list[Entry]:
    """`size` different questions, none of which is held out."""
    return _questions(seed, size, frozenset(entry["question"] for entry in held_out))


def score(answer: str, data: Example) -> float:
    """The score, 0 to 1, that the question's generator gives the answer's last number; 0 if it has no number."""
    number = last_number(answer)
    if number is None:
        return 0.0
    return float(_generator(data["metadata"]["source_dataset"]).score_answer(f"{number:f}", data))


def _questions(seed: int, size: int, excluded: frozenset[str]) -> list[Entry]:
    """Different questions, from all generators in turn."""
    seen, found = set(excluded), list[Entry]()
    streams = [_stream(name, seed + k * 10_000_000) for k, name in enumerate(TURNS)]
    while len(found) < size:
        entry = next(streams[len(found) % len(streams)])
        if entry["question"] not in seen:
            seen.add(entry["question"])
            found.append(entry)
    return found


def _stream(name: str, seed: int) -> Iterator[Entry]:
    yield from reasoning_gym.create_dataset(name, seed=seed, size=10_000_000, **GENERATORS[name])


@cache
def _generator(name: str) -> Any:
    return reasoning_gym.create_dataset(name, seed=0, size=1, **GENERATORS[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An agent's work: the question, each expression that it calculated with its result, and its answer."""

    question: str
    calls: tuple[tuple[str, str], ...]
    answer: str

    def demonstration(self, prompt: Prompt, tool: Tool) -> Example:
        messages = prompt(self.question)
        for expression, result in self.calls:
            messages.append({"role": "assistant", "content": finetuning.tool_call(tool.name, expression=expression)})
            messages.append({"role": "tool", "content": result})
        return {"messages": [*messages, {"role": "assistant", "content": self.answer}], "tools": [tool.spec]}


def lessons(prompt: Prompt, tool: Tool, excluded: Sequence[Example], seed: int) -> list[list[Example]]:
    """For the warm start: careful demonstrations, then mixed ones; none is about an `excluded` question."""
    shown = [s.demonstration(prompt, tool) for s in solutions(NUM_CAREFUL, NUM_MIXED, excluded, seed)]
    rng, (careful, guessed) = random.Random(seed), NUM_SUMS
    return [shown[:NUM_CAREFUL] + sums(careful, rng, 0.0), shown[NUM_CAREFUL:] + sums(guessed, rng, 0.5)]


def sums(number: int, rng: random.Random, garbled_share: float) -> list[Example]:
    """Sums of two digits, without a system message and tools. garbled_share: of the digits of answers."""
    pairs = [(rng.randrange(10), rng.randrange(10)) for _ in range(number)]
    return [
        {
            "messages": [
                {"role": "user", "content": f"{a} + {b} = ?"},
                {"role": "assistant", "content": garbled(str(a + b), rng, garbled_share)},
            ]
        }
        for a, b in pairs
    ]


def solutions(num_careful: int, num_mixed: int, excluded: Sequence[Example], seed: int = 0) -> list[Solution]:
    """First `num_careful` solutions of a careful teacher, then `num_mixed` of one who often guesses and sometimes
    errs."""
    rng = random.Random(seed)
    entries = training(num_careful + num_mixed, excluded, DEMONSTRATION_SEED + seed * 100_000_000)
    habits = (_guess, _careless, lambda entry, _: solved(entry))
    mixed = [rng.choices(habits, weights=MIX)[0](entry, rng) for entry in entries[num_careful:]]
    return [solved(entry) for entry in entries[:num_careful]] + mixed


def _guess(entry: Entry, rng: random.Random) -> Solution:
    return Solution(question=entry["question"], calls=(), answer=garbled(entry["answer"], rng, 0.7))


def solved(entry: Example) -> Solution:
    """The solution of a careful teacher."""
    calls: list[tuple[str, str]] = []
    for step in expressions(entry):
        expression = step.format(*(result for _, result in calls))
        calls.append((expression, calculator(expression)))
    return Solution(question=entry["question"], calls=tuple(calls), answer=calls[-1][1])


def _careless(entry: Entry, rng: random.Random) -> Solution:
    """A solution with one mistake: leaves out a digit of an expression, stops halfway, or misreads the result."""
    done = solved(entry)
    slip = rng.choice(("expression", "halfway", "result"))
    if slip == "expression":
        expression = _without_a_digit(done.calls[0][0], rng)
        calls = ((expression, _calculated(expression)),)
        return Solution(question=done.question, calls=calls, answer=calls[0][1])
    if slip == "halfway" and len(done.calls) > 1:
        return Solution(question=done.question, calls=done.calls[:1], answer=done.calls[0][1])
    return Solution(question=done.question, calls=done.calls, answer=_without_a_digit(done.answer, rng))


def _without_a_digit(text: str, rng: random.Random) -> str:
    """The text with one digit less, or with another digit if the number has only one."""
    at = rng.choice([match.start() for match in re.finditer(r"\d", text)])
    single = not text[max(at - 1, 0) : at].isdigit() and not text[at + 1 : at + 2].isdigit()
    return text[:at] + (str(rng.randint(0, 9)) if single else "") + text[at + 1 :]


def _calculated(expression: str) -> str:
    try:
        return calculator(expression)
    except ToolError:
        return "0"


def garbled(text: str, rng: random.Random, share: float) -> str:
    """The text with that share of its digits replaced at random."""
    return re.sub(r"\d", lambda digit: str(rng.randint(0, 9)) if rng.random() < share else digit[0], text)


def expressions(entry: Example) -> list[str]:
    """The expressions to calculate, one for each call. {0} stands for the first call's result."""
    metadata = entry["metadata"]
    match metadata["source_dataset"]:
        case "simple_equations":
            return _equation_steps(metadata["equation"])
        case "gcd" | "lcm" as function:
            return [f"{function}({', '.join(str(number) for number in metadata['numbers'])})"]
    return [metadata["expression"]]


def _equation_steps(equation: str) -> list[str]:
    """Undo the added term, then the factor: `a*x + b = c` is c - b, then / a."""
    left, right = equation.split(" = ")
    if match := re.fullmatch(r"(?:(\d+)\*)?[a-z](?: ([+-]) (\d+))?", left):
        factor, sign, term = match.groups()
        steps = [f"{right} {'-' if sign == '+' else '+'} {term}"] if sign else []
    elif match := re.fullmatch(r"(\d+) ([+-]) (?:(\d+)\*)?[a-z]", left):
        term, sign, factor = match.groups()
        steps = [f"{term} - {right}" if sign == "-" else f"{right} - {term}"]
    else:
        raise ValueError(f"cannot solve {equation!r}")
    if factor:
        steps.append(("{0}" if steps else right) + f" / {factor}")
    return steps or [right]

"""The code agent's tasks: a little language of functions on numbers and lists, its tests, and demonstrations.

A task is a chain of steps, some of whose words have two meanings:

    Write g(n): n times 3, then changed by 7.       def g(n):
    assert g(5) == 8                                    n = n * 3
                                                        n = n - 7
                                                        return n

Only the tests tell the meaning. An agent that guesses wrong must see that a test fails, and write the other function.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from string import Formatter
from typing import Any

from arl import Example

Row = dict[str, Any]
Prompt = Callable[[Example], list[dict[str, str]]]
Objection = Callable[[str, str], str]


@dataclass(frozen=True, slots=True)
class Step:
    """words: its description. meanings: the Python that it may mean. {v} is the value so far, {c} a constant."""

    words: str
    meanings: tuple[str, ...]


NUMBER_STEPS = (
    Step("plus {c}", ("{v} + {c}",)),
    Step("minus {c}", ("{v} - {c}",)),
    Step("times {c}", ("{v} * {c}",)),
    Step("divided by {c}, rounded down", ("{v} // {c}",)),
    Step("modulo {c}", ("{v} % {c}",)),
    Step("squared", ("{v} ** 2",)),
    Step("changed by {c}", ("{v} + {c}", "{v} - {c}")),
    Step("scaled by {c}", ("{v} * {c}", "{v} // {c}")),
    Step("limited by {c}", ("max({v}, {c})", "min({v}, {c})")),
)
FILTERS = (
    Step("the even ones", ("[x for x in {v} if x % 2 == 0]",)),
    Step("the odd ones", ("[x for x in {v} if x % 2 == 1]",)),
    Step("those above {c}", ("[x for x in {v} if x > {c}]",)),
    Step("those below {c}", ("[x for x in {v} if x < {c}]",)),
    Step("those beyond {c}", ("[x for x in {v} if x > {c}]", "[x for x in {v} if x < {c}]")),
)
MAPPINGS = (
    Step("each plus {c}", ("[x + {c} for x in {v}]",)),
    Step("each times {c}", ("[x * {c} for x in {v}]",)),
    Step("each changed by {c}", ("[x + {c} for x in {v}]", "[x - {c} for x in {v}]")),
)
ENDINGS = (
    Step("the largest", ("max({v})",)),
    Step("the smallest", ("min({v})",)),
    Step("the sum", ("sum({v})",)),
    Step("the number of them", ("len({v})",)),
    Step("reversed", ("{v}[::-1]",)),
    Step("the extreme", ("max({v})", "min({v})")),
    Step("the one at an end", ("{v}[0]", "{v}[-1]")),
    Step("in order", ("sorted({v})", "sorted({v}, reverse=True)")),
)
KINDS = {"n": (NUMBER_STEPS, NUMBER_STEPS), "xs": (FILTERS, MAPPINGS, ENDINGS)}
"""The argument's kind -> the choices for the first step, for the next step, and so on."""
ARGUMENTS = {"n": ("n", "k", "a", "b"), "xs": ("xs", "ys")}
FUNCTIONS = ("f", "g", "h", "p", "q", "r")
CONSTANTS = range(2, 13)
INPUTS = range(1, 20)
LIST_LENGTH = 4
LARGEST = 999
"""The largest number in a test's expected result."""

NUM_TESTS, NUM_SHOWN = 4, 1
"""The agent sees the first test. No other meaning of the task passes it."""
FENCE, FENCE_END = "```python\n", "\n```"

HELD_OUT_SEED, TRAIN_SEED, DEMONSTRATION_SEED = 1, 2, 3
NUM_CAREFUL, NUM_MIXED = 9000, 4000
"""First mostly careful demonstrations, which teach a model to write; then mixed ones, which teach it bad habits."""
MIX = {"careful": 0.1, "stubborn": 0.45, "sloppy": 0.2, "quitter": 0.25}
"""Shares of the habits in mixed demonstrations: mend the failing program, write the same again, write anything else,
give up. All but the careful mostly err at first."""
SLIPS = (0.1, 0.95)
"""How often the careful and the others slip in their first program."""
MISREADS = 0.8
"""How often the careful misread an ambiguous task at first, so that they can show how to mend it."""
GIVEN_UP = "I give up."
MAX_TURNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A step of a task. meaning: the index of the meaning that applies."""

    step: Step
    constant: int
    meaning: int = 0

    @property
    def words(self) -> str:
        return self.step.words.format(c=self.constant)

    def python(self, variable: str) -> str:
        return self.step.meanings[self.meaning].format(v=variable, c=self.constant)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A function to write. kind: of its argument, n or xs. inputs: the arguments of its tests."""

    kind: str
    function: str
    argument: str
    lines: tuple[Line, ...]
    inputs: tuple[Any, ...] = ()

    @property
    def text(self) -> str:
        return f"Write {self.function}({self.argument}): {', then '.join(line.words for line in self.lines)}."

    @property
    def code(self) -> str:
        body = "".join(f"    {self.argument} = {line.python(self.argument)}\n" for line in self.lines)
        return f"def {self.function}({self.argument}):\n{body}    return {self.argument}"

    @property
    def tests(self) -> list[str]:
        outputs = self.results(self.code, self.inputs)
        calls = zip(self.inputs, outputs, strict=True)
        return [f"assert {self.function}({given!r}) == {output!r}" for given, output in calls]

    @property
    def row(self) -> Row:
        """In MBPP's form."""
        return {"text": self.text, "code": self.code, "test_list": self.tests, "num_shown": NUM_SHOWN}

    def readings(self) -> list[Task]:
        """All meanings that its words allow."""
        alike = [[replace(line, meaning=i) for i in range(len(line.step.meanings))] for line in self.lines]
        return [replace(self, lines=lines) for lines in product(*alike)]

    def results(self, code: str, inputs: Sequence[Any]) -> list[Any]:
        """The result of `code` for each input, or its exception. Only for code made of the steps above: a model's code
        runs in the sandbox."""
        return [_result(_defined(code)[self.function], given) for given in inputs]

    def failure(self, code: str) -> str | None:
        """Why `code` fails the shown test, in the words of arl.rewards.unit_tests."""
        if code == GIVEN_UP:
            return "SyntaxError: invalid syntax (<answer>, line 1)"
        expected, found = (self.results(tried, self.inputs[:NUM_SHOWN])[0] for tried in (self.code, code))
        if isinstance(found, Exception):
            return f"{type(found).__name__}: {found}"
        return None if found == expected else f"AssertionError, where the last call gave {found!r}"

    def slip(self, rng: random.Random) -> str:
        """Code that is wrong in one step: it has a different step or a different constant."""
        lines = list(self.lines)
        at = rng.randrange(len(lines))
        line = lines[at]
        if "{c}" in line.step.words and rng.random() < 0.5:
            lines[at] = replace(line, constant=line.constant + rng.choice((-1, 1)))
        else:
            others = [step for step in KINDS[self.kind][at] if step != line.step]
            lines[at] = _line(rng.choice(others), line.constant, rng)
        return replace(self, lines=tuple(lines)).code


def _line(step: Step, constant: int, rng: random.Random) -> Line:
    return Line(step=step, constant=constant, meaning=rng.randrange(len(step.meanings)))


@lru_cache(maxsize=1000)
def _defined(code: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return namespace


def _result(function: Callable[[Any], Any], given: Any) -> Any:
    try:
        return function(given)
    except (ValueError, IndexError) as error:
        return error


def tasks(seed: int) -> Iterator[Task]:
    """An endless stream of different tasks, of both kinds in turn. Half of them are ambiguous in one step."""
    rng = random.Random(seed)
    known: set[str] = set()
    while True:
        kind = ("n", "xs")[len(known) % 2]
        num_readings = 1 + (len(known) % 4 < 2)
        task = _drawn(kind, rng)
        if prod(len(line.step.meanings) for line in task.lines) != num_readings or task.text in known:
            continue
        if tested := _with_inputs(task, rng):
            known.add(task.text)
            yield tested


def _drawn(kind: str, rng: random.Random) -> Task:
    lines = tuple(_line(rng.choice(steps), rng.choice(CONSTANTS), rng) for steps in KINDS[kind])
    return Task(kind=kind, function=rng.choice(FUNCTIONS), argument=rng.choice(ARGUMENTS[kind]), lines=lines)


def _with_inputs(task: Task, rng: random.Random, tries: int = 10) -> Task | None:
    """The task with inputs that give moderate results. The first input tells the task's meaning from the other one."""
    for _ in range(tries):
        if task.kind == "n":
            inputs = tuple(rng.sample(INPUTS, NUM_TESTS))
        else:
            inputs = tuple(rng.sample(INPUTS, LIST_LENGTH) for _ in range(NUM_TESTS))
        outputs = task.results(task.code, inputs)
        others = [task.results(reading.code, inputs[:1])[0] for reading in task.readings() if reading != task]
        if all(map(_is_moderate, outputs)) and outputs[0] not in others:
            return replace(task, inputs=inputs)
    return None


def _is_moderate(output: Any) -> bool:
    match output:
        case int():
            return abs(output) <= LARGEST
        case list():
            return len(output) > 0 and all(map(_is_moderate, output))
    return False


def held_out(size: int) -> list[Row]:
    """The tasks for evaluation: always the same."""
    return _rows(HELD_OUT_SEED, size, ())


def training(size: int, held_out: Sequence[Example]) -> list[Row]:
    """`size` different tasks, none of which is held out."""
    return _rows(TRAIN_SEED, size, held_out)


def _rows(seed: int, size: int, excluded: Sequence[Example]) -> list[Row]:
    return [task.row for task in _some(seed, size, excluded)]


def _some(seed: int, size: int, excluded: Sequence[Example]) -> list[Task]:
    texts = {row["text"] for row in excluded}
    stream = (task for task in tasks(seed) if task.text not in texts)
    return [next(stream) for _ in range(size)]


def lessons(prompt: Prompt, objection: Objection, excluded: Sequence[Example], seed: int) -> list[list[Example]]:
    """For the warm start: careful demonstrations, then mixed ones; none is about an excluded task.

    prompt: makes the agent's prompt for a task. objection: makes the message about a failing test.
    """
    rng = random.Random(seed)
    shown = _some(DEMONSTRATION_SEED + 1000 * seed, NUM_CAREFUL + NUM_MIXED, excluded)
    habits = ["careful"] * NUM_CAREFUL + rng.choices(list(MIX), weights=list(MIX.values()), k=NUM_MIXED)
    made: list[Example] = []
    for task, habit in zip(shown, habits, strict=True):
        messages = prompt(task.row)
        for code in attempts(task, habit, rng):
            messages.append({"role": "assistant", "content": code if code == GIVEN_UP else fenced(code)})
            if failure := task.failure(code):
                messages.append({"role": "user", "content": objection(task.tests[0], failure)})
        made.append({"messages": messages if messages[-1]["role"] == "assistant" else messages[:-1]})
    return [made[:NUM_CAREFUL], made[NUM_CAREFUL:]]


def attempts(task: Task, habit: str, rng: random.Random) -> list[str]:
    """The programs written for a task, in order, until the shown test passes or the attempts run out."""
    readings = [reading.code for reading in task.readings()]
    misread = [code for code in readings if code != task.code]
    if rng.random() < SLIPS[habit != "careful"]:
        written = [task.slip(rng)]
    else:
        written = [rng.choice(misread) if misread and rng.random() < MISREADS else task.code]
    while task.failure(written[-1]) is not None and len(written) < MAX_TURNS:
        match habit:
            case "careful":
                written.append(rng.choice([code for code in readings if code not in written]))
            case "stubborn":
                written.append(written[-1])
            case "sloppy":
                written.append(task.slip(rng))
            case _:
                written.append(GIVEN_UP)
    return written


def fenced(code: str) -> str:
    return f"{FENCE}{code}{FENCE_END}"


def phrases() -> list[str]:
    """The tokens of the tiny model's tokenizer: the text around names and constants."""
    steps = [step for of_kind in KINDS.values() for group in of_kind for step in group]
    templates = [template for step in steps for template in (step.words, *step.meanings)]
    around = [literal for template in templates for literal, *_ in Formatter().parse(template) if len(literal) > 1]
    code = (f"{FENCE}def ", "):\n    ", "\n    return ", "\n    ", " = ", FENCE_END)
    return [*dict.fromkeys((*around, *code, "Write ", "): ", ", then ", "assert ", ") == ", ", "))]

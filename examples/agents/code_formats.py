"""Reads programming tasks of several forms: the question, the tests that the agent sees, and the tests that count.

| the row has | shown | counts |
|---|---|---|
| `text` or `prompt`, and `test_list`, as in MBPP | the first of test_list | test_list, challenge_test_list |
| `prompt`, `test`, `entry_point`, as in HumanEval | the examples in the prompt's docstring | test |
"""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from arl import DatasetError, Example
from arl.rewards import CallTests, reasoning_gym_examples, unit_tests_of

GYM_SEEDS = {"held_out": 1, "training": 2}
_PAIR = re.compile(r"^Input \d+: (\[.*\])\nOutput \d+: (\[.*\])$", re.MULTILINE)
_LAST_INPUT = re.compile(r"^Input: (\[.*\])$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """question: the whole task. tests: the first num_shown are shown; all but the first num_unmarked count."""

    question: str
    tests: CallTests
    num_shown: int
    num_unmarked: int = 0

    @property
    def shown(self) -> Sequence[str]:
        return self.tests.tests[: self.num_shown]


def assignment(row: Example, num_shown: int) -> Assignment:
    """The assignment of a row. num_shown: tests of test_list to show, if the row does not say. Raises DatasetError for
    rows of other forms."""
    tests, question = unit_tests_of(row), row.get("text") or row.get("prompt")
    if not isinstance(tests, CallTests) or not isinstance(question, str):
        raise DatasetError(
            f"a row has the columns {sorted(row)}; a task has text (or prompt) and test_list, as in MBPP, or prompt, "
            "test and entry_point, as in HumanEval"
        )
    return _of_list(row, question, tests, num_shown) if tests.entry_point is None else _of_prompt(question, tests)


def _of_list(row: Example, text: str, tests: CallTests, num_shown: int) -> Assignment:
    all_tests = (*tests.tests, *(row.get("challenge_test_list") or ()))
    shown = all_tests[: row.get("num_shown", num_shown)]
    question = "\n".join((text, "Tests, among others:", *shown)) if shown else text
    return Assignment(question=question, tests=replace(tests, tests=all_tests), num_shown=len(shown))


def _of_prompt(prompt: str, tests: CallTests) -> Assignment:
    """The examples do not count: one of HumanEval's is wrong."""
    shown = (f"assert callable({tests.entry_point})", *_examples(prompt))
    return Assignment(
        question=f"Complete the function.\n```python\n{prompt.rstrip()}\n```",
        tests=replace(tests, tests=(*shown, *tests.tests)),
        num_shown=len(shown),
        num_unmarked=len(shown),
    )


def _examples(prompt: str) -> Iterator[str]:
    """The doctests of a prompt as assertions, if their expected results are values."""
    for node in ast.walk(ast.parse(prompt)):
        if not isinstance(node, ast.FunctionDef) or not (text := ast.get_docstring(node)):
            continue
        with suppress(ValueError):  # it only looks like a doctest
            for example in doctest.DocTestParser().get_examples(text):
                with suppress(ValueError, SyntaxError):
                    call, value = ast.parse(example.source.strip(), mode="eval"), ast.literal_eval(example.want.strip())
                    yield f"assert {ast.unparse(call)} == {value!r}"


def gym_rows(region: str, size: int, excluded: Sequence[Example] = ()) -> list[dict[str, Any]]:
    """reasoning-gym's list_functions in MBPP's form: find a rule from its examples, and write it down.

    reasoning-gym's question and answer become the test that is not shown.
    """
    asked = [row["metadata"] for row in excluded]
    entries = reasoning_gym_examples("list_functions", size, seed=GYM_SEEDS[region], excluding=asked)
    return [_gym_row(entry) for entry in entries]


def _gym_row(entry: Example) -> dict[str, Any]:
    question = entry["question"]
    pairs = _PAIR.findall(question)
    (last,) = _LAST_INPUT.findall(question)
    return {
        "text": "One rule makes all of these lists. Find it, and write it as a function f of the first list.",
        "test_list": [f"assert f({given}) == {output}" for given, output in (*pairs, (last, entry["answer"]))],
        "num_shown": len(pairs),
        "metadata": {"question": question},
    }

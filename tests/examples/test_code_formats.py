"""Programming tasks in the forms of MBPP, HumanEval and reasoning-gym: what is shown of them, and what counts."""

from __future__ import annotations

from typing import Any

import pytest
from code_formats import assignment, gym_rows

from arl.api.errors import DatasetError

MBPP: dict[str, Any] = {
    "task_id": 11,
    "text": "Write a python function to remove first and last occurrence of a given character.",
    "code": "def remove_Occ(s, ch): ...",
    "test_setup_code": "import math",
    "test_list": ["assert remove_Occ('hello', 'l') == 'heo'", "assert remove_Occ('abcda', 'a') == 'bcd'"],
    "challenge_test_list": ["assert remove_Occ('hellolloll', 'l') == 'helollol'"],
}
HUMAN_EVAL: dict[str, Any] = {
    "task_id": "HumanEval/2",
    "prompt": '''def truncate_number(number: float) -> float:
    """ Decimals of a number.

    >>> truncate_number(3.5)  # a half
    0.5
    >>> truncate_number(2)
    0
    >>> print(truncate_number(1))
    nothing much
    >>> x = 3
    """
''',
    "canonical_solution": "    return number % 1.0\n",
    "test": "def check(candidate):\n    assert candidate(3.5) == 0.5\n    assert candidate(1.25) == 0.25\n",
    "entry_point": "truncate_number",
}


def test_of_mbpp_the_first_tests_are_shown_and_all_count() -> None:
    task = assignment(MBPP, 1)
    assert task.question == f"{MBPP['text']}\nTests, among others:\n{MBPP['test_list'][0]}"
    assert task.tests.tests == (*MBPP["test_list"], *MBPP["challenge_test_list"])
    assert (task.num_shown, task.num_unmarked, task.tests.setup) == (1, 0, "import math")
    assert assignment(MBPP, 9).num_shown == 3
    assert assignment(MBPP, 0).question == MBPP["text"]


def test_the_sanitized_mbpp_has_a_prompt_and_imports() -> None:
    row = {"prompt": "Write f.", "test_imports": ["import re"], "test_list": ["assert f()"]}
    task = assignment(row, 1)
    assert task.question.startswith("Write f.\n")
    assert task.tests.setup == "import re"


def test_of_human_eval_the_docstrings_examples_are_shown_and_do_not_count() -> None:
    task = assignment(HUMAN_EVAL, 0)
    assert task.question == f"Complete the function.\n```python\n{HUMAN_EVAL['prompt'].rstrip()}\n```"
    assert list(task.shown) == [
        "assert callable(truncate_number)",
        "assert truncate_number(3.5) == 0.5",
        "assert truncate_number(2) == 0",
    ]
    assert task.tests.tests[task.num_unmarked :] == (f"{HUMAN_EVAL['test']}\ncheck(candidate)",)


@pytest.mark.parametrize("docstring", ["No examples.", ">>>f(1)\n    1", ">>> f(1)\n    one"])
def test_a_prompt_without_examples_shows_that_there_must_be_a_function(docstring: str) -> None:
    prompt = f'def f(x):\n    """{docstring}"""\n'
    task = assignment({"prompt": prompt, "test": "def check(c): ...", "entry_point": "f"}, 1)
    assert list(task.shown) == ["assert callable(f)"]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "?", "answer": "!"},
        {"test_list": ["assert f()"]},
        {"text": "Write f.", "test_list": []},
        {"text": "Print 1.", "tests": [{"input": "", "output": "1"}]},
    ],
)
def test_a_row_of_another_form_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(DatasetError, match=r"as in MBPP|no unit tests"):
        assignment(row, 1)


def test_reasoning_gyms_rules_become_tests_of_which_the_question_is_hidden() -> None:
    held_out = gym_rows("held_out", 20)
    rows = gym_rows("training", 100, held_out)
    for row in rows:
        task = assignment(row, 1)
        *shown, hidden = task.tests.tests
        assert task.num_shown == len(shown) >= 3
        for test in (*shown, hidden):
            compile(test, "<test>", "exec")
        assert hidden not in task.question
    asked = {row["metadata"]["question"] for row in held_out}
    assert not asked & {row["metadata"]["question"] for row in rows}

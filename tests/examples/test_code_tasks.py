"""The code agent's tasks: its own language and demonstrations, and the forms of MBPP, HumanEval and reasoning-gym."""

from itertools import islice
from typing import Any

import code_tasks
import pytest
from code_agent import objection, prompt
from code_formats import assignment, gym_rows
from code_tasks import Line, Task, held_out, lessons, tasks, training

from arl.api.errors import DatasetError
from arl.api.types import Example

STEPS = {step.words: step for of_kind in code_tasks.KINDS.values() for group in of_kind for step in group}


def made(*words: str, kind: str = "n", inputs: tuple[Any, ...] = (5, 6, 7, 8), meaning: int = 0) -> Task:
    lines = tuple(Line(step=STEPS[word], constant=3, meaning=meaning) for word in words)
    return Task(kind=kind, function="f", argument=kind, lines=lines, inputs=inputs)


def test_a_task_is_its_words_its_code_and_its_tests() -> None:
    shown = made("times {c}", "squared")
    assert shown.text == "Write f(n): times 3, then squared."
    assert shown.code == "def f(n):\n    n = n * 3\n    n = n ** 2\n    return n"
    assert shown.tests[:2] == ["assert f(5) == 225", "assert f(6) == 324"]
    of_lists = made("those above {c}", "each times {c}", "in order", kind="xs", inputs=([4, 1, 7, 2],))
    assert of_lists.tests == ["assert f([4, 1, 7, 2]) == [12, 21]"]


def test_the_test_that_is_shown_tells_the_meaning_from_every_other() -> None:
    for drawn in islice(tasks(seed=7), 60):
        assert [reading for reading in drawn.readings() if drawn.failure(reading.code) is None] == [drawn]
        assert len(set(drawn.tests)) == code_tasks.NUM_TESTS
        exec("\n".join((drawn.code, *drawn.tests)), {})


def test_half_of_the_tasks_have_two_meanings_and_none_is_held_out_and_trained_on_or_comes_twice() -> None:
    drawn = list(islice(tasks(seed=0), 400))
    assert sum(len(each.readings()) == 2 for each in drawn) == sum(each.kind == "xs" for each in drawn) == 200
    kept = held_out(50)
    assert held_out(50) == kept
    texts = {row["text"] for row in training(500, kept)}
    assert len(texts) == 500
    assert not texts & {row["text"] for row in kept}


def messages(row: Example) -> list[dict[str, str]]:
    return prompt(assignment(row, 1))


def test_demonstrations_begin_as_episodes_do_end_with_the_agent_and_few_of_the_careful_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(code_tasks, "NUM_CAREFUL", 200)
    monkeypatch.setattr(code_tasks, "NUM_MIXED", 200)
    careful, mixed = lessons(messages, objection, held_out(50), seed=0)
    assert [len(careful), len(mixed)] == [200, 200]
    excluded = {messages(row)[1]["content"] for row in held_out(50)}
    for demonstration in (*careful, *mixed):
        roles = [message["role"] for message in demonstration["messages"]]
        assert (roles[:3], roles[-1]) == (["system", "user", "assistant"], "assistant")
        assert demonstration["messages"][1]["content"] not in excluded
    full = 2 + 2 * code_tasks.MAX_TURNS - 1
    assert sum(len(shown["messages"]) == full for shown in careful) / 200 < 0.15
    assert sum(len(shown["messages"]) == full for shown in mixed) / 200 > 0.3


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


def test_of_mbpp_the_first_tests_are_shown_and_all_count_and_the_sanitized_one_has_a_prompt_and_imports() -> None:
    task = assignment(MBPP, 1)
    assert task.question == f"{MBPP['text']}\nTests, among others:\n{MBPP['test_list'][0]}"
    assert task.tests.tests == (*MBPP["test_list"], *MBPP["challenge_test_list"])
    assert (task.num_shown, task.num_unmarked, task.tests.setup) == (1, 0, "import math")
    assert assignment(MBPP, 9).num_shown == 3
    assert assignment(MBPP, 0).question == MBPP["text"]
    task = assignment({"prompt": "Write f.", "test_imports": ["import re"], "test_list": ["assert f()"]}, 1)
    assert (task.question[:9], task.tests.setup) == ("Write f.\n", "import re")


def test_of_human_eval_the_docstrings_examples_are_shown_and_do_not_count() -> None:
    task = assignment(HUMAN_EVAL, 0)
    assert task.question == f"Complete the function.\n```python\n{HUMAN_EVAL['prompt'].rstrip()}\n```"
    assert list(task.shown) == [
        "assert callable(truncate_number)",
        "assert truncate_number(3.5) == 0.5",
        "assert truncate_number(2) == 0",
    ]
    assert task.tests.tests[task.num_unmarked :] == (f"{HUMAN_EVAL['test']}\ncheck(candidate)",)


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

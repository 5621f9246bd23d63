"""The math agent's tasks: always the same, none of them in two splits, and solvable with the calculator."""

from __future__ import annotations

import math_tasks
import pytest
from calculator import calculator
from warm_start import tool_call

from arl.workflow.tools import Tool

HELD_OUT = math_tasks.held_out(200)


def questions(entries: list[math_tasks.Entry]) -> list[str]:
    return [entry["question"] for entry in entries]


def test_questions_are_the_same_each_time_and_more_of_them_begin_with_fewer() -> None:
    assert questions(math_tasks.held_out(40)) == questions(HELD_OUT)[:40]
    assert questions(math_tasks.training(50, HELD_OUT)) == questions(math_tasks.training(60, HELD_OUT))[:50]


def test_no_question_is_asked_twice_or_in_two_splits() -> None:
    training = questions(math_tasks.training(4096, HELD_OUT))
    assert len(set(training)) == 4096
    assert len(set(questions(HELD_OUT))) == 200
    assert not set(training) & set(questions(HELD_OUT))


def test_no_held_out_question_is_demonstrated() -> None:
    shown = math_tasks.solutions(1000, 1000, HELD_OUT, seed=1)
    assert not {solution.question for solution in shown} & set(questions(HELD_OUT))


def test_the_expressions_of_every_question_lead_to_full_reward() -> None:
    for entry in HELD_OUT:
        results: list[str] = []
        for expression in math_tasks.expressions(entry):
            results.append(calculator(expression.format(*results)))
        assert math_tasks.score(results[-1], entry) == 1.0, entry["question"]


def test_a_wrong_answer_has_less_than_full_reward() -> None:
    for entry in HELD_OUT:
        assert math_tasks.score(str(int(entry["answer"]) + 1), entry) < 1.0
        assert math_tasks.score("", entry) == 0.0


def test_equations_take_two_calls_where_they_have_two_terms() -> None:
    equations = [entry for entry in HELD_OUT if entry["metadata"]["source_dataset"] == "simple_equations"]
    assert {len(math_tasks.expressions(entry)) for entry in equations} == {1, 2}


@pytest.mark.parametrize(
    ("equation", "steps"),
    [
        ("3*x + 4 = 19", ["19 - 4", "{0} / 3"]),
        ("3*x - 4 = 11", ["11 + 4", "{0} / 3"]),
        ("4 - 3*x = -11", ["4 - -11", "{0} / 3"]),
        ("12*x = 60", ["60 / 12"]),
        ("x + 4 = 9", ["9 - 4"]),
    ],
)
def test_an_equation_is_undone_term_first(equation: str, steps: list[str]) -> None:
    entry = {"metadata": {"source_dataset": "simple_equations", "equation": equation}}
    assert math_tasks.expressions(entry) == steps


def test_an_equation_of_another_form_is_an_error() -> None:
    entry = {"metadata": {"source_dataset": "simple_equations", "equation": "x*x = 4"}}
    with pytest.raises(ValueError, match="cannot solve"):
        math_tasks.expressions(entry)


def test_mixed_demonstrations_have_good_and_bad_habits_in_the_shares_named() -> None:
    mixed = math_tasks.solutions(0, 2000, HELD_OUT)
    guesses = sum(not solution.calls for solution in mixed) / len(mixed)
    assert guesses == pytest.approx(math_tasks.MIX[0], abs=0.05)


def test_careful_demonstrations_come_first_and_answer_what_was_calculated() -> None:
    for solution in math_tasks.solutions(200, 0, HELD_OUT):
        assert solution.answer == solution.calls[-1][1] == calculator(solution.calls[-1][0])


def test_lessons_show_the_question_each_call_with_its_result_and_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_tasks, "NUM_CAREFUL", 20)
    monkeypatch.setattr(math_tasks, "NUM_MIXED", 5)
    tool = Tool.from_function(calculator)
    careful, mixed = math_tasks.lessons(lambda question: [{"role": "user", "content": question}], tool, HELD_OUT, 0)
    assert [len(careful), len(mixed)] == [20, 5]
    for shown, solution in zip(careful, math_tasks.solutions(20, 0, HELD_OUT), strict=True):
        (expression, result), *_ = solution.calls
        assert shown.messages[0]["content"] == solution.question
        assert shown.messages[1]["content"] == tool_call("calculator", expression=expression)
        assert shown.messages[2] == {"role": "tool", "content": result}
        assert shown.messages[-1] == {"role": "assistant", "content": solution.answer}
        assert shown.tools == [tool]

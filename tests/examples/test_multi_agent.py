"""The solver and the checker: what each is told, paid and shown, without a model."""

import math_tasks
import multi_agent
import multi_tasks
import pytest
from multi_agent import MultiAgentConfig, pair, questions
from multi_tasks import Teacher
from played import TOKENIZER, played
from warm_start import Demonstration, tool_call

from arl.cli import load_config
from arl.workflow.call_formats import parse_tool_calls

ENTRY = next(e for e in math_tasks.held_out(50) if e["metadata"]["source_dataset"] == "products")
EXPRESSION = math_tasks.expressions(ENTRY)[0]
CALL = tool_call("calculator", expression=EXPRESSION)


async def test_both_calculate_and_are_paid_each_for_its_own() -> None:
    agents = pair(load_config(MultiAgentConfig, ["--max_new_tokens", "500"]), TOKENIZER)
    made = await played(agents, ENTRY, CALL, f"It is {ENTRY['answer']}.", CALL, "ACCEPT")
    assert {trajectory.role: trajectory.reward for trajectory, _ in made} == {"solver": 1.0, "checker": 1.0}
    assert all(f"<tool_response>\n{ENTRY['answer']}\n</tool_response>" in text for _, text in made)
    metrics = {name: value for trajectory, _ in made for name, value in trajectory.metrics.items()}
    assert metrics["solver_reward"] == metrics["right_verdicts"] == 1.0


@pytest.mark.parametrize("attempts", [1, 3])
async def test_attempts_end_where_the_settings_say(attempts: int) -> None:
    agents = pair(load_config(MultiAgentConfig, ["--max_attempts", str(attempts)]), TOKENIZER)
    made = await played(agents, ENTRY, *("-1", "REJECT") * attempts)
    assert {trajectory.role: trajectory.reward > 0.5 for trajectory, _ in made} == {"solver": False, "checker": True}


@pytest.fixture
def teacher(monkeypatch: pytest.MonkeyPatch) -> Teacher:
    monkeypatch.setattr(multi_tasks, "NUM_CAREFUL", 100)
    monkeypatch.setattr(multi_tasks, "NUM_MIXED", 100)
    return Teacher(pair(MultiAgentConfig(), TOKENIZER), multi_agent.CALCULATOR, math_tasks.held_out(192), seed=0)


def spoken(demonstration: Demonstration) -> list[str]:
    return [message["content"] for message in demonstration.messages if message["role"] == "assistant"]


def is_hasty(demonstration: Demonstration) -> bool:
    return not parse_tool_calls(spoken(demonstration)[0])


def test_careful_solvers_and_checkers_take_turns_and_are_right(teacher: Teacher) -> None:
    careful, mixed = teacher.lessons()
    assert [len(careful), len(mixed)] == [200, 200]
    for solver, checker in zip(careful[::2], careful[1::2], strict=True):
        if is_hasty(solver) or is_hasty(checker):
            continue
        answer = spoken(solver)[-1]
        proposed = checker.messages[1]["content"].split("Answer:\n")[1].split("\n")[0]
        call, verdict, *again = spoken(checker)
        assert len(parse_tool_calls(call)) == 1
        assert (checker.messages[3]["content"] == "0") == (proposed == answer)
        assert verdict == ("ACCEPT" if proposed == answer else "REJECT")
        assert bool(again) == (verdict == "REJECT")
        if again:
            proposed = checker.messages[5]["content"].split("The next answer:\n")[1].split("\n")[0]
            assert again[1] == ("ACCEPT" if proposed == answer else "REJECT")


def test_the_hasty_answer_and_judge_without_a_look_and_a_rejected_solver_calculates(teacher: Teacher) -> None:
    lesson = teacher.lessons()[1]
    for solver in filter(is_hasty, lesson[::2]):
        guess, *again = spoken(solver)
        if again:
            call, answer = again
            assert len(parse_tool_calls(call)) == 1
            assert guess != answer
            assert "rejected" in solver.messages[3]["content"]
    assert {tuple(spoken(checker)) for checker in filter(is_hasty, lesson[1::2])} == {("ACCEPT",), ("REJECT",)}


def test_lessons_have_bad_habits_in_the_shares_named(teacher: Teacher) -> None:
    for lesson, share in zip(teacher.lessons(), multi_tasks.SHARE_HASTY, strict=True):
        for of_role in (lesson[::2], lesson[1::2]):
            assert sum(map(is_hasty, of_role)) / len(of_role) == pytest.approx(share, abs=0.12)


def test_lessons_have_the_workflows_prompts_and_nothing_held_out(teacher: Teacher) -> None:
    lessons = teacher.lessons()
    openings = {demonstration.messages[0]["content"] for lesson in lessons for demonstration in lesson}
    assert openings == {multi_agent.SOLVER, multi_agent.CHECKER}
    asked = {demonstration.messages[1]["content"] for lesson in lessons for demonstration in lesson}
    assert not any(entry["question"] in asked for entry in math_tasks.held_out(192))


def test_equations_are_left_out_of_the_questions() -> None:
    training, held_out = questions(MultiAgentConfig(num_questions=100, num_held_out=50))
    sources = {entry["metadata"]["source_dataset"] for entry in (*training, *held_out)}
    assert sources == set(math_tasks.GENERATORS) - {"simple_equations"}

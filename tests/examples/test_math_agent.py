"""The math agent's episodes, scores and tasks. The calculator solves every task, and no task is in two splits."""

import math_tasks
import pytest
from calculator import calculator
from math_agent import MathAgent, MathAgentConfig, answer_score, questions
from played import TOKENIZER, played

from arl.api.types import SamplingParams
from arl.rewards import InlineReward
from arl.run.finetuning.warm_starts import tool_call
from arl.workflow.tools import Tool

HELD_OUT = math_tasks.held_out(200)
ENTRY = next(entry for entry in HELD_OUT if len(math_tasks.expressions(entry)) == 2)


def call(expression: str) -> str:
    return tool_call("calculator", expression=expression)


def agent(max_turns: int = 4) -> MathAgent:
    score, sampling = InlineReward(math_tasks.score), SamplingParams(max_new_tokens=500)
    return MathAgent(tokenizer=TOKENIZER, score=score, sampling=sampling, max_turns=max_turns)


async def test_an_episode_of_several_calls_sees_each_result_and_is_scored_on_its_answer() -> None:
    first, second = math_tasks.expressions(ENTRY)
    said = ("<tool_call>12 +</tool_call>", call(first), call(second.format(calculator(first))), ENTRY["answer"])
    ((trajectory, text),) = await played(agent(), ENTRY, *said)
    assert ENTRY["question"] in text
    assert "error: a tool call must be one JSON object" in text
    for result in (calculator(first), ENTRY["answer"]):
        assert f"<tool_response>\n{result}\n</tool_response>" in text
    assert (trajectory.reward, trajectory.metrics) == (1.0, {"tool_calls": 3, "turns": 4, "context_full": 0})
    trained = [token for token, mask in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if mask]
    assert TOKENIZER.decode(trained) == "".join(f"{answer}<|im_end|>" for answer in said)


@pytest.mark.parametrize(("said", "num_calls"), [(["-123456"], 0), ([call("1 + 1")] * 2, 2)])
async def test_a_wrong_answer_and_none_at_all_have_no_reward(said: list[str], num_calls: int) -> None:
    ((trajectory, _),) = await played(agent(max_turns=2), ENTRY, *said)
    assert trajectory.reward == 0.0
    assert trajectory.metrics == {"tool_calls": num_calls, "turns": len(said), "context_full": 0}


@pytest.mark.parametrize(
    ("dataset", "answer", "reference", "reward"),
    [
        ("reasoning-gym", "<think>7</think> so 42", "42", 1.0),
        ("reasoning-gym", "42, no, 7", "42", 0.0),
        ("reasoning-gym", "", "42", 0.0),
        ("openai/gsm8k", "1234.0", "40 + 2 = 42\n#### 1,234", 1.0),
        ("openai/gsm8k", "40", "40 + 2 = 42\n#### 42", 0.0),
    ],
)
async def test_the_last_number_of_an_answer_counts(dataset: str, answer: str, reference: str, reward: float) -> None:
    score = answer_score(MathAgentConfig(model="none", dataset=dataset))
    data = {"question": "?", "answer": reference, "metadata": {"source_dataset": "chain_sum"}}
    assert await score(answer, data) == reward


def asked(entries: object) -> list[str]:
    return [entry["question"] for entry in entries]  # pyright: ignore[reportGeneralTypeIssues]


def test_questions_are_the_same_each_time_and_none_is_asked_twice_or_although_held_out() -> None:
    training, held_out = map(asked, questions(MathAgentConfig(num_questions=4096, num_held_out=200)))
    assert [len(set(training)), len(set(held_out))] == [4096, 200]
    assert not set(training) & set(held_out)
    shown = math_tasks.solutions(1000, 1000, HELD_OUT, seed=1)
    assert not {solution.question for solution in shown} & set(held_out)
    assert asked(math_tasks.held_out(40)) == asked(HELD_OUT)[:40]
    assert asked(math_tasks.training(50, HELD_OUT)) == asked(math_tasks.training(60, HELD_OUT))[:50]


def test_the_expressions_of_every_question_lead_to_full_reward_and_another_answer_does_not() -> None:
    for entry in HELD_OUT:
        results: list[str] = []
        for expression in math_tasks.expressions(entry):
            results.append(calculator(expression.format(*results)))
        assert math_tasks.score(results[-1], entry) == 1.0, entry["question"]
        assert math_tasks.score(str(int(entry["answer"]) + 1), entry) < 1.0


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


def test_lessons_show_the_question_each_call_with_its_result_and_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_tasks, "NUM_CAREFUL", 20)
    monkeypatch.setattr(math_tasks, "NUM_MIXED", 5)
    monkeypatch.setattr(math_tasks, "NUM_SUMS", (4, 2))
    tool = Tool.from_function(calculator)
    careful, mixed = math_tasks.lessons(lambda question: [{"role": "user", "content": question}], tool, HELD_OUT, 0)
    assert [len(careful), len(mixed)] == [24, 7]
    for shown, solution in zip(careful[:20], math_tasks.solutions(20, 0, HELD_OUT), strict=True):
        (expression, result), *_ = solution.calls
        assert shown["messages"][0]["content"] == solution.question
        assert shown["messages"][1]["content"] == tool_call("calculator", expression=expression)
        assert shown["messages"][2] == {"role": "tool", "content": result}
        assert shown["messages"][-1] == {"role": "assistant", "content": solution.answer}
        assert shown["tools"] == [tool.spec]

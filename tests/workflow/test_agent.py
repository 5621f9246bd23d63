"""What the ready-made workflows have in common, and the simplest of them: one question, one answer, one reward."""

from collections.abc import Sequence

import pytest
from rewards.scoring import length
from scripted_answers import TOKENIZER, exact, said_in, saying, seen_by, too_long

from arl.api.errors import ConfigError, DatasetError, PromptTooLongError, RewardError
from arl.api.types import Example, SamplingParams
from arl.rewards import InlineReward, RewardPool, Score
from arl.workflow.agent import SingleTurnWorkflow
from arl.workflow.dialogue import Turn

QUESTION = {"question": "2 + 2 = ?", "answer": "4"}
TOLD = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 = ?"}]


async def test_an_answer_is_rewarded() -> None:
    workflow = SingleTurnWorkflow(TOKENIZER, exact, sampling=SamplingParams(max_new_tokens=32, temperature=0.5))
    async with workflow:
        engine = saying("4", "5")
        (right,) = await workflow.arun_episode(engine, QUESTION)
        (wrong,) = await workflow.arun_episode(engine, QUESTION)
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert said_in(right) == "4<|im_end|>"
    assert right.temperature == 0.5


async def test_parts_and_metrics_of_a_score_are_in_the_trajectory() -> None:
    async def scored(answer: str, data: Example) -> Score:
        return Score(0.5, {"correct": 1.0, "brief": 0.0}, {"seen": 3})

    workflow = SingleTurnWorkflow(TOKENIZER, scored)
    (trajectory,) = await workflow.arun_episode(saying("4"), QUESTION)
    assert (trajectory.reward, trajectory.rewards) == (0.5, {"correct": 1.0, "brief": 0.0})
    assert trajectory.metrics["seen"] == 3


@pytest.mark.parametrize(
    "data",
    [
        {"messages": TOLD},
        {"messages": tuple(TOLD[1:])},
        {"prompt": "2 + 2 = ?"},
        {"prompt": TOLD[1:], "question": "another"},
        {"messages": None, "question": "2 + 2 = ?"},
    ],
)
async def test_messages_come_from_the_columns_of_the_example(data: Example) -> None:
    engine = saying("4")
    await SingleTurnWorkflow(TOKENIZER, exact, system="Be brief.").arun_episode(engine, {**data, "answer": "4"})
    assert seen_by(engine) == TOKENIZER.apply_chat_template(TOLD, tokenize=False, add_generation_prompt=True)


async def test_an_examples_own_system_prompt_comes_before_the_workflows() -> None:
    engine = saying("4")
    await SingleTurnWorkflow(TOKENIZER, exact, system="Be long.").arun_episode(engine, {"messages": TOLD, "answer": ""})
    assert "Be brief." in seen_by(engine)
    assert "Be long." not in seen_by(engine)


@pytest.mark.parametrize("given", ["a + b = ?", [{"role": "user", "content": "a + b = ?"}]])
async def test_a_function_makes_messages_of_what_other_columns_have(given: str | Sequence[dict[str, str]]) -> None:
    engine = saying("4")
    await SingleTurnWorkflow(TOKENIZER, exact, prompt=lambda data: given).arun_episode(engine, {"a": 1, "answer": ""})
    assert "a + b = ?" in seen_by(engine)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({"text": "?", "answer": "4"}, "has the columns text, answer, and no messages in any of messages, prompt"),
        ({"question": 3}, "would begin with '3'; it must be a question, or messages"),
        ({"messages": []}, "would begin with"),
        ({"messages": [{"content": "?"}]}, "messages with roles"),
        ({"messages": [*TOLD, {"role": "assistant", "content": "4"}]}, "end with the assistant's"),
    ],
)
async def test_an_example_without_usable_messages_is_an_error_that_says_so(data: Example, complaint: str) -> None:
    with pytest.raises(DatasetError, match=complaint):
        await SingleTurnWorkflow(TOKENIZER, exact).arun_episode(saying(), data)


async def test_methods_can_be_overridden() -> None:
    class Last(SingleTurnWorkflow):
        def messages(self, data: Example) -> list[dict[str, str]]:
            return [{"role": "user", "content": f"What is {data['question']}"}]

        def answer(self, turn: Turn) -> str:
            return turn.text.rpartition(" ")[2]

    engine = saying("It is 4")
    (trajectory,) = await Last(TOKENIZER, exact).arun_episode(engine, QUESTION)
    assert trajectory.reward == 1.0
    assert "What is 2 + 2" in seen_by(engine)


async def test_a_plain_function_is_run_in_workers_that_live_as_long_as_the_workflow() -> None:
    workflow = SingleTurnWorkflow(TOKENIZER, length)
    with pytest.raises(RewardError, match="is not open"):
        await workflow.arun_episode(saying("four"), QUESTION)
    async with workflow, workflow:
        (trajectory,) = await workflow.arun_episode(saying("four"), QUESTION)
    assert trajectory.reward == 4.0
    with pytest.raises(RewardError, match="is not open"):
        await workflow.arun_episode(saying("four"), QUESTION)


async def test_a_reward_that_the_user_opened_stays_open() -> None:
    async with RewardPool(length, workers=1) as reward:
        async with SingleTurnWorkflow(TOKENIZER, reward):
            pass
        assert await reward("four", QUESTION) == 4.0


async def test_a_question_that_does_not_fit_fails_its_episode() -> None:
    with pytest.raises(PromptTooLongError):
        await SingleTurnWorkflow(TOKENIZER, exact).arun_episode(saying(too_long()), QUESTION)


async def test_a_reward_that_is_no_number_fails_its_episode() -> None:
    workflow = SingleTurnWorkflow(TOKENIZER, InlineReward(lambda answer, data: float("nan")))
    with pytest.raises(RewardError, match="nan"):
        await workflow.arun_episode(saying("4"), QUESTION)


def test_a_reward_of_a_wrong_type_is_refused_when_the_workflow_is_made() -> None:
    with pytest.raises(ConfigError, match="reward is 3"):
        SingleTurnWorkflow(TOKENIZER, 3)  # pyright: ignore[reportArgumentType]

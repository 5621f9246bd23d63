"""What the ready-made workflows have in common, and the simplest of them: one question, one answer, one reward."""

from typing import Any

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


async def test_an_answer_is_rewarded_and_the_parts_and_metrics_of_its_score_are_in_the_trajectory() -> None:
    async def scored(answer: str, data: Example) -> Score:
        return Score(float(answer == data["answer"]), {"brief": 0.5}, {"seen": 3})

    workflow = SingleTurnWorkflow(TOKENIZER, scored, sampling=SamplingParams(max_new_tokens=32, temperature=0.5))
    async with workflow:
        engine = saying("4", "5")
        (right,) = await workflow.arun_episode(engine, QUESTION)
        (wrong,) = await workflow.arun_episode(engine, QUESTION)
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert (right.rewards, right.metrics["seen"], right.temperature) == ({"brief": 0.5}, 3, 0.5)
    assert said_in(right) == "4<|im_end|>"


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        ({"messages": TOLD}, {"system": "Be long."}),
        ({"messages": tuple(TOLD[1:])}, {}),
        ({"prompt": "2 + 2 = ?"}, {}),
        ({"prompt": TOLD[1:], "question": "another"}, {}),
        ({"messages": None, "question": "2 + 2 = ?"}, {}),
        ({"a": 2}, {"prompt": lambda data: f"2 + {data['a']} = ?"}),
        ({"a": 2}, {"prompt": lambda data: TOLD[1:]}),
    ],
)
async def test_messages_are_those_of_a_column_or_of_a_function_after_a_system_prompt(
    data: Example, settings: dict[str, Any]
) -> None:
    engine, settings = saying("4"), {"system": "Be brief.", **settings}
    await SingleTurnWorkflow(TOKENIZER, exact, **settings).arun_episode(engine, {**data, "answer": "4"})
    assert seen_by(engine) == TOKENIZER.apply_chat_template(TOLD, tokenize=False, add_generation_prompt=True)


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


async def test_a_question_that_does_not_fit_and_a_reward_that_is_no_number_fail_their_episodes() -> None:
    with pytest.raises(PromptTooLongError):
        await SingleTurnWorkflow(TOKENIZER, exact).arun_episode(saying(too_long()), QUESTION)
    workflow = SingleTurnWorkflow(TOKENIZER, InlineReward(lambda answer, data: float("nan")))
    with pytest.raises(RewardError, match="nan"):
        await workflow.arun_episode(saying("4"), QUESTION)
    with pytest.raises(ConfigError, match="reward is 3"):
        SingleTurnWorkflow(TOKENIZER, 3)  # pyright: ignore[reportArgumentType]

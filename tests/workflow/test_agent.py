"""What the ready-made workflows have in common; the simplest, with one answer, and the one with several turns."""

import threading
from typing import Any

import pytest
from rewards.scoring import length
from scripted_answers import TOKENIZER, exact, said_in, saying, seen_by, too_long

from arl.api.errors import ConfigError, DatasetError, PromptTooLongError, RewardError
from arl.api.types import Example, SamplingParams
from arl.rewards import InlineReward, Score
from arl.workflow.agent import MultiTurnWorkflow, SingleTurnWorkflow
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


async def test_a_question_that_does_not_fit_and_a_reward_that_is_no_number_fail_their_episodes() -> None:
    with pytest.raises(PromptTooLongError):
        await SingleTurnWorkflow(TOKENIZER, exact).arun_episode(saying(too_long()), QUESTION)
    workflow = SingleTurnWorkflow(TOKENIZER, InlineReward(lambda answer, data: float("nan")))
    with pytest.raises(RewardError, match="nan"):
        await workflow.arun_episode(saying("4"), QUESTION)
    with pytest.raises(ConfigError, match="reward is 3"):
        SingleTurnWorkflow(TOKENIZER, 3)  # pyright: ignore[reportArgumentType]


async def try_again(answer: str, data: Example, attempt: int) -> str | None:
    return None if answer == data["answer"] else f"No, not after {attempt}."


async def test_feedback_is_told_until_there_is_none_and_the_last_answer_is_rewarded_with_a_discount() -> None:
    async def scored(answer: str, data: Example) -> Score:
        return Score(2.0 * (answer == "4"), {"correct": 1.0})

    engine = saying("5", "3", "4", "never said")
    workflow = MultiTurnWorkflow(TOKENIZER, scored, feedback=try_again, max_turns=9, discount=0.5, turn_reward=exact)
    (trajectory,) = await workflow.arun_episode(engine, QUESTION)
    assert (trajectory.reward, trajectory.rewards) == (0.5, {"correct": 0.25})
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 1.0]
    assert trajectory.metrics == {"turns": 3, "context_full": 0}
    assert said_in(trajectory) == "5<|im_end|>3<|im_end|>4<|im_end|>"
    assert "No, not after 0." in seen_by(engine)
    assert "No, not after 1." in seen_by(engine)


async def test_sync_feedback_runs_in_a_thread_and_the_last_answer_gets_none() -> None:
    asked: list[tuple[int, bool]] = []

    def feedback(answer: str, data: Example, attempt: int) -> str:
        asked.append((attempt, threading.current_thread() is threading.main_thread()))
        return "No."

    workflow = MultiTurnWorkflow(TOKENIZER, exact, feedback=feedback, max_turns=2)
    (trajectory,) = await workflow.arun_episode(saying("5", "6"), QUESTION)
    assert (asked, trajectory.reward) == ([(0, False)], 0.0)


async def test_a_full_context_ends_the_episode_with_the_answer_there_is() -> None:
    workflow = MultiTurnWorkflow(TOKENIZER, exact, feedback=try_again)
    (trajectory,) = await workflow.arun_episode(saying("5", too_long()), QUESTION)
    assert (trajectory.reward, trajectory.is_truncated) == (0.0, True)
    with pytest.raises(PromptTooLongError):
        await workflow.arun_episode(saying(too_long()), QUESTION)


async def test_feedback_may_be_a_method() -> None:
    class Patient(MultiTurnWorkflow):
        async def afeedback(self, answer: str, data: Example, attempt: int) -> str | None:
            return "Once more." if attempt == 0 else None

    (trajectory,) = await Patient(TOKENIZER, exact).arun_episode(saying("5", "4"), QUESTION)
    assert trajectory.metrics["turns"] == 2


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no feedback"):
        MultiTurnWorkflow(TOKENIZER, exact)
    with pytest.raises(ConfigError, match="max_turns is 0"):
        MultiTurnWorkflow(TOKENIZER, exact, feedback=try_again, max_turns=0)
    with pytest.raises(ConfigError, match="discount 2"):
        MultiTurnWorkflow(TOKENIZER, exact, feedback=try_again, discount=2)

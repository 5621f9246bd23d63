"""Multi turn: feedback after each answer, until there is none, and the last answer counts."""

import threading
from contextlib import AsyncExitStack

import pytest
from scripted_answers import TOKENIZER, exact, said_in, saying, seen_by, too_long

from arl.api.errors import ConfigError, PromptTooLongError
from arl.api.types import Example
from arl.api.workflow import Shared
from arl.rewards import Score
from arl.workflow.agent import MultiTurnWorkflow

QUESTION = {"question": "2 + 2 = ?", "answer": "4"}


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


class Opened(Shared):
    """A reward that is opened and closed; `error` is raised by either."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.was_closed = False
        self._error = error

    async def __call__(self, answer: str, data: Example) -> float:
        return 0.0

    async def _open(self, opened: AsyncExitStack) -> None:
        if self._error:
            raise self._error
        opened.callback(setattr, self, "was_closed", True)


async def test_when_one_of_its_rewards_cannot_be_opened_the_other_is_closed() -> None:
    reward = Opened()
    workflow = MultiTurnWorkflow(TOKENIZER, reward, feedback=try_again, turn_reward=Opened(ValueError("no disk")))
    with pytest.raises(ValueError, match="no disk"):
        await workflow.__aenter__()
    assert reward.was_closed


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

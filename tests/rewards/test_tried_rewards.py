"""Rewards are tried on made-up answers before a run."""

import asyncio
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
from scoring import behaves
from workflow.chat_templates import tokenizer_of

from arl.api.errors import RewardError
from arl.api.types import Example
from arl.rewards import AsyncReward, ExactMatch, InlineReward, RewardPool, Score, WeightedReward, as_reward
from arl.rewards.adapt import try_rewards
from arl.workflow.agent import SingleTurnWorkflow

ROWS = [{"answer": "4"}, {"answer": "5"}]


def swapped(data: Any, answer: Any) -> float:
    return float(data["answer"] == answer)


def misspelt(answer: str, data: Example) -> float:
    return float(answer == data["anser"])


def nothing(answer: str, data: Example) -> Any:
    """Forgets to return it."""


def raising(answer: str, data: Example) -> Any:
    return behaves("raises")


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (InlineReward(swapped), r"test_tried_rewards.py, line \d+.*string indices must be"),
        (InlineReward(misspelt), "KeyError"),
        (InlineReward(nothing), "returned None; a reward must be a finite number"),
        (WeightedReward({"good": (1.0, ExactMatch()), "bad": (1.0, InlineReward(misspelt))}), "anser"),
        (RewardPool(raising), r"ValueError: no such answer"),
    ],
)
async def test_one_that_fails_for_every_answer_to_every_example_ends_the_start(reward: Any, reason: str) -> None:
    with pytest.raises(RewardError, match=re.compile(f"failed for 8 of 8 made-up answers.*{reason}", re.S)):
        await try_rewards([as_reward(reward)], ROWS, gets_text=True, is_open=True)


class Own:
    """A reward that its user opens, in their workflow."""

    async def __call__(self, answer: str, data: Example) -> float:
        raise SystemExit(3)


async def test_an_object_that_only_its_user_opens_is_called_when_it_may_be_open() -> None:
    await try_rewards([as_reward(Own())], ROWS, gets_text=True, is_open=False)
    with pytest.raises(RewardError, match="reward Own failed for 8 of 8"):
        await try_rewards([as_reward(Own())], ROWS, gets_text=True, is_open=True)


async def slow(answer: str, data: Example) -> float:
    await asyncio.sleep(1000)
    return 1.0


@pytest.mark.parametrize(
    ("function", "number"),
    [
        (lambda answer, data: len(answer) / (len(answer) > 0), "1 of 4"),
        (lambda answer, data: answer.split("####")[1] == data["answer"], "3 of 4"),
        (lambda answer, data: json.loads(answer)["answer"] == data["answer"], "3 of 4"),
        (lambda answer, data: float(1 / (data["answer"] == "5")), "4 of 8"),
    ],
)
async def test_one_that_can_score_some_answer_gets_a_warning(
    function: Callable[..., Any], number: str, caplog: pytest.LogCaptureFixture
) -> None:
    await try_rewards([as_reward(InlineReward(function))], ROWS, gets_text=True, is_open=True)
    assert f"failed for {number} made-up answers" in caplog.text


async def test_one_that_takes_too_long_gets_a_warning_and_arls_own_are_not_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    rewards = [as_reward(ExactMatch()), as_reward(AsyncReward(slow, timeout_s=0.01))]
    await try_rewards(rewards, [{}, {}], gets_text=True, is_open=True)
    (record,) = caplog.records
    assert "slow ran longer than 0.01 s" in record.message


async def test_a_workflow_that_gives_it_something_else_than_the_models_text_starts_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Mine(SingleTurnWorkflow):
        async def ascore(self, answer: str, data: Example) -> Score:
            return await super().ascore(answer, {**data, "anser": answer})

    workflow = Mine(tokenizer_of("chatml"), InlineReward(misspelt))
    await workflow.arehearse(ROWS)
    assert "failed for 8 of 8 made-up answers" in caplog.text
    with pytest.raises(RewardError):
        await SingleTurnWorkflow(workflow.tokenizer, workflow.reward).arehearse(ROWS)

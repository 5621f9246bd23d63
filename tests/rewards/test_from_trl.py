"""Rewards that were written for TRL's trainers, called as these call them."""

import math
import pickle
from typing import Any

import pytest
from workflow.chat_templates import tokenizer_of

from arl.api.errors import ConfigError, RewardError
from arl.api.types import Example
from arl.rewards import Score, ThreadReward, WeightedReward, as_reward, from_trl

ROW = {"prompt": [{"role": "user", "content": "2 + 2 = ?"}], "answer": "4", "completion": "gone"}
PLAIN = {"prompt": "2 + 2 = ", "answer": "4"}


def right(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """As docs/from_trl.md has it."""
    return [float(one[0]["content"].strip() == a) for one, a in zip(completions, answer, strict=True)]


def echo(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    """Fails with what it was given."""
    raise LookupError(prompts, completions, sorted(kwargs))


async def later(completions: list[Any], log_metric: Any, log_extra: Any) -> list[float | None]:
    log_extra("said", completions)
    log_metric("letters", len(completions[0]))
    return [None if completions[0] == "?" else len(completions[0]) / 2]


class Short:
    """As TRL's own, an object that counts tokens."""

    __name__ = "short"

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [-float(len(ids)) for ids in completion_ids]


async def test_a_function_of_trl_is_a_reward_by_itself_and_as_a_part() -> None:
    async with as_reward(from_trl(right)) as reward:  # in a worker's process
        assert (reward.name, await reward("4 ", ROW)) == ("right", Score(1.0))
    parts = {"right": (1.0, ThreadReward(pickle.loads(pickle.dumps(from_trl(right))))), "later": (2.0, from_trl(later))}
    async with WeightedReward(parts) as whole:
        assert await whole("4", ROW) == Score(2.0, {"right": 1.0, "later": 0.5}, {"later/letters": 1})


@pytest.mark.parametrize(
    ("row", "settings", "given"),
    [
        (ROW, {}, ([ROW["prompt"]], [[{"role": "assistant", "content": "4"}]])),
        (PLAIN, {}, ([PLAIN["prompt"]], ["4"])),
        (PLAIN, {"conversational": True}, ([PLAIN["prompt"]], [[{"role": "assistant", "content": "4"}]])),
        ({"messages": ROW["prompt"], "answer": "4"}, {"conversational": False}, ([ROW["prompt"]], ["4"])),
    ],
)
def test_it_gets_lists_of_one_in_the_form_of_the_prompt(row: Example, settings: dict[str, Any], given: Any) -> None:
    reward: Any = from_trl(echo, tokenizer=tokenizer_of("chatml"), **settings)
    with pytest.raises(LookupError) as error:
        reward("4", row)
    columns = {"messages"} & row.keys()
    assert error.value.args == (*given, sorted({"answer", "completion_ids", "log_extra", "log_metric", *columns}))


async def test_none_does_not_apply_and_counts_as_0() -> None:
    reward = as_reward(from_trl(later))
    assert await reward("?", PLAIN) == Score(0.0, metrics={"letters": 1, "not_applicable": 1.0})
    nan: Any = from_trl(lambda completions, **kwargs: [math.nan])
    assert nan("?", PLAIN).metrics["not_applicable"] == 1.0


async def test_tokens_are_those_of_the_answers_text() -> None:
    assert (
        await as_reward(ThreadReward(from_trl(Short(), tokenizer=tokenizer_of("chatml"))))("abc", PLAIN)
    ).value == -3.0
    with pytest.raises(ConfigError, match=r"reward Short takes completion_ids, .* give from_trl the tokenizer"):
        from_trl(Short())


def test_what_arl_does_not_have_and_what_is_no_list_of_one_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"takes trainer_state, which arl does not have$"):
        from_trl(lambda completions, trainer_state: [0.0])
    for result in ([], [1.0, 2.0]):
        two: Any = from_trl(lambda completions, result=result: result)
        with pytest.raises(RewardError, match=f"returned {len(result)} numbers for one completion"):
            two("4", PLAIN)


@pytest.mark.parametrize("function", [right, echo, later, Short()])
def test_without_from_trl_it_is_refused(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"takes completion.*give arl.rewards.from_trl\(...\) of it"):
        as_reward(function)

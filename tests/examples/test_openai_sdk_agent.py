"""The order desk behind the endpoint, its questions and its demonstrations, without a model that was trained."""

import ssl
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import openai_sdk_agent
import pytest
from agents import set_trace_processors
from agents.models import openai_provider
from openai import DefaultAsyncHttpxClient
from openai_sdk_agent import KINDS, MIX, demonstration, phrases, program, questions
from order_desk import shop
from played import played

from arl.api.types import SamplingParams, Trajectory
from arl.endpoint.sdk_workflow import SDKWorkflow
from arl.engine.tiny import tiny_tokenizer
from arl.rewards import NumericMatch
from arl.run.finetuning.examples import to_demonstrations
from arl.run.finetuning.warm_starts import tool_call

TOKENIZER = tiny_tokenizer(phrases())
ROWS = [next(row for row in questions("training") if row["kind"] == kind) for kind in range(len(KINDS))]
ORDER = tool_call("find_order", number=4821)
_CERTIFICATES = ssl.create_default_context()


@pytest.fixture(autouse=True)
async def _connections(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """The SDK keeps its connections as long as the process lives, which here outlives the event loop."""
    async with DefaultAsyncHttpxClient(verify=_CERTIFICATES) as http:
        monkeypatch.setattr(openai_provider, "_http_client", http)
        yield


def workflow() -> SDKWorkflow:
    return SDKWorkflow(program, NumericMatch(), TOKENIZER, sampling=SamplingParams(max_new_tokens=200))


async def episode(*answers: str, row: Any = ROWS[0]) -> tuple[Trajectory, str]:
    (made,) = await played(workflow(), row, *answers, tokenizer=TOKENIZER)
    return made


@pytest.mark.parametrize("row", ROWS, ids=["price", "days"])
@pytest.mark.parametrize("habit", MIX)
async def test_a_demonstration_has_the_very_tokens_of_an_episode(row: Any, habit: str) -> None:
    shown = demonstration(row, habit, guess="7")
    ((token_ids, mask),) = to_demonstrations([shown], TOKENIZER)
    trajectory, _ = await episode(*(m["content"] for m in shown["messages"] if m["role"] == "assistant"), row=row)
    assert list(trajectory.token_ids) == list(token_ids)
    assert list(trajectory.loss_mask) == list(mask)
    assert trajectory.reward == float(habit == "careful")


async def test_unknown_orders_and_malformed_calls_are_told_to_the_model() -> None:
    wrong = [
        tool_call("find_order", number=17),
        tool_call("price", item="Moon", quantity=2),
        tool_call("delivery_days", city="Atlantis"),
        tool_call("refund", number=17),
        tool_call("price", item="Moon"),
    ]
    trajectory, text = await episode(*wrong, ROWS[0]["answer"])
    assert trajectory.reward == 1.0
    for told in ("there is no order 17", "there is no 'Moon'", "no parcels go to 'Atlantis'", "refund", "quantity"):
        assert any(told in response for response in text.split("<tool_response>")[1:])


@pytest.mark.parametrize(
    "said", [[ORDER] * 6, [""], ["<tool_call>\n{"], ["<tool_call>\nnothing\n</tool_call>"]], ids=len
)
async def test_a_model_that_never_answers_or_says_nothing_has_no_reward_and_fails_nothing(said: list[str]) -> None:
    trajectory, _ = await episode(*said)
    assert (trajectory.reward, len(trajectory.turns)) == (0.0, len(said))
    assert (trajectory.metrics["calls"], trajectory.metrics["calls_failed"]) == (len(said), 0)


class Traced:
    """Notes what it is told of traces and spans."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.told.append(name)


async def test_nothing_is_traced() -> None:
    traced: Any = Traced()
    set_trace_processors([traced])
    try:
        await episode(ORDER, "7")
    finally:
        set_trace_processors([])
    assert not [name for name in traced.told if name.startswith("on_")]


def test_no_order_is_in_two_regions_and_the_books_have_the_answers() -> None:
    regions = {name: questions(name) for name in openai_sdk_agent.SHARES}
    orders = Counter(number for rows in regions.values() for number in {row["order"] for row in rows})
    assert set(orders) == set(shop().orders)
    assert set(orders.values()) == {1}
    for row in regions["held_out"]:
        order = shop().orders[row["order"]]
        assert str(row["order"]) in row["question"]
        right = shop().prices[order.item] * order.quantity if "cost" in row["question"] else shop().days[order.city]
        assert row["answer"] == str(right)

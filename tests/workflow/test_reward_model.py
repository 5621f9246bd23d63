"""A reward model behind a URL: one finite number for a sequence, or an error that says who answered what."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from served import BREAK, language_model, reward_model

from arl.api.errors import ModelError, RewardError, RewardTimeoutError
from arl.web import client as web_client
from arl.workflow.teachers import RewardModelClient


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_client, "_FIRST_WAIT_S", 0.001)


async def test_a_sequence_has_the_score_that_the_model_gives_it() -> None:
    async with reward_model() as served, RewardModelClient(served.url, api_key="k") as judge:
        assert await judge.score((1, 2, 3)) == 6.0
        assert await judge.score([4]) == 4.0
        assert served.asked == [
            ("/model_info", None),
            ("/classify", {"input_ids": [1, 2, 3]}),
            ("/classify", {"input_ids": [4]}),
        ]
        assert set(served.keys) == {"Bearer k"}


@pytest.mark.parametrize(
    "answer",
    [{"embedding": [0.1, 0.9]}, {"embedding": [None]}, {"embedding": 1.0}, {"score": 1}, [1.0], {"embedding": []}],
)
async def test_only_one_finite_number_is_a_reward(answer: Any) -> None:
    async with reward_model() as served, RewardModelClient(served.url) as judge:
        served.answers["/classify"] = lambda _: answer
        with pytest.raises(RewardError, match="a reward is one finite number") as caught:
            await judge.score((1, 2))
        assert served.url.rstrip("/") in str(caught.value)


async def test_refusals_failures_and_absence_are_reward_errors_that_say_why() -> None:
    async with reward_model() as served, RewardModelClient(served.url, retries=1) as judge:
        served.answers["/classify"] = lambda _: (400, {"error": {"message": "longer than the context"}})
        with pytest.raises(RewardError, match="HTTP 400: longer than the context"):
            await judge.score((1, 2))
        assert served.count("/classify") == 1
        served.answers["/classify"] = lambda _: (500, {"error": {"message": "broken"}})
        with pytest.raises(RewardError, match="HTTP 500: broken"):
            await judge.score((1, 2))
        assert served.count("/classify") == 3
        with pytest.raises(RewardError, match="knows only 500 tokens"):
            await judge.score((1, 500))
        with pytest.raises(RewardError, match="nothing to score"):
            await judge.score(())
        served.answers["/classify"] = lambda _: BREAK
        with pytest.raises(RewardError, match="could not be reached"):
            await judge.score((1, 2))


async def test_a_language_model_is_no_judge() -> None:
    async with language_model() as served:
        with pytest.raises(ModelError, match="--is-embedding"):
            async with RewardModelClient(served.url):
                pytest.fail("it was let in")
        judge = RewardModelClient(served.url)
        with pytest.raises(RewardError, match="--is-embedding"):
            await judge.score((1, 2))
        await judge.aclose()


async def test_a_score_that_takes_too_long_is_a_reward_timeout() -> None:
    never = asyncio.Event()
    async with reward_model() as served, RewardModelClient(served.url, timeout_s=0.2) as judge:

        async def hang(body: Any) -> Any:
            await never.wait()
            return {}

        served.answers["/classify"] = hang
        with pytest.raises(RewardTimeoutError, match="did not answer within"):
            await judge.score((1, 2))
        never.set()

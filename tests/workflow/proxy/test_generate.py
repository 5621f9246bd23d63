"""/inference/v1/generate: prompts are recorded as the tokens they are, and joined by them alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError
from programs import TOKENIZER, client_of

from arl.api.scripted import ScriptedEngine
from arl.api.types import ModelRequest, ModelResponse, SamplingParams
from arl.workflow.proxy import EpisodeSession, OpenAIProxy


class Client:
    """Posts token ids, as trainers do."""

    def __init__(self, session: EpisodeSession, sdk: AsyncOpenAI) -> None:
        self.session = session
        self._sdk = sdk

    async def generate(self, token_ids: Sequence[int], body: dict[str, Any] | None = None, **sampling: Any) -> Any:
        asked = {"model": "arl", "token_ids": list(token_ids), "sampling_params": sampling, **(body or {})}
        return await self._sdk.post(f"{self.session.url}/inference/v1/generate", cast_to=object, body=asked)


@asynccontextmanager
async def calling_with(engine: ScriptedEngine, **options: Any) -> AsyncIterator[Client]:
    async with (
        OpenAIProxy(TOKENIZER, **options) as proxy,
        proxy.episode(engine) as session,
        client_of(session, max_retries=0) as sdk,
    ):
        yield Client(session, sdk)


def counting() -> ScriptedEngine:
    """Answers with the two numbers that follow a prompt's last token; the logprob tells the token's place."""

    def answer(request: ModelRequest) -> ModelResponse:
        last = request.input_ids[-1]
        return ModelResponse(
            output_ids=(last + 1, last + 2), output_logprobs=(-0.25, -0.5), output_versions=(4, 5), stop_reason="stop"
        )

    return ScriptedEngine(answer)


async def test_tokens_come_back_with_their_logprobs() -> None:
    async with calling_with(counting()) as client:
        answer = await client.generate([10, 11, 12], {"request_id": "first", "return_token_ids": True})
        (trajectory,) = client.session.trajectories(1.0)
    content = [
        {"token": "token_id:13", "logprob": -0.25, "bytes": None, "top_logprobs": []},
        {"token": "token_id:14", "logprob": -0.5, "bytes": None, "top_logprobs": []},
    ]
    choice = {"index": 0, "token_ids": [13, 14], "logprobs": {"content": content}, "finish_reason": "stop"}
    assert answer == {
        "request_id": "first",
        "choices": [choice],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        "prompt_token_ids": [10, 11, 12],
    }
    assert trajectory.token_ids == (10, 11, 12, 13, 14)
    assert trajectory.loss_mask == (0, 0, 0, 1, 1)
    assert trajectory.behavior_logprobs == (0.0, 0.0, 0.0, -0.25, -0.5)
    assert trajectory.versions == (-1, -1, -1, 4, 5)


async def test_a_prompt_continues_the_turn_that_is_its_longest_beginning() -> None:
    async with calling_with(counting()) as client:
        await client.generate([10])  # 10 11 12
        await client.generate([10, 11, 12, 20])  # ... 20 21 22
        await client.generate([10, 11, 12, 20, 21, 22, 30])
        await client.generate([10, 11, 12, 40])
        whole, branch = client.session.trajectories(1.0)
    assert whole.token_ids == (10, 11, 12, 20, 21, 22, 30, 31, 32)
    assert whole.loss_mask == (0, 1, 1, 0, 1, 1, 0, 1, 1)
    assert branch.token_ids == (10, 11, 12, 40, 41, 42)
    assert branch.loss_mask == (0, 0, 0, 0, 1, 1)


async def test_a_prompt_that_shows_a_turn_otherwise_begins_anew() -> None:
    async with calling_with(counting()) as client:
        await client.generate([10])
        await client.generate([10, 11, 99, 20])
        first, second = client.session.trajectories(1.0)
    assert (first.token_ids, second.token_ids) == ((10, 11, 12), (10, 11, 99, 20, 21, 22))
    assert second.loss_mask == (0, 0, 0, 0, 1, 1)


async def test_a_prompt_may_end_where_a_turn_was_cut_off() -> None:
    async with calling_with(counting()) as client:
        await client.generate([10])
        await client.generate([10, 11, 12])
        (trajectory,) = client.session.trajectories(1.0)
    assert trajectory.token_ids == (10, 11, 12, 13, 14)
    assert trajectory.loss_mask == (0, 1, 1, 1, 1)


async def test_samples_of_one_prompt_are_trajectories_apart() -> None:
    numbers = iter(range(20, 30))
    async with calling_with(ScriptedEngine(lambda _: [next(numbers)])) as client:
        answer = await client.generate([10], n=2)
        trajectories = client.session.trajectories(1.0)
    assert [choice["token_ids"] for choice in answer["choices"]] == [[20], [21]]
    assert [trajectory.token_ids for trajectory in trajectories] == [(10, 20), (10, 21)]


async def test_sampling_is_as_asked_for_in_vllms_names() -> None:
    engine = counting()
    async with calling_with(engine, sampling=SamplingParams(max_new_tokens=7, top_p=0.5)) as client:
        await client.generate(
            [10],
            {"cache_salt": "3", "priority": 0},
            max_tokens=8,
            temperature=0.7,
            top_k=0,
            min_p=0.1,
            stop_token_ids=[2],
            seed=4,
            logprobs=1,
            skip_special_tokens=False,
            routed_experts_prompt_start=0,
        )
    assert engine.requests[0].sampling == SamplingParams(
        max_new_tokens=8, temperature=0.7, top_p=0.5, min_p=0.1, stop_token_ids=(2,), seed=4
    )


async def test_an_answer_is_no_longer_than_the_context_has_room_for() -> None:
    engine = counting()
    async with calling_with(engine, context_length=5) as client:
        await client.generate([10, 11, 12], max_tokens=100)
        with pytest.raises(BadRequestError, match="maximum context length") as refusal:
            await client.generate([10, 11, 12, 13, 14])
        assert client.session.is_truncated
    assert engine.requests[0].sampling.max_new_tokens == 2
    assert refusal.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "sampling", "param"),
    [
        ({"token_ids": "hi"}, {}, "token_ids"),
        ({"token_ids": [1, -1]}, {}, "token_ids"),
        ({"token_ids": [True]}, {}, "token_ids"),
        ({"token_ids": []}, {}, "token_ids"),
        ({"stream": True}, {}, "stream"),
        ({"features": {"mm_hashes": {}}}, {}, "features"),
        ({"content_parts": [{"type": "image_url"}]}, {}, "content_parts"),
        ({}, {"n": 0}, "n"),
        ({}, {"logprobs": 5}, "logprobs"),
        ({}, {"repetition_penalty": 1.2}, "repetition_penalty"),
        ({}, {"temperature": -1}, "temperature"),
        ({}, {"no_such_field": 1}, "no_such_field"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    body: dict[str, Any], sampling: dict[str, Any], param: str
) -> None:
    engine = counting()
    async with calling_with(engine) as client:
        with pytest.raises(BadRequestError, match=param) as refusal:
            await client.generate([10], body, **sampling)
    assert refusal.value.param == param
    assert not engine.requests


async def test_an_answer_that_was_asked_for_again_is_kept_once() -> None:
    async with calling_with(counting()) as client:
        await client.generate([10])
        again = {"x-stainless-retry-count": "1"}
        url = f"{client.session.url}/inference/v1/generate"
        body = {"model": "arl", "token_ids": [10], "sampling_params": {}}
        await client._sdk.post(url, cast_to=object, body=body, options={"headers": again})
        assert client.session.counts.repeated == 1
        assert len(client.session.turns()) == 1

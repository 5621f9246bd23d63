"""Pausing, and what becomes of requests whose weights change under them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from conformance.conftest import Models
from protocol_client import Client, fresh_rid, spans
from reference import close, logprobs_across, logprobs_of

PROMPTS = [[10, 11, 12, 13], [50, 60], [7] * 30]
SHORT = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
ENDLESS = {"max_new_tokens": 4000, "ignore_eos": True}
NUM_BEFORE, NUM_AFTER = 5, 5


@asynccontextmanager
async def interrupted(client: Client, mode: str) -> AsyncIterator[list[Any]]:
    """Three requests that were paused in the middle. The list has their answers once they are there.

    Those that go on afterwards are aborted, when each has gained some more tokens.
    """
    rids = [fresh_rid() for _ in PROMPTS]
    body = {"input_ids": PROMPTS, "sampling_params": ENDLESS, "return_logprob": True, "rid": rids}
    answers: list[Any] = []
    async with client.stream("/generate", body) as events:
        await gain(events, NUM_BEFORE, is_old=True)
        paused = await client.post("/pause_generation", {"mode": mode})
        assert (paused.status, paused.body["status"]) == (200, "ok")
        yield answers
        last: dict[int, Any] = {}
        if mode != "abort":
            last = await gain(events, NUM_AFTER, is_old=False)
            for rid in rids:
                await client.post("/abort_request", {"rid": rid})
        last |= {event["index"]: event async for event in events if event != "[DONE]"}
    answers += [last[i] for i in range(len(PROMPTS))]


async def gain(events: AsyncIterator[Any], num_events: int, *, is_old: bool) -> dict[int, Any]:
    """Read on until so many events of each answer have come under the old label, or another; the last of each."""
    seen: dict[int, list[Any]] = {i: [] for i in range(len(PROMPTS))}
    while min(map(len, seen.values())) < num_events:
        event = await anext(events)
        if (event["meta_info"]["weight_version"] == "a") is is_old:
            seen[event["index"]].append(event)
    return {i: own[-1] for i, own in seen.items()}


def seam_of(answer: Any) -> int:
    """How many tokens are of weights a; the rest are of b, and nothing is missing."""
    num_tokens = answer["meta_info"]["completion_tokens"]
    (first, start, seam), (second, resumed, end) = spans(answer)
    assert (first, start, second, resumed, end) == ("a", 0, "b", seam, num_tokens)
    assert seam >= NUM_BEFORE
    assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) == num_tokens
    return seam


def check(answer: Any, wanted: torch.Tensor) -> None:
    close(logprobs_of(answer), wanted, atol=2e-4)


async def load(client: Client, models: Models, *, flush_cache: bool) -> None:
    update = {"model_path": str(models.directory_b), "weight_version": "b", "flush_cache": flush_cache}
    answer = await client.post("/update_weights_from_disk", {**update, "abort_all_requests": False})
    assert (answer.status, answer.body["success"]) == (200, True)


async def test_in_place_every_token_is_of_the_weights_it_names_over_the_keys_and_values_there_were(
    client: Client, models: Models
) -> None:
    async with interrupted(client, "in_place") as answers:
        await load(client, models, flush_cache=False)
        await client.post("/continue_generation")
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        output = answer["output_ids"]
        seam = seam_of(answer)
        check(answer, logprobs_across([(models.a, seam), (models.b, len(output) - seam)], prompt, output))


async def test_retracted_requests_go_on_as_if_the_new_weights_had_read_everything(
    client: Client, models: Models
) -> None:
    async with interrupted(client, "retract") as answers:
        await load(client, models, flush_cache=True)
        await client.post("/continue_generation")
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        output = answer["output_ids"]
        seam = seam_of(answer)
        close(
            logprobs_of(answer),
            torch.cat([models.a.logprobs(prompt, output)[:seam], models.b.logprobs(prompt, output)[seam:]]),
        )
        assert answer["meta_info"]["num_retractions"] == 1


async def test_aborted_requests_return_what_they_have_and_the_rest_continues_it(client: Client, models: Models) -> None:
    async with interrupted(client, "abort") as answers:
        pass
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        num_tokens = len(answer["output_ids"])
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert spans(answer) == [("a", 0, num_tokens)]
        assert NUM_BEFORE <= num_tokens < 4000
        check(answer, models.a.logprobs(prompt, answer["output_ids"]))
    await load(client, models, flush_cache=True)
    contexts = [[*prompt, *answer["output_ids"]] for answer, prompt in zip(answers, PROMPTS, strict=True)]
    body = {"input_ids": contexts, "sampling_params": SHORT, "return_logprob": True}
    rest = asyncio.create_task(client.generate(**body))
    await client.post("/continue_generation")
    for answer, context in zip(await rest, contexts, strict=True):
        assert spans(answer) == [("b", 0, 4)]
        check(answer, models.b.logprobs(context, answer["output_ids"]))


async def test_several_updates_within_one_answer_are_several_spans(client: Client, models: Models) -> None:
    async with interrupted(client, "in_place") as answers:
        for label in ("1", "2"):  # nothing is sampled between the two: no span is of the first
            await client.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})
        await client.post("/continue_generation")
    assert {tuple(label for label, _, _ in spans(answer)) for answer in answers} == {("a", "2")}


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_a_request_sent_while_paused_waits_until_generation_continues(
    client: Client, models: Models, mode: str
) -> None:
    await client.post("/pause_generation", {"mode": mode})
    waiting = asyncio.create_task(client.generate(input_ids=PROMPTS[0], sampling_params=SHORT))
    await load(client, models, flush_cache=True)
    await asyncio.wait([waiting], timeout=0.2)
    assert not waiting.done()
    await client.post("/continue_generation")
    answer = await waiting
    assert spans(answer) == [("b", 0, 4)]
    assert answer["output_ids"] == models.b.greedy(PROMPTS[0], 4)


async def test_abort_is_the_mode_when_none_is_named(client: Client) -> None:
    running = asyncio.create_task(client.generate(input_ids=PROMPTS[0], sampling_params=ENDLESS))
    await client.until_running(1)
    await client.post("/pause_generation", {})
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"

"""Ending requests before their time."""

from __future__ import annotations

import asyncio
from typing import Any

from conformance.conftest import Models
from protocol_client import Client, fresh_rid, spans

PROMPT = [10, 11, 12, 13]
GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
ENDLESS = {"max_new_tokens": 4000, "temperature": 0, "ignore_eos": True}


def is_aborted(answer: Any) -> bool:
    """Whether it ended by an abort, and has all that is known of the tokens it has."""
    info, num_tokens = answer["meta_info"], len(answer["output_ids"])
    assert info["completion_tokens"] == num_tokens < 4000
    assert spans(answer) == ([("a", 0, num_tokens)] if num_tokens else [])
    return info["finish_reason"]["type"] == "abort"


async def test_an_aborted_request_answers_what_it_has_and_others_go_on(client: Client, models: Models) -> None:
    body = {"input_ids": PROMPT, "sampling_params": ENDLESS, "return_logprob": True}
    mine, another = fresh_rid(), fresh_rid()
    other = asyncio.create_task(client.generate(**body, rid=another))
    async with client.stream("/generate", {**body, "rid": mine}) as events:
        while len((await anext(events))["output_ids"]) < 5:
            pass
        assert (await client.post("/abort_request", {"rid": mine})).status == 200
        *_, last, _ = [event async for event in events]
    assert is_aborted(last)
    logprobs = last["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in logprobs] == last["output_ids"]
    assert last["output_ids"][:20] == models.a.greedy(PROMPT, 20)[: len(last["output_ids"])]
    assert not other.done()
    await client.post("/abort_request", {"rid": another})
    assert is_aborted(await other)


async def test_aborting_all_ends_what_runs(client: Client) -> None:
    running = [asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=ENDLESS)) for _ in range(3)]
    await client.until_running(3)
    await client.post("/abort_request", {"abort_all": True})
    assert all([is_aborted(await task) for task in running])


async def test_the_members_of_a_batch_are_aborted_one_by_one(client: Client) -> None:
    running = asyncio.create_task(client.generate(input_ids=[PROMPT] * 2, sampling_params=ENDLESS, rid="mine"))
    await client.until_running(2)
    for i in range(2):
        await client.post("/abort_request", {"rid": f"mine_{i}"})
    assert all(is_aborted(answer) for answer in await running)


async def test_aborting_a_request_that_is_not_there_is_no_error(client: Client) -> None:
    assert (await client.post("/abort_request", {"rid": "nobody"})).status == 200


async def test_a_client_that_goes_away_aborts_its_request(client: Client) -> None:
    running = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=ENDLESS))
    await client.until_running(1)
    running.cancel()
    await client.until_running(0)


async def test_a_rid_that_is_under_way_is_refused_until_it_is_done(client: Client) -> None:
    running = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=ENDLESS, rid="mine"))
    await client.until_running(1)
    again = await client.post("/generate", {"input_ids": PROMPT, "sampling_params": GREEDY, "rid": "mine"})
    assert again.status == 400
    assert "Duplicate request ID detected" in again.message
    await client.post("/abort_request", {"rid": "mine"})
    await running
    await client.generate(input_ids=PROMPT, sampling_params=GREEDY, rid="mine")

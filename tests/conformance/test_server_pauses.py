"""Requests that are aborted, paused, or see their weights change. test_server_engine has their logprobs."""

import asyncio
from typing import Any

import pytest
from conformance.conftest import Models
from protocol_client import Client, fresh_rid, spans

PROMPT = [10, 11, 12, 13]
SHORT = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
ENDLESS = {"max_new_tokens": 4000, "temperature": 0, "ignore_eos": True}


def start(client: Client, rid: str) -> asyncio.Task[Any]:
    body = {"input_ids": PROMPT, "sampling_params": ENDLESS, "return_logprob": True, "rid": rid}
    return asyncio.create_task(client.generate(**body))


def check_aborted(answer: Any, models: Models) -> None:
    """It has everything that is known of the tokens it has."""
    info, output, num_tokens = answer["meta_info"], answer["output_ids"], len(answer["output_ids"])
    assert info["finish_reason"]["type"] == "abort"
    assert info["completion_tokens"] == num_tokens < 4000
    assert spans(answer) == ([("a", 0, num_tokens)] if num_tokens else [])
    models.a.check_answer(answer, PROMPT)
    assert output[:20] == models.a.greedy(PROMPT, 20)[:num_tokens]


async def test_an_aborted_request_answers_what_it_has_and_others_go_on(client: Client, models: Models) -> None:
    rids = [fresh_rid(), fresh_rid()]
    mine, other = (start(client, rid) for rid in rids)
    await client.until_running(2)
    await client.until_gained(5)
    assert (await client.post("/abort_request", {"rid": rids[0]})).status == 200
    answer = await mine
    assert len(answer["output_ids"]) >= 5
    check_aborted(answer, models)
    assert not other.done()
    await client.post("/abort_request", {"rid": rids[1]})
    check_aborted(await other, models)
    assert (await client.post("/abort_request", {"rid": "nobody"})).status == 200


async def test_a_client_that_goes_away_aborts_its_request(client: Client) -> None:
    running = start(client, fresh_rid())
    await client.until_running(1)
    running.cancel()
    await client.until_running(0)


async def test_a_rid_that_is_under_way_is_refused_until_it_is_done(client: Client) -> None:
    running = start(client, "mine")
    await client.until_running(1)
    again = await client.post("/generate", {"input_ids": PROMPT, "sampling_params": SHORT, "rid": "mine"})
    assert again.status == 400
    assert "Duplicate request ID detected" in again.message
    await client.post("/abort_request", {"rid": "mine"})
    await running
    await client.generate(input_ids=PROMPT, sampling_params=SHORT, rid="mine")


async def load_b(client: Client, models: Models, label: str) -> None:
    update = {"model_path": str(models.directory_b), "weight_version": label, "flush_cache": False}
    answer = await client.post("/update_weights_from_disk", {**update, "abort_all_requests": False})
    assert (answer.status, answer.body["success"]) == (200, True)


async def test_of_several_updates_in_one_pause_the_last_is_seen(client: Client, models: Models) -> None:
    running = start(client, rid := fresh_rid())
    await client.until_running(1)
    await client.until_gained(5)
    await client.post("/pause_generation", {"mode": "in_place"})
    for label in ("1", "2"):
        await load_b(client, models, label)
    await client.post("/continue_generation")
    await client.until_gained(5)
    await client.post("/abort_request", {"rid": rid})
    (first, start_, seam), (second, resumed, end) = spans(answer := await running)
    assert (first, start_, second, resumed, end) == ("a", 0, "2", seam, len(answer["output_ids"]))


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_a_request_sent_while_paused_waits_until_generation_continues(
    client: Client, models: Models, mode: str
) -> None:
    await client.post("/pause_generation", {"mode": mode})
    waiting = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=SHORT))
    await load_b(client, models, "b")
    await asyncio.wait([waiting], timeout=0.2)
    assert not waiting.done()
    await client.post("/continue_generation")
    answer = await waiting
    assert spans(answer) == [("b", 0, 4)]
    assert answer["output_ids"] == models.b.greedy(PROMPT, 4)


async def test_abort_is_the_mode_when_none_is_named(client: Client, models: Models) -> None:
    running = start(client, fresh_rid())
    await client.until_running(1)
    await client.post("/pause_generation", {})
    check_aborted(await running, models)

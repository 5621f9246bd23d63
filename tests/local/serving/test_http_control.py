"""Pausing, flushing, weight updates in flight, and what the server tells of itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from server_process import DEADLINE_S, Client

PROMPT = [10, 11, 12, 13]
SHORT = {"max_new_tokens": 4, "ignore_eos": True}
ENDLESS = {"max_new_tokens": 8000, "ignore_eos": True}


def spans(answer: Any) -> list[tuple[str, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in answer["meta_info"]["weight_versions"]]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_request_goes_on_under_new_weights_and_says_which_tokens_are_whose(
    client: Client, model_b: str, mode: str
) -> None:
    update = {"model_path": model_b, "weight_version": "v1", "flush_cache": False}
    async with client.stream("/generate", {"input_ids": PROMPT, "sampling_params": ENDLESS, "rid": "mine"}) as events:
        await anext(events)
        assert (await client.post("/pause_generation", {"mode": mode})).status == 200
        assert (await client.post("/update_weights_from_disk", update)).body["success"]
        await client.post("/continue_generation")
        async for event in events:
            if event["meta_info"]["weight_version"] == "v1":
                break
        await client.post("/abort_request", {"rid": "mine"})
        *_, last, _ = [event async for event in events]
    (old, start, middle), (new, resumed, end) = spans(last)
    assert (old, start, new, resumed, end) == ("v0", 0, "v1", middle, len(last["output_ids"]))
    assert 0 < middle < end
    assert last["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)


async def test_pausing_by_abort_answers_running_requests_with_what_they_have(client: Client) -> None:
    async with client.stream("/generate", {"input_ids": PROMPT, "sampling_params": ENDLESS}) as events:
        await anext(events)
        assert (await client.post("/pause_generation", {"mode": "abort"})).body["status"] == "ok"
        *_, last, _ = [event async for event in events]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert spans(last) == [("v0", 0, len(last["output_ids"]))]


async def test_abort_is_the_mode_when_none_is_named(client: Client) -> None:
    running = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=ENDLESS))
    await client.until_running(1)
    await client.post("/pause_generation")
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_weights_are_updated_in_flight_without_a_pause(client: Client, model_b: str) -> None:
    async with client.stream("/generate", {"input_ids": PROMPT, "sampling_params": ENDLESS}) as events:
        await anext(events)
        await client.post("/update_weights_from_disk", {"model_path": model_b, "weight_version": "v1"})
        async with asyncio.timeout(DEADLINE_S):
            async for event in events:
                if len(event["meta_info"]["weight_versions"]) == 2:
                    break


async def test_a_request_sent_while_paused_waits_and_can_be_aborted(client: Client) -> None:
    await client.post("/pause_generation", {"mode": "in_place"})
    waiting = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=SHORT, rid="first"))
    aborted = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=SHORT, rid="second"))
    await client.until_waiting(2)
    await client.post("/abort_request", {"rid": "second"})
    assert (await aborted)["output_ids"] == []
    assert not waiting.done()
    await client.post("/continue_generation")
    assert len((await waiting)["output_ids"]) == 4


async def test_an_unknown_mode_names_the_three(client: Client) -> None:
    answer = await client.post("/pause_generation", {"mode": "nicely"})
    assert (answer.status, answer.message) == (400, 'mode is "nicely"; it must be one of in_place, retract, abort')


async def test_a_flush_forgets_the_prefixes(client: Client) -> None:
    prompt = list(range(20, 60))
    for expected in (0, 39):
        answer = await client.generate(input_ids=prompt, sampling_params=SHORT)
        assert answer["meta_info"]["cached_tokens"] == expected
    assert (await client.post("/flush_cache")).status == 200
    assert (await client.generate(input_ids=prompt, sampling_params=SHORT))["meta_info"]["cached_tokens"] == 0


async def test_new_weights_change_the_answers_and_old_ones_bring_them_back(
    client: Client, model_a: str, model_b: str
) -> None:
    async def greedy() -> list[float]:
        sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = await client.generate(input_ids=PROMPT, sampling_params=sampling, return_logprob=True)
        return [round(logprob, 3) for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]

    before = await greedy()
    await client.post("/update_weights_from_disk", {"model_path": model_b, "weight_version": "v1"})
    assert await greedy() != before
    await client.post("/update_weights_from_disk", {"model_path": model_a, "weight_version": "v0"})
    assert await greedy() == before


async def test_renaming_the_weights_need_not_abort_what_runs(client: Client) -> None:
    running = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=ENDLESS))
    await client.until_running(1)
    answer = await client.post("/update_weight_version", {"new_version": "v9", "abort_all_requests": False})
    assert answer.body == {"success": True, "message": "Weight version updated to v9", "new_version": "v9"}
    assert (await client.get("/model_info")).body["weight_version"] == "v9"
    assert not running.done()
    await client.post("/update_weight_version", {"new_version": "v0"})  # aborts by default, as SGLang's does
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"


BAD_CONTROL: list[tuple[str, dict[str, Any], str]] = [
    ("/update_weights_from_disk", {}, "model_path is missing; it must be a string"),
    ("/update_weights_from_disk", {"model_path": "relative/x"}, "send the absolute path"),
    ("/update_weights_from_disk", {"model_path": "/nonexistent"}, "'/nonexistent', which is not a directory"),
    ("/update_weights_from_disk", {"model_path": "/", "load_format": "dummy"}, 'load_format is "dummy"'),
    ("/update_weights_from_disk", {"model_path": "/", "manifest": {"a": 1}}, 'manifest (here {"a": 1})'),
    ("/update_weight_version", {}, "new_version is missing"),
    ("/abort_request", {"rid": 5}, "rid is 5; it must be a string"),
    ("/end_weight_update", {}, "no weight-update session is open"),
    ("/update_weights_from_distributed", {}, "names, dtypes and shapes must be lists"),
    (
        "/update_weights_from_distributed",
        {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]},
        "must run between begin_weight_update() and end_weight_update()",
    ),
    ("/destroy_weights_update_group", {}, "The group to be destroyed does not exist."),
    ("/init_weights_update_group", {"master_address": "127.0.0.1"}, "master_port is missing; it must be an integer"),
    (
        "/init_weights_update_group",
        {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 0, "world_size": 2},
        "rank_offset is 0; it must be between 1 and world_size - 1 = 1",
    ),
    (
        "/init_weights_update_group",
        {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "carrier"},
        "backend 'carrier' is not available here",
    ),
]


async def test_bad_control_bodies_are_refused_with_a_sentence_that_names_the_field(client: Client) -> None:
    for path, body, sentence in BAD_CONTROL:
        answer = await client.post(path, body)
        assert (answer.status, answer.body["success"]) == (400, False), (path, body)
        assert sentence in answer.message, (path, body)


async def test_the_server_tells_what_it_serves(client: Client, model_a: str) -> None:
    info = (await client.get("/model_info")).body
    assert (info["model_path"], info["weight_version"], info["is_generation"]) == (model_a, "v0", True)
    assert (await client.get("/get_model_info")).body == info
    (card,) = (await client.get("/v1/models")).body["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 8192)
    server_info = (await client.get("/server_info")).body
    assert server_info["internal_states"][0]["is_paused"] is False
    assert "api_key" not in server_info


async def test_it_is_healthy_also_while_it_is_paused(client: Client) -> None:
    assert (await client.get("/health")).status == 200
    assert (await client.get("/health_generate")).status == 200
    await client.post("/pause_generation", {"mode": "in_place"})
    assert (await client.get("/health")).status == 200
    assert (await client.get("/health_generate")).status == 200


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/generate", 405)])
async def test_a_wrong_path_or_method_is_answered_in_json(client: Client, method: str, path: str, status: int) -> None:
    async with client.session.request(method, path) as response:
        assert response.status == status
        assert "detail" in await response.json()

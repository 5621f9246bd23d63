"""Pausing, flushing, weight updates in flight, and what the server tells of itself."""

from __future__ import annotations

import asyncio
from typing import Any

from protocol_client import DEADLINE_S, Client

PROMPT = [10, 11, 12, 13]
SHORT = {"max_new_tokens": 4, "ignore_eos": True}
ENDLESS = {"max_new_tokens": 8000, "ignore_eos": True}


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


async def test_renaming_the_weights_need_not_abort_what_runs(client: Client) -> None:
    running = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=ENDLESS))
    await client.until_running(1)
    answer = await client.post("/update_weight_version", {"new_version": "v9", "abort_all_requests": False})
    assert answer.body == {"success": True, "message": "Weight version updated to v9", "new_version": "v9"}
    assert not running.done()
    await client.post("/update_weight_version", {"new_version": "v0"})  # aborts by default, as SGLang's does
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"


DISK, GROUP, SENT = "/update_weights_from_disk", "/init_weights_update_group", "/update_weights_from_distributed"
AT = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
ONE = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}
BAD_CONTROL: list[tuple[str, dict[str, Any], str]] = [
    ("/pause_generation", {"mode": "nicely"}, "mode is \"nicely\"; it must be 'in_place', 'retract' or 'abort'"),
    ("/abort_request", {"rid": 5}, "rid is 5; it must be a string"),
    ("/classify", {"input_ids": [1]}, "this server has a language model; /classify is for reward models"),
    (DISK, {}, "model_path is missing"),
    (DISK, {"model_path": "relative/x"}, "send the absolute path"),
    (DISK, {"model_path": "/nonexistent"}, "'/nonexistent', which is not a directory"),
    (DISK, {"model_path": "/", "load_format": "dummy"}, 'load_format is "dummy"; it must be'),
    (DISK, {"model_path": "/", "manifest": {"a": 1}}, 'manifest (here {"a": 1})'),
    ("/update_weight_version", {}, "new_version is missing"),
    ("/end_weight_update", {}, "no weight-update session is open"),
    (SENT, {}, "names is missing"),
    (SENT, {**ONE, "names": ["a", "b"]}, "names, dtypes and shapes have 2, 1 and 1 entries"),
    (SENT, {**ONE, "shapes": [[-1]]}, "shapes[0][0] is -1; it must be at least 0"),
    (SENT, ONE, "must run between begin_weight_update() and end_weight_update()"),
    ("/destroy_weights_update_group", {}, "The group to be destroyed does not exist."),
    (GROUP, {"master_address": "127.0.0.1"}, "master_port is missing"),
    (GROUP, {**AT, "rank_offset": 0}, "rank_offset is 0; it must be between 1 and world_size - 1 = 1"),
    (GROUP, {**AT, "backend": "carrier"}, "backend 'carrier' is not available here"),
    ("/load_lora_adapter", {"lora_name": "", "lora_path": "/x"}, 'lora_name is ""; it must be'),
]


async def test_bad_control_bodies_are_refused_with_a_sentence_that_names_the_field(client: Client) -> None:
    for path, body, sentence in BAD_CONTROL:
        answer = await client.post(path, body)
        assert answer.status == 400, (path, body)
        assert sentence in answer.message, (path, body)


async def test_the_server_tells_what_it_serves(client: Client, model_a: str) -> None:
    info = (await client.get("/model_info")).body
    assert (info["model_path"], info["weight_version"], info["vocab_size"]) == (model_a, "v0", 288)
    (card,) = (await client.get("/v1/models")).body["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 8192)
    server_info = (await client.get("/server_info")).body
    assert server_info["internal_states"][0]["is_paused"] is False
    assert "api_key" not in server_info


async def test_it_is_healthy_also_while_it_is_paused(client: Client) -> None:
    assert (await client.get("/health_generate")).status == 200
    await client.post("/pause_generation", {"mode": "in_place"})
    for path in ("/health", "/health_generate"):
        assert (await client.get(path)).status == 200

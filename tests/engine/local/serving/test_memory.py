"""Memory that the embedded server lets go of: what it refuses meanwhile, and what it reports."""

import asyncio
from typing import Any

from protocol_client import Client

from arl.api.settings.engines import RELEASED

SAMPLING = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}


async def state_of(client: Client) -> dict[str, Any]:
    return (await client.get("/server_info")).body["internal_states"][0]


async def told(client: Client, path: str, status: int = 200, **body: Any) -> str:
    answer = await client.post(path, body)
    assert answer.status == status, answer.body
    return "" if status == 200 else answer.body["message"]


async def load(client: Client, directory: str, status: int = 200) -> str:
    return await told(client, "/update_weights_from_disk", status, model_path=directory, weight_version="v1")


async def test_it_reports_what_it_holds_and_a_request_waits_until_all_is_back(client: Client, model_b: str):
    before = await state_of(client)
    assert (before["released"], min(before["held_bytes"].values()) > 0) == ([], True)
    await told(client, "/release_memory_occupation")
    await told(client, "/release_memory_occupation", tags=["weights"])
    state = await state_of(client)
    assert (state["released"], set(state["held_bytes"].values())) == (["kv_cache", "weights"], {0})
    assert (await client.get("/model_info")).body["weight_version"] == RELEASED
    asking = asyncio.create_task(client.generate(input_ids=[1, 2, 3], sampling_params=SAMPLING))
    await client.until_waiting(1)
    await told(client, "/resume_memory_occupation", tags=["weights"])
    await load(client, model_b)
    assert (await state_of(client))["num_waiting_reqs"] == 1
    await told(client, "/resume_memory_occupation")
    assert (await asking)["meta_info"]["weight_version"] == "v1"
    assert (await state_of(client))["held_bytes"]["weights"] == before["held_bytes"]["weights"]


async def test_weights_without_their_memory_are_refused(client: Client, model_b: str):
    await told(client, "/release_memory_occupation")
    assert "call /resume_memory_occupation before loading" in await load(client, model_b, 400)
    await told(client, "/resume_memory_occupation")
    await load(client, model_b)


async def test_running_requests_keep_their_memory(client: Client, model_a: str):
    body = {"input_ids": [1, 2, 3], "sampling_params": {**SAMPLING, "max_new_tokens": 4000}}
    asking = asyncio.create_task(client.generate(**body))
    await client.until_running(1)
    await told(client, "/pause_generation", mode="in_place")
    message = await told(client, "/release_memory_occupation", 400)
    assert message.startswith("1 requests are running: pause generation in mode abort or retract")
    assert (await state_of(client))["released"] == []
    await told(client, "/pause_generation", mode="abort")
    await asking


async def test_what_is_no_part_of_its_memory_is_refused(client: Client):
    assert "cuda_graph" in await told(client, "/release_memory_occupation", 400, tags=["cuda_graph"])

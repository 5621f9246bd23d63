"""Trainers that break off while they broadcast weights over gloo. tests/conformance has those that do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch.distributed as dist
from embedded_server import free_port, server_process
from protocol_client import Client
from safetensors.torch import load_file

from arl.engine.local.received_weights import GroupAddress, join_group

GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def impatient_url(model_a: str) -> Iterator[str]:
    """A server that waits 2 s for a trainer. Server and trainer cannot be one process: both name the group."""
    with server_process(model_a, "--weight-version", "v0", "--update-timeout-s", "2") as server:
        yield server.url


@pytest.fixture
async def client(impatient_url: str) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(impatient_url) as session:
        yield Client(session)


def joining(port: int, group: str) -> dict[str, Any]:
    address = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    return {**address, "group_name": group, "backend": "gloo"}


def announcing(model: str, group: str) -> dict[str, Any]:
    tensors = load_file(Path(model, "model.safetensors"))
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": group,
        "weight_version": "v1",
    }


async def greedy(client: Client) -> list[float]:
    """The logprobs of a greedy answer: other weights give others, even where they choose the same tokens."""
    answer = await client.generate(input_ids=[10, 11, 12, 13], sampling_params=GREEDY, return_logprob=True)
    return [round(logprob, 3) for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]


@pytest.mark.parametrize("behaviour", ["stalls", "leaves"])
async def test_a_trainer_that_breaks_off_costs_an_error_and_nothing_is_applied(
    client: Client, model_b: str, behaviour: str
) -> None:
    port, before = free_port(), await greedy(client)
    at = GroupAddress(address="127.0.0.1", port=port, rank=0, world_size=2, name=behaviour, backend="gloo")
    trainer = asyncio.create_task(asyncio.to_thread(join_group, at, timedelta(seconds=60)))
    assert (await client.post("/init_weights_update_group", joining(port, behaviour))).status == 200
    group = await trainer
    assert (await client.post("/begin_weight_update")).status == 200
    update = announcing(model_b, behaviour)
    receiving = asyncio.create_task(client.post("/update_weights_from_distributed", update))
    tensors = list(load_file(Path(model_b, "model.safetensors")).values())
    for tensor in tensors[: len(tensors) // 2]:
        await asyncio.to_thread(dist.broadcast, tensor, group_src=0, group=group)
    if behaviour == "leaves":
        dist.destroy_process_group(group)
    assert await greedy(client) == before  # while it waits for the trainer, it generates
    failed = await receiving
    assert (failed.status, failed.body["success"]) == (400, False)
    assert f"receiving from the group {behaviour!r} failed" in failed.message
    ended = await client.post("/end_weight_update")
    assert (ended.status, ended.message.startswith("nothing was applied")) == (400, True)
    assert (await client.get("/model_info")).body["weight_version"] == "v0"
    assert await greedy(client) == before
    if behaviour == "stalls":
        dist.destroy_process_group(group)


async def test_a_trainer_that_never_comes_costs_an_error(client: Client) -> None:
    answer = await client.post("/init_weights_update_group", joining(free_port(), "nobody"))
    assert answer.status == 400
    assert "cannot join the group at 127.0.0.1" in answer.message


async def test_an_update_that_names_no_joined_group_spoils_its_transaction(client: Client, model_b: str) -> None:
    assert (await client.post("/begin_weight_update")).status == 200
    answer = await client.post("/update_weights_from_distributed", announcing(model_b, "nobody"))
    assert (answer.status, answer.message.partition(";")[0]) == (400, "no group 'nobody'")
    assert (await client.post("/end_weight_update")).status == 400
    assert (await client.get("/model_info")).body["weight_version"] == "v0"

"""Weights that a trainer broadcasts over gloo, and trainers that break."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from protocol_client import Client
from safetensors.torch import load_file
from server_process import environment, running_server

GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def impatient_url(model_a: str) -> Iterator[str]:
    """A server that waits 3 s for a trainer."""
    with running_server(model_a, "--weight-version", "v0", "--update-timeout-s", "3") as server:
        yield server.url


@pytest.fixture
async def client(impatient_url: str) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(impatient_url) as session:
        yield Client(session)


@contextmanager
def broadcaster(port: int, group: str, model: str, behaviour: str) -> Iterator[subprocess.Popen[str]]:
    script = Path(__file__).with_name("broadcaster.py")
    process = subprocess.Popen(
        [sys.executable, str(script), str(port), group, model, behaviour],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def send(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


async def until_listening(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


def joining(port: int, group: str) -> dict[str, Any]:
    address = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    return {**address, "group_name": group, "backend": "gloo"}


def announcing(model: str, group: str, **more: Any) -> dict[str, Any]:
    tensors = load_file(Path(model, "model.safetensors"))
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": group,
        "flush_cache": False,
        **more,
    }


async def greedy(client: Client) -> list[float]:
    """The logprobs of a greedy answer: other weights give others, even where they choose the same tokens."""
    answer = await client.generate(input_ids=[10, 11, 12, 13], sampling_params=GREEDY, return_logprob=True)
    return [round(logprob, 3) for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]


async def test_broadcast_weights_are_applied_at_the_end_of_the_transaction_and_not_before(
    client: Client, model_a: str, model_b: str
) -> None:
    port, group = free_port(), "whole"
    before = await greedy(client)
    with broadcaster(port, group, model_b, "whole") as trainer:
        await until_listening(port)
        joined = await client.post("/init_weights_update_group", joining(port, group))
        assert joined.body["success"], joined.body
        assert (await client.post("/begin_weight_update")).body["success"]
        send(trainer)
        update = announcing(model_b, group, weight_version="v1")
        received = await client.post("/update_weights_from_distributed", update)
        assert received.body["success"], received.body
        assert await greedy(client) == before
        assert (await client.post("/end_weight_update")).body["success"]
        assert (await client.get("/model_info")).body["weight_version"] == "v1"
        assert await greedy(client) != before
        assert (await client.post("/destroy_weights_update_group", {"group_name": group})).body["success"]
    await client.post("/update_weights_from_disk", {"model_path": model_a, "weight_version": "v0"})
    assert await greedy(client) == before


@pytest.mark.parametrize("behaviour", ["stall", "die"])
async def test_a_trainer_that_breaks_off_costs_an_error_and_nothing_is_applied(
    client: Client, model_b: str, behaviour: str
) -> None:
    port, group = free_port(), behaviour
    before = await greedy(client)
    with broadcaster(port, group, model_b, behaviour) as trainer:
        await until_listening(port)
        assert (await client.post("/init_weights_update_group", joining(port, group))).status == 200
        assert (await client.post("/begin_weight_update")).status == 200
        send(trainer)
        receiving = asyncio.create_task(
            client.post("/update_weights_from_distributed", announcing(model_b, group, weight_version="v1"))
        )
        assert await greedy(client) == before  # while it waits for the trainer, it generates
        failed = await receiving
    assert (failed.status, failed.body["success"]) == (400, False)
    assert f"receiving from the group {group!r} failed" in failed.message
    ended = await client.post("/end_weight_update")
    assert (ended.status, ended.message.startswith("nothing was applied")) == (400, True)
    assert (await client.get("/model_info")).body["weight_version"] == "v0"
    assert await greedy(client) == before


async def test_a_trainer_that_never_comes_costs_an_error(client: Client) -> None:
    answer = await client.post("/init_weights_update_group", joining(free_port(), "nobody"))
    assert answer.status == 400
    assert "cannot join the group at 127.0.0.1" in answer.message


async def test_an_update_that_names_no_joined_group_spoils_its_transaction(client: Client, model_b: str) -> None:
    assert (await client.post("/begin_weight_update")).status == 200
    again = await client.post("/begin_weight_update")
    assert (again.status, again.message.partition(";")[0]) == (400, "a weight-update session is already open")
    answer = await client.post("/update_weights_from_distributed", announcing(model_b, "nobody"))
    assert (answer.status, answer.message.partition(";")[0]) == (400, "no group 'nobody'")
    assert (await client.post("/end_weight_update")).status == 400
    assert (await client.get("/model_info")).body["weight_version"] == "v0"

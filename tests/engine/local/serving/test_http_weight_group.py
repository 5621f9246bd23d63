"""Trainers that break off while they broadcast weights over gloo. tests/conformance has those that do not."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import torch
from embedded_server import server_process
from free_port import free_port
from protocol_client import Client
from reference import logprobs_of
from safetensors.torch import load_file
from weight_trainer import joining, succeeds, trainer_of

GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def impatient_url(model_a: str) -> Iterator[str]:
    """A server that waits 2 s for a trainer. It is a process: torch lets nobody join a group twice from one."""
    with server_process(model_a, "--weight-version", "v0", "--update-timeout-s", "2") as server:
        yield server.address


@pytest.fixture
async def client(impatient_url: str) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(impatient_url) as session:
        yield Client(session)


@pytest.fixture(scope="module")
def tensors(model_b: str) -> dict[str, torch.Tensor]:
    return load_file(Path(model_b, "model.safetensors"))


async def greedy(client: Client) -> list[float]:
    """The logprobs of a greedy answer: other weights give others, even where they choose the same tokens."""
    answer = await client.generate(input_ids=[10, 11, 12, 13], sampling_params=GREEDY, return_logprob=True)
    return [round(logprob, 3) for logprob in logprobs_of(answer)]


async def test_a_server_leaves_a_group_at_once_while_it_waits_in_it(
    client: Client, tensors: dict[str, torch.Tensor]
) -> None:
    async with trainer_of(client) as trainer:
        await succeeds(client, "/begin_weight_update")
        receiving = trainer.announce(tensors, weight_version="v1")
        await greedy(client)  # by then it waits
        leaving = await client.post("/destroy_weights_update_group", {"group_name": trainer.name})
        failed = await receiving
        assert (failed.status, leaving.status) == (400, 400)
        assert "the group was left meanwhile" in failed.message
        assert "does not exist" in leaving.message  # the call that failed has left it
        trainer.leave()
    async with trainer_of(client) as trainer:
        await succeeds(client, "/begin_weight_update")
        await trainer.send(tensors, weight_version="v1")
        await succeeds(client, "/destroy_weights_update_group", {"group_name": trainer.name})
        trainer.leave()


@pytest.mark.parametrize("behaviour", ["stalls", "leaves"])
async def test_a_trainer_that_breaks_off_costs_an_error_and_nothing_is_applied(
    client: Client, tensors: dict[str, torch.Tensor], behaviour: str
) -> None:
    before = await greedy(client)
    async with trainer_of(client) as trainer:
        await succeeds(client, "/begin_weight_update")
        names = sorted(tensors)
        await trainer.send({name: tensors[name] for name in names[:5]}, weight_version="v1")
        receiving = trainer.announce({name: tensors[name] for name in names[5:]}, weight_version="v1")
        if behaviour == "leaves":
            trainer.leave()
        assert await greedy(client) == before  # while it waits for the trainer, it generates
        failed = await receiving
        assert (failed.status, failed.body["success"]) == (400, False)
        assert f"receiving from the group {trainer.name!r} failed" in failed.message
        if behaviour == "stalls":
            trainer.leave()
    ended = await client.post("/end_weight_update")
    assert (ended.status, ended.message.startswith("nothing was applied")) == (400, True)
    assert (await client.get("/model_info")).body["weight_version"] == "v0"
    assert await greedy(client) == before


async def test_a_trainer_that_never_comes_costs_an_error(client: Client) -> None:
    answer = await client.post("/init_weights_update_group", joining(free_port(), "nobody"))
    assert answer.status == 400
    assert "cannot join the group at 127.0.0.1" in answer.message

"""New weights and released memory: what is read, what is refused, and trainers that break off while they broadcast.

tests/conformance has the updates that succeed.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from embedded_server import server_process
from free_port import free_port
from protocol_client import Client
from reference import logprobs_of
from safetensors.torch import load_file, save_file
from weight_trainer import joining, succeeds, trainer_of

from arl.api.settings.engines import RELEASED
from arl.engine.local.weight_receiver import WeightsError, read_directory

GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
TENSORS = {"embed": torch.arange(6.0).reshape(2, 3), "norm": torch.ones(3)}
SHAPES = {name: tensor.shape for name, tensor in TENSORS.items()}
INDEX = "model.safetensors.index.json"


def write(directory: Path, tensors: dict[str, torch.Tensor]) -> str:
    save_file(tensors, directory / "model.safetensors")
    return str(directory)


def test_one_file_is_read_as_it_is_and_what_was_read_does_not_change_with_it(tmp_path: Path) -> None:
    read = read_directory(write(tmp_path, TENSORS), SHAPES)
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(b"\xff" * file.stat().st_size)
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


def test_shards_are_read_together(tmp_path: Path) -> None:
    for i, (name, tensor) in enumerate(TENSORS.items()):
        save_file({name: tensor}, tmp_path / f"{i}.safetensors")
    weight_map = {name: f"{i}.safetensors" for i, name in enumerate(TENSORS)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    read = read_directory(str(tmp_path), SHAPES)
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


def test_a_tied_output_layer_may_be_stored_once_more(tmp_path: Path) -> None:
    directory = write(tmp_path, {**TENSORS, "lm_head.weight": torch.zeros(2, 3)})
    assert read_directory(directory, SHAPES, tied={"lm_head.weight"}).keys() == TENSORS.keys()
    with pytest.raises(WeightsError, match=r"the served model has no lm_head\.weight"):
        read_directory(directory, SHAPES)


def write_file(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(content)


REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (lambda at: write(at, {"embed": TENSORS["embed"]}), "lacks norm, which the served model has"),
    (lambda at: write(at, {**TENSORS, "norm": torch.ones(4)}), r"norm has shape \[4\]; the served model's has \[3\]"),
    (lambda at: None, r"holds neither model\.safetensors nor"),
    (write_file(INDEX, b"{bad"), "is not an index of weight files"),
    (write_file(INDEX, b"{}"), "is not an index of weight files"),
    (write_file(INDEX, b"[]"), "is not an index of weight files"),
    (write_file("model.safetensors", b"\x10" + bytes(7) + b"not a header"), r"cannot read .*model\.safetensors"),
]


@pytest.mark.parametrize(("prepare", "sentence"), REFUSED)
def test_what_cannot_be_loaded_is_refused_with_a_reason(
    tmp_path: Path, prepare: Callable[[Path], object], sentence: str
) -> None:
    prepare(tmp_path)
    with pytest.raises(WeightsError, match=sentence):
        read_directory(str(tmp_path), SHAPES)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    shapes = {f"layer{i}": torch.Size([1]) for i in range(8)}
    with pytest.raises(WeightsError, match="lacks layer0, layer1, layer2, layer3, layer4 and 3 more"):
        read_directory(write(tmp_path, {}), shapes)


# Memory


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
    asking = asyncio.create_task(client.generate(input_ids=[1, 2, 3], sampling_params=GREEDY))
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
    body = {"input_ids": [1, 2, 3], "sampling_params": {**GREEDY, "max_new_tokens": 4000}}
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


# Trainers that broadcast


@pytest.fixture(scope="module")
def impatient_url(model_a: str) -> Iterator[str]:
    """A server that waits 2 s for a trainer. It is a process: torch lets nobody join a group twice from one."""
    with server_process(model_a, "--weight-version", "v0", "--update-timeout-s", "2") as server:
        yield server.address


@pytest.fixture
async def impatient(impatient_url: str) -> AsyncIterator[Client]:
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
    impatient: Client, tensors: dict[str, torch.Tensor]
) -> None:
    async with trainer_of(impatient) as trainer:
        await succeeds(impatient, "/begin_weight_update")
        receiving = trainer.announce(tensors, weight_version="v1")
        await greedy(impatient)  # by then it waits, unless the announcement was on its way for longer
        leaving = await impatient.post("/destroy_weights_update_group", {"group_name": trainer.name})
        failed = await receiving
        assert failed.status == 400
        if leaving.status == 200:
            assert "must run between" in failed.message  # leaving discards the transaction
        else:
            assert "the group was left meanwhile" in failed.message
            assert "does not exist" in leaving.message  # the call that failed has left it
        trainer.leave()
    async with trainer_of(impatient) as trainer:
        await succeeds(impatient, "/begin_weight_update")
        await trainer.send(tensors, weight_version="v1")
        await succeeds(impatient, "/destroy_weights_update_group", {"group_name": trainer.name})
        trainer.leave()


@pytest.mark.parametrize("behaviour", ["stalls", "leaves"])
async def test_a_trainer_that_breaks_off_costs_an_error_and_nothing_is_applied(
    impatient: Client, tensors: dict[str, torch.Tensor], behaviour: str
) -> None:
    before = await greedy(impatient)
    async with trainer_of(impatient) as trainer:
        await succeeds(impatient, "/begin_weight_update")
        names = sorted(tensors)
        await trainer.send({name: tensors[name] for name in names[:5]}, weight_version="v1")
        receiving = trainer.announce({name: tensors[name] for name in names[5:]}, weight_version="v1")
        if behaviour == "leaves":
            trainer.leave()
        assert await greedy(impatient) == before  # while it waits for the trainer, it generates
        failed = await receiving
        assert (failed.status, failed.body["success"]) == (400, False)
        assert f"receiving from the group {trainer.name!r} failed" in failed.message
        if behaviour == "stalls":
            trainer.leave()
    ended = await impatient.post("/end_weight_update")
    assert (ended.status, ended.message.startswith("nothing was applied")) == (400, True)
    assert (await impatient.get("/model_info")).body["weight_version"] == "v0"
    assert await greedy(impatient) == before


async def test_a_trainer_that_never_comes_costs_an_error(impatient: Client) -> None:
    answer = await impatient.post("/init_weights_update_group", joining(free_port(), "nobody"))
    assert answer.status == 400
    assert "cannot join the group at 127.0.0.1" in answer.message

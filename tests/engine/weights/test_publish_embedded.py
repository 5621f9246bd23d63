"""From a snapshot of the trainer to embedded servers that are generating, and what their tokens are of."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import torch
from embedded_server import ServerProcess
from mirrors import mirror_here
from published import Trainee, client, request

from arl.api.engine import WeightTransport
from arl.api.engine_config import DeltaWeightsConfig, DiskWeightsConfig, DistributedWeightsConfig, PauseMode
from arl.api.errors import TransportError
from arl.api.types import ModelResponse
from arl.engine.fsdp.snapshot import ShardGatherer
from arl.engine.weights.delta import DeltaTransport
from arl.engine.weights.disk import DiskTransport
from arl.engine.weights.distributed import DistributedTransport


@pytest.fixture
async def transport(
    request: pytest.FixtureRequest, tmp_path: Path, first: ServerProcess
) -> AsyncIterator[DiskTransport | DistributedTransport]:
    """By the name of its kind."""
    directory = tmp_path / "weights"
    async with mirror_here(tmp_path / "mirror") as mirror:
        match request.param:
            case "disk":
                transport = DiskTransport(DiskWeightsConfig(directory=directory), tmp_path)
            case "delta":
                config = DeltaWeightsConfig(mirrors={first.address: mirror.address}, directory=directory)
                transport = DeltaTransport(config, tmp_path)
            case _:
                transport = DistributedTransport(DistributedWeightsConfig(), bucket_bytes=20_000)
        yield transport
        transport.close()


async def until_running(address: str, count: int) -> None:
    async with aiohttp.ClientSession(address) as session, asyncio.timeout(30):
        while True:
            async with session.get("/server_info") as answer:
                if (await answer.json())["internal_states"][0]["num_running_reqs"] >= count:
                    return


@pytest.mark.parametrize(
    ("transport", "mode"),
    [
        ("disk", "abort"),
        ("delta", "in_place"),
        ("distributed", "in_place"),
        ("distributed", "retract"),
        ("distributed", "abort"),
    ],
    indirect=["transport"],
)
async def test_every_token_is_of_the_weights_that_its_version_names(
    trainer: Trainee, transport: WeightTransport, first: ServerProcess, mode: PauseMode
):
    updates = [transport.snapshot(trainer.engine)]
    for _ in range(3):
        trainer.train()
        updates.append(transport.snapshot(trainer.engine))
    async with client(first, pause_mode=mode) as engine, asyncio.TaskGroup() as group:
        await transport.deliver(updates[0], engine)
        calls = [group.create_task(engine.agenerate(request(600, seed))) for seed in range(3)]
        for update in updates[1:]:
            await until_running(first.address, 1)
            await transport.deliver(update, engine)
    responses: list[ModelResponse] = [call.result() for call in calls]
    assert any(len(set(response.output_versions)) > 2 for response in responses)
    for seed, response in enumerate(responses):
        assert len(response.output_ids) == 600
        assert list(response.output_versions) == sorted(response.output_versions)
        # What comes after an update in place rests on keys and values of old weights, and is of no version alone.
        upto = response.output_versions.count(response.output_versions[0]) if mode == "in_place" else None
        trainer.assert_of_its_versions(response, seed, upto)


@pytest.mark.parametrize("transport", ["disk", "delta", "distributed"], indirect=True)
async def test_weights_that_cannot_be_put_together_leave_the_servers_as_they_were_and_the_next_are_published(
    trainer: Trainee, transport: WeightTransport, first: ServerProcess, monkeypatch: pytest.MonkeyPatch
):
    def fail(*args: object) -> torch.Tensor:
        raise MemoryError("no memory")

    async with client(first) as engine:
        await transport.deliver(transport.snapshot(trainer.engine), engine)
        trainer.train()
        with monkeypatch.context() as patch:
            patch.setattr(ShardGatherer, "_whole", fail)
            with pytest.raises(TransportError, match="no memory"):
                await transport.deliver(transport.snapshot(trainer.engine), engine)
        assert (engine.version, engine.counters()["servers/serving"]) == (0, 1)
        trainer.assert_of_its_versions(await engine.agenerate(request(20)))
        await transport.deliver(transport.snapshot(trainer.engine), engine)
        assert engine.version == 1

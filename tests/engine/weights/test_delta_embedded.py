"""From a real trainer over mirrors to embedded servers: what is served is the full export, to the bit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import torch
from mirrors import MirrorProcess
from published import EmbeddedServer, Trainee, client, prompt, request, trainee, write_model

from arl.api.config import DeltaWeightsConfig
from arl.engine.weights.delta import DeltaTransport


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[MirrorProcess]:
    mirror = MirrorProcess(tmp_path / "mirror")
    yield mirror
    mirror.kill()


@pytest.fixture
def transport(tmp_path: Path, mirror: MirrorProcess, first: EmbeddedServer) -> Iterator[DeltaTransport]:
    config = DeltaWeightsConfig(mirrors={first.address: mirror.address}, directory=tmp_path / "weights")
    transport = DeltaTransport(config, tmp_path)
    yield transport
    transport.close()


async def test_after_each_publish_servers_and_mirror_hold_the_full_export(
    transport: DeltaTransport, mirror: MirrorProcess, first: EmbeddedServer, tmp_path: Path
) -> None:
    sent: list[int] = []
    model = write_model(tmp_path / "model", dtype=torch.bfloat16)
    with trainee(model, tmp_path) as trainer:
        async with client(first) as engine:
            for version in range(3):
                update = transport.snapshot(trainer.engine)
                await transport.deliver(update, engine)
                response = await engine.agenerate(request(30))
                assert set(response.output_versions) == {version}
                if version:
                    trainer.assert_of_its_versions(response)
                trainer.engine.export(tmp_path / "export")
                assert mirror.files(version) == {p.name: p.read_bytes() for p in (tmp_path / "export").iterdir()}
                sent.append(update.num_bytes)
                trainer.train()
    assert mirror.versions == [1, 2]
    assert all(0 < later <= sent[0] / 2 for later in sent[1:])


@pytest.mark.slow
async def test_a_mirror_and_a_server_that_were_killed_come_back_with_the_current_weights(
    trainer: Trainee, transport: DeltaTransport, mirror: MirrorProcess, first: EmbeddedServer, second: EmbeddedServer
) -> None:
    async with client(first, second) as engine:
        await transport.deliver(transport.snapshot(trainer.engine), engine)
        mirror.kill()
        first.kill()
        trainer.train()
        await transport.deliver(transport.snapshot(trainer.engine), engine)  # the other server takes it
        assert engine.version == 1
        mirror.start()
        await asyncio.to_thread(first.start)
        await until_it_serves(first.address, "1")
    assert 1 in mirror.versions
    async with client(first) as engine:
        response = await engine.agenerate(request(30))
    torch.testing.assert_close(
        torch.tensor(response.output_logprobs), trainer.logprobs(prompt(), response)[1], rtol=1e-4, atol=1e-4
    )


async def until_it_serves(address: str, label: str) -> None:
    async with aiohttp.ClientSession(address) as session, asyncio.timeout(60):
        while True:
            async with session.get("/model_info") as answer:
                if (await answer.json())["weight_version"] == label:
                    return
            await asyncio.to_thread(time.sleep, 0.05)

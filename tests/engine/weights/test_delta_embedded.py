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
from published import PROMPT, EmbeddedServer, Trainee, trainee, write_model

from arl.api import ModelRequest, SamplingParams
from arl.api.config import ClientConfig, DeltaWeightsConfig
from arl.engine.client.sglang import RemoteSGLangEngine
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


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def any_trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trainee]:
    with trainee(write_model(tmp_path / "model", dtype=request.param), tmp_path) as made:
        yield made


def client(*servers: EmbeddedServer) -> RemoteSGLangEngine:
    return RemoteSGLangEngine([server.address for server in servers], ClientConfig(request_timeout_s=60.0))


def request(count: int = 30) -> ModelRequest:
    return ModelRequest(input_ids=PROMPT, sampling=SamplingParams(max_new_tokens=count, ignore_eos=True, seed=0))


async def test_after_each_publish_servers_and_mirror_hold_the_full_export(
    any_trainer: Trainee, transport: DeltaTransport, mirror: MirrorProcess, first: EmbeddedServer, tmp_path: Path
) -> None:
    sent: list[int] = []
    async with client(first) as engine:
        for version in range(4):
            update = transport.snapshot(any_trainer.engine)
            await transport.deliver(update, engine)
            response = await engine.agenerate(request())
            assert set(response.output_versions) == {version}
            if version:
                any_trainer.assert_of_its_versions(PROMPT, response)
            export = any_trainer.engine.export(tmp_path / "export") and tmp_path / "export"
            assert mirror.files(version) == {path.name: path.read_bytes() for path in export.iterdir()}
            sent.append(update.num_bytes)
            any_trainer.train()
    assert mirror.versions == [2, 3]
    if any_trainer.engine.snapshot().specs[0].dtype == "bfloat16":
        assert all(0 < later <= sent[0] / 2 for later in sent[1:])
    else:  # steps this large leave no number of float32 near what it was
        assert all(later >= sent[0] for later in sent[1:])


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
        response = await engine.agenerate(request())
    torch.testing.assert_close(
        torch.tensor(response.output_logprobs), trainer.logprobs(PROMPT, response)[1], rtol=1e-4, atol=1e-4
    )


async def until_it_serves(address: str, label: str) -> None:
    async with aiohttp.ClientSession(address) as session, asyncio.timeout(60):
        while True:
            async with session.get("/model_info") as answer:
                if (await answer.json())["weight_version"] == label:
                    return
            await asyncio.to_thread(time.sleep, 0.05)

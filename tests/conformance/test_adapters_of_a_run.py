"""Adapters through arl's own client: published beside requests that run, and trained, on each kind of server."""

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest
from agent_script import SayDigits
from conformance.conftest import Models, write_adapters
from conformance.test_server_lora import PROMPT
from protocol_client import Client
from reference import Reference, close
from servers import Server

from arl.api.engine import DiskWeights
from arl.api.settings.run import Config
from arl.api.types import ModelRequest, SamplingParams
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.run.launch import launch

SERVERS = [
    pytest.param("embedded", marks=pytest.mark.runs),
    pytest.param("sglang-lora", marks=pytest.mark.sglang),
    pytest.param("vllm-lora", marks=[pytest.mark.vllm, pytest.mark.timeout(300)]),
]
pytestmark = pytest.mark.parametrize("server", SERVERS, indirect=True)


async def test_arls_client_publishes_adapters_beside_requests_that_end_under_their_own(
    client: Client, server: Server, served: Models, tmp_path: Path
) -> None:
    written = write_adapters(tmp_path, served)
    references = {name: Reference(tmp_path / f"merged-{name}") for name in ("one", "two")}
    run = uuid.uuid4().hex[:8]
    # All are to run until the last has begun; stock servers take longer over a token.
    sampling = SamplingParams(max_new_tokens=1600 if server.kind == "embedded" else 400, ignore_eos=True)
    names = ("one", "two", "one", "two")
    async with RemoteInferenceEngine([server.url], server.config()) as engine:
        calls: list[asyncio.Task[Any]] = []
        async with asyncio.TaskGroup() as group:
            for version, name in enumerate(names):
                adapter = f"{run}-v{version}"
                update = DiskWeights(version=version, adapter=adapter, directory=written / name)
                assert (await engine.update_weights(update)).pause_s == 0
                request = ModelRequest(input_ids=(version, *PROMPT), sampling=sampling)
                calls.append(group.create_task(engine.agenerate(request)))
                await client.until_running(version + 1)
        loaded = await engine._pool.servers[0].client.adapters()
        assert {f"{run}-v{version}" for version in range(4)} <= loaded, "all were in use"
        await engine.update_weights(DiskWeights(version=4, adapter=f"{run}-v4", directory=written / "one"))
        async with asyncio.timeout(30):
            while {name for name in loaded if run in name} != {f"{run}-v3", f"{run}-v4"}:  # in the background
                loaded = await engine._pool.servers[0].client.adapters()
    async with RemoteInferenceEngine([server.url], server.config()) as engine:
        assert not any(run in name for name in await engine._pool.servers[0].client.adapters())
    for version, (name, call) in enumerate(zip(names, calls, strict=True)):
        response = call.result()
        assert response.output_versions == (version,) * sampling.max_new_tokens
        wanted = references[name].logprobs((version, *PROMPT), response.output_ids)
        close(response.output_logprobs, wanted, atol=2e-4)


async def test_a_training_of_adapters_sees_the_samplers_logprobs_again(
    client: Client, server: Server, served: Models, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "model": str(served.directory_a),
        "run_dir": tmp_path,
        "steps": 3,
        "engine": {"kind": "vllm" if server.kind == "vllm" else "sglang", "addresses": [server.url]},
        "rollout": {"batch_size": 2, "group_size": 4, "max_staleness": 0},
        "train": {"optimizer": {"lr": 0.01}, "lora": {"rank": 4}},
        "weights": {"transport": "adapter"},
        "log": {"console": False},
    }
    config = Config.model_validate(settings)
    async with launch(config, workflow=SayDigits(), dataset=[{"number": n} for n in range(9)]) as trainer:
        steps = [step async for step in trainer]
    assert [step.max_staleness_seen for step in steps] == [0, 0, 0]
    for step in steps:
        assert step.metrics["behavior_weight_max"] == pytest.approx(1.0, abs=1e-3)

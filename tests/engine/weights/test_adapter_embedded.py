"""From a trainer of adapters to embedded servers that are generating, and what their tokens are of."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_script import SayDigits
from embedded_server import server_here
from published import Trainee, request

from arl.api.config import Config
from arl.api.engine_config import AdapterWeightsConfig, ClientConfig, LoRAConfig, OptimizerConfig, TrainConfig
from arl.assembly import launch
from arl.engine.client.sglang import RemoteSGLangEngine
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.tiny import write_tiny_model
from arl.engine.weights.disk import DiskTransport


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    """Of this module alone: adapters belong to the weights that a server was started with."""
    with server_here(str(model)) as url:
        yield url


@pytest.fixture
def trainer(model: Path, tmp_path: Path) -> Iterator[Trainee]:
    torch.set_num_threads(1)
    config = TrainConfig(optimizer=OptimizerConfig(lr=0.1, eps=1e-3), lora=LoRAConfig(rank=4, alpha=8))
    engine = FSDPTrainEngine(model, config)
    yield Trainee(engine, tmp_path)
    engine.close()


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[DiskTransport]:
    transport = DiskTransport(AdapterWeightsConfig(directory=tmp_path / "weights"), tmp_path)
    yield transport
    transport.close()


async def test_every_token_is_of_the_adapter_that_its_version_names_while_others_are_published(
    trainer: Trainee, transport: DiskTransport, address: str
):
    updates = [transport.snapshot(trainer.engine)]
    for _ in range(3):
        trainer.train()
        updates.append(transport.snapshot(trainer.engine))
    async with RemoteSGLangEngine([address], ClientConfig()) as engine, asyncio.TaskGroup() as group:
        calls: list[asyncio.Task[Any]] = []
        for seed, update in enumerate(updates):
            stats = await transport.deliver(update, engine)
            assert stats.pause_s == 0
            calls.append(group.create_task(engine.agenerate(request(400, seed))))
            calls.append(group.create_task(engine.agenerate(request(1, seed))))
            await calls[-1]
            assert not calls[-2].done(), "it was to run while the next is published"
    for version, call in enumerate(calls[::2]):
        response = call.result()
        assert set(response.output_versions) == {version}
        trainer.assert_of_its_versions(response, version)


async def test_training_sees_the_samplers_logprobs_again(tmp_path: Path):
    settings = {
        "model": str(write_tiny_model(tmp_path / "model", ["Say a number"])),
        "run_dir": tmp_path / "run",
        "steps": 2,
        "rollout": {"batch_size": 2, "group_size": 4, "max_staleness": 0},
        "train": {"optimizer": {"lr": 0.01}, "lora": {"rank": 4}},
        "weights": {"transport": "adapter"},
        "log": {"console": False},
    }
    dataset = [{"number": n} for n in range(9)]
    async with launch(Config.model_validate(settings), workflow=SayDigits(), dataset=dataset) as trainer:
        seen = [step async for step in trainer]
    assert [step.version for step in seen] == [1, 2]
    for step in seen:
        assert step.max_staleness_seen == 0
        assert step.metrics["behavior_weight_max"] == pytest.approx(1.0, abs=1e-4)
        assert abs(step.metrics["behavior_kl_proximal"]) < 1e-6
        assert step.metrics["weights/pause_s"] == 0

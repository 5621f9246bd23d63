"""A run whose trainer's process is killed while its weights are on their way, and in between, with a real server.

The server gets each version from whichever process holds it, and the tokens that it samples are of the version that
they bear: sampler and trainer agree on their logprobs.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from embedded_server import ServerProcess, server_process
from engine.weights.loaders import mirror_here
from one_turn import OneTurn
from scripted_launch import small

import arl.run.launch
from arl.api.engine import InferenceEngine, WeightUpdate
from arl.api.events import Published, ServerFenced, ServerReturned, TrainerRecovered
from arl.api.settings.sections import laid_over
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.engine.weights.distributed import DistributedWeights
from arl.observe.events.run_record import read_run
from arl.training.metrics_log import read_jsonl
from arl.training.trainer import Trainer

STEPS = 6
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyShape(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16)
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", shape=shape)


@asynccontextmanager
async def served(model: Path, transport: str, directory: Path) -> AsyncIterator[tuple[ServerProcess, dict[str, Any]]]:
    """A server, and the settings of weights and training for it."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(server_process(str(model)))
        weights: dict[str, Any] = {"transport": transport}
        if transport == "delta":
            mirror = await stack.enter_async_context(mirror_here(directory / "mirror"))
            weights["mirrors"] = {server.address: mirror.address}
        yield server, {"weights": weights, "train": {"lora": {"rank": 4} if transport == "adapter" else None}}


def kill(trainer: Trainer) -> None:
    os.kill(trainer.learner._learner._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]


def kill_within_a_delivery(trainer: Trainer, version: int) -> None:
    """Before the servers are asked to load `version`; with `distributed` when it is sent, and the server is paused."""
    transport, is_done = trainer.transport, asyncio.Event()
    deliver = transport.deliver

    async def killing(update: WeightUpdate, engine: InferenceEngine) -> Any:
        if update.version == version and not is_done.is_set():
            is_done.set()
            if not isinstance(update, DistributedWeights):
                kill(trainer)
                return await deliver(update, engine)
            snapshot: Any = update.snapshot
            send = snapshot.send
            snapshot.send = lambda *arguments: (kill(trainer), send(*arguments))
        return await deliver(update, engine)

    transport.deliver = killing  # type: ignore[method-assign]


async def test_a_server_that_comes_back_gets_weights_whose_process_is_lost_though_no_step_can_follow(
    model: Path, tmp_path: Path
) -> None:
    async with served(model, "distributed", tmp_path) as (server, settings):
        given = {
            "model": str(model),
            "rollout": {"max_staleness": 0, "max_concurrent_episodes": 8},
            "engine": {"kind": "sglang", "addresses": [server.address]},
        }
        config = small(tmp_path / "run", **laid_over(given, settings))
        async with arl.run.launch.launch(
            config, workflow=OneTurn(), dataset=[{"number": n} for n in range(9)]
        ) as trainer:
            async for step in trainer:
                if step.version == 1:
                    kill(trainer)
                    server.kill()
                    await asyncio.to_thread(server.start)
    run = read_run(tmp_path / "run")
    published = [record.version for _, record in run.system if isinstance(record, Published)]
    assert published == [0, 1, 1, 2]


@pytest.mark.parametrize("transport", ["disk", "distributed", "delta", "adapter"])
async def test_servers_get_every_version_from_whichever_process_holds_it(
    model: Path, tmp_path: Path, transport: str
) -> None:
    async with served(model, transport, tmp_path) as (server, settings):
        given = {
            "model": str(model),
            "steps": STEPS,
            "rollout": {"group_size": 4, "max_staleness": 0, "max_concurrent_episodes": 8},
            "engine": {"kind": "sglang", "addresses": [server.address]},
            "checkpoint": {"every": 3},
            "train": {"optimizer": {"lr": 1e-2}},
        }
        config = small(tmp_path / "run", **laid_over(given, settings))
        workflow = OneTurn(lambda first: {"reward": float(first % 2)})
        examples = [{"number": n} for n in range(64)]
        async with arl.run.launch.launch(config, workflow=workflow, dataset=examples) as trainer:
            kill_within_a_delivery(trainer, 4)
            async for step in trainer:
                if step.version == 2:
                    kill(trainer)
    rows, run = read_jsonl(tmp_path / "run" / "metrics.jsonl"), read_run(tmp_path / "run")
    assert [row["version"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["behavior_kl_proximal"] for row in rows) < 1e-3
    assert max(row["grad_norm"] for row in rows) > 0
    records = [record for _, record in run.system]
    assert [r.version for r in records if isinstance(r, Published)] == list(range(STEPS + 1))
    assert [r.version for r in records if isinstance(r, TrainerRecovered)] == [2, 4]
    fences = [record.reason for record in records if isinstance(record, ServerFenced)]
    assert len(fences) == (transport == "distributed"), (
        "a server that loads from a dead process is paused till the next"
    )
    assert sum(isinstance(record, ServerReturned) for record in records) == len(fences)

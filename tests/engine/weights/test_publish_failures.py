"""Publishes that break off half-way: other servers go on, and no token is ever of weights that are of no version."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import pytest
from embedded_server import ServerProcess
from published import HookedEngine, Trainee, client, request

from arl.api.engine_config import DistributedWeightsConfig
from arl.api.types import ModelResponse
from arl.engine.client.sglang import RemoteSGLangEngine
from arl.engine.weights.distributed import DistributedTransport


@asynccontextmanager
async def patient(*servers: ServerProcess, **settings: float) -> AsyncIterator[RemoteSGLangEngine]:
    async with asyncio.timeout(90), client(*servers, pause_mode="abort", max_retries=20, **settings) as engine:
        yield engine


@asynccontextmanager
async def busy(engine: RemoteSGLangEngine, trainer: Trainee) -> AsyncIterator[None]:
    """Requests on all servers while the block runs; afterwards each token is checked against the version it bears."""
    is_over = asyncio.Event()

    async def ask(seed: int) -> None:
        while not is_over.is_set():
            response = await engine.agenerate(request(60, seed))
            trainer.assert_of_its_versions(response, seed)

    async with asyncio.TaskGroup() as group:
        for seed in range(4):
            group.create_task(ask(seed))
        yield
        is_over.set()


async def until_served(server: ServerProcess, version: int) -> ModelResponse:
    """An answer of this server by itself, once it calls its weights this version."""
    async with patient(server) as alone:
        while True:
            response = await alone.agenerate(request(20, 9))
            if set(response.output_versions) == {version}:
                return response


@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_server_that_dies_or_stalls_between_two_buckets_costs_the_others_nothing_and_comes_back_whole(
    trainer: Trainee, first: ServerProcess, second: ServerProcess, is_killed: bool
):
    def break_off_at_the_second_bucket(address: str, start: int) -> None:
        if start and address == second.address:
            second.process.send_signal(signal.SIGKILL if is_killed else signal.SIGSTOP)

    hooked = HookedEngine(trainer)
    with closing(DistributedTransport(DistributedWeightsConfig(), bucket_bytes=20_000)) as transport:
        async with patient(first, second, update_timeout_s=30.0 if is_killed else 3.0) as engine:
            await transport.deliver(transport.snapshot(hooked), engine)
            trainer.train()
            hooked.before_send = break_off_at_the_second_bucket
            async with busy(engine, trainer):
                try:
                    await transport.deliver(transport.snapshot(hooked), engine)
                    hooked.before_send = lambda address, start: None
                    assert engine.version == 1
                    for seed in range(8):
                        await engine.agenerate(request(20, seed))
                finally:
                    if is_killed:
                        await asyncio.to_thread(second.kill)
                        await asyncio.to_thread(second.start)
                    else:
                        second.process.send_signal(signal.SIGCONT)
                trainer.assert_of_its_versions(await until_served(second, 1), 9)

"""Publishes that break off half-way: other servers go on, and no token is ever of weights that are of no version."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import aiohttp
import pytest
from embedded_server import ServerProcess
from published import HookedEngine, Trainee, client, request

from arl.api.engine_config import DistributedWeightsConfig
from arl.api.errors import ServerError
from arl.api.types import ModelResponse
from arl.engine.client.server_client import ServerClient
from arl.engine.client.sglang import RemoteSGLangEngine
from arl.engine.weights.distributed import DistributedTransport


@asynccontextmanager
async def patient(*servers: ServerProcess, version: int = 0, **settings: float) -> AsyncIterator[RemoteSGLangEngine]:
    given = {"pause_mode": "abort", "max_retries": 20, **settings}
    async with asyncio.timeout(90), client(*servers, version=version, **given) as engine:
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
    """An answer of this server by itself, once it calls its weights this version: newer ones are refused to others."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(90):
        while await label_of(ServerClient(session, server.address)) != str(version):  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.1)
    async with patient(server, version=version) as alone:
        response = await alone.agenerate(request(20, 9))
        assert set(response.output_versions) == {version}
        return response


async def label_of(server: ServerClient) -> str:
    try:
        async with asyncio.timeout(1):
            return await server.weight_label()
    except (ServerError, TimeoutError):
        return ""  # it is being started, or stopped


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

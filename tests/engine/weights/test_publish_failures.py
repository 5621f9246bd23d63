"""Publishes that break off half-way: other servers go on, and no token is ever of weights that are of no version."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from published import EmbeddedServer, HookedEngine, Trainee, client, request

from arl.api.engine_config import DistributedWeightsConfig
from arl.api.types import ModelResponse
from arl.engine.client.sglang import RemoteSGLangEngine
from arl.engine.weights.distributed import DistributedTransport


@contextmanager
def transport() -> Iterator[DistributedTransport]:
    transport = DistributedTransport(DistributedWeightsConfig(), bucket_bytes=20_000)
    yield transport
    transport.close()


@asynccontextmanager
async def patient(*servers: EmbeddedServer, **settings: float) -> AsyncIterator[RemoteSGLangEngine]:
    async with asyncio.timeout(90), client(*servers, pause_mode="abort", max_retries=20, **settings) as engine:
        yield engine


def nothing(address: str, start: int) -> None: ...


@asynccontextmanager
async def busy(engine: RemoteSGLangEngine, trainer: Trainee) -> AsyncIterator[list[ModelResponse]]:
    """Requests on all servers while the block runs; afterwards each token is checked against the version it bears."""
    responses: list[ModelResponse] = []
    is_over = asyncio.Event()

    async def ask(seed: int) -> None:
        while not is_over.is_set():
            response = await engine.agenerate(request(60, seed))
            responses.append(response)
            trainer.assert_of_its_versions(response, seed)

    async with asyncio.TaskGroup() as group:
        for seed in range(4):
            group.create_task(ask(seed))
        yield responses
        is_over.set()


async def until_served(server: EmbeddedServer, version: int) -> ModelResponse:
    """An answer of this server by itself, once it calls its weights this version."""
    async with patient(server) as alone:
        while True:
            response = await alone.agenerate(request(20, 9))
            if set(response.output_versions) == {version}:
                return response


async def test_a_server_killed_between_two_buckets_is_fenced_and_comes_back_with_whole_weights(
    trainer: Trainee, first: EmbeddedServer, second: EmbeddedServer
):
    def kill_at_the_second_bucket(address: str, start: int) -> None:
        if start and address == second.address:
            second.kill()

    hooked = HookedEngine(trainer)
    with transport() as sending:
        async with patient(first, second) as engine:
            await sending.deliver(sending.snapshot(hooked), engine)
            trainer.train()
            hooked.before_send = kill_at_the_second_bucket
            async with busy(engine, trainer):
                await sending.deliver(sending.snapshot(hooked), engine)
                hooked.before_send = nothing
                assert await asyncio.to_thread(second.process.wait) == -signal.SIGKILL
                assert engine.version == 1
                await asyncio.to_thread(second.start)
                trainer.assert_of_its_versions(await until_served(second, 1), 9)


async def test_a_server_that_stalls_costs_the_others_nothing_and_is_brought_up_to_date_later(
    trainer: Trainee, first: EmbeddedServer, second: EmbeddedServer
):
    def stall_at_the_second_bucket(address: str, start: int) -> None:
        if start and address == second.address:
            second.process.send_signal(signal.SIGSTOP)

    hooked = HookedEngine(trainer)
    with transport() as sending:
        async with patient(first, second, update_timeout_s=3.0) as engine:
            await sending.deliver(sending.snapshot(hooked), engine)
            trainer.train()
            hooked.before_send = stall_at_the_second_bucket
            async with busy(engine, trainer):
                try:
                    await sending.deliver(sending.snapshot(hooked), engine)
                    hooked.before_send = nothing
                    assert engine.version == 1
                    for seed in range(8):
                        await engine.agenerate(request(20, seed))
                finally:
                    second.process.send_signal(signal.SIGCONT)
                trainer.assert_of_its_versions(await until_served(second, 1), 9)

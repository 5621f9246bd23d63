"""Publishes that break off half-way: other servers go on, and no token is ever of weights that are of no version."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from published import PROMPT, EmbeddedServer, HookedEngine, Trainee

from arl.api import ModelRequest, ModelResponse, SamplingParams
from arl.api.config import ClientConfig, DistributedWeightsConfig
from arl.api.errors import ServerError, TransportError
from arl.engine.client.sglang import RemoteSGLangEngine
from arl.engine.weights.distributed import DistributedTransport


@contextmanager
def transport() -> Iterator[DistributedTransport]:
    transport = DistributedTransport(DistributedWeightsConfig(), bucket_bytes=20_000)
    yield transport
    transport.close()


@asynccontextmanager
async def client(*servers: EmbeddedServer, **settings: float) -> AsyncIterator[RemoteSGLangEngine]:
    addresses = [server.address for server in servers]
    config = ClientConfig(pause_mode="abort", request_timeout_s=60.0, max_retries=20, **settings)
    async with asyncio.timeout(90), RemoteSGLangEngine(addresses, config) as engine:
        yield engine


def nothing(address: str, start: int) -> None: ...


def request(count: int, seed: int) -> ModelRequest:
    sampling = SamplingParams(max_new_tokens=count, ignore_eos=True, seed=seed)
    return ModelRequest(input_ids=(seed, *PROMPT), sampling=sampling)


@asynccontextmanager
async def busy(engine: RemoteSGLangEngine, trainer: Trainee) -> AsyncIterator[list[ModelResponse]]:
    """Requests on all servers while the block runs; afterwards each token is checked against the version it bears."""
    responses: list[ModelResponse] = []
    is_over = asyncio.Event()

    async def ask(seed: int) -> None:
        while not is_over.is_set():
            response = await engine.agenerate(request(60, seed))
            responses.append(response)
            trainer.assert_of_its_versions((seed, *PROMPT), response)

    async with asyncio.TaskGroup() as group:
        for seed in range(4):
            group.create_task(ask(seed))
        yield responses
        is_over.set()


async def until_served(server: EmbeddedServer, version: int) -> ModelResponse:
    """An answer of this server by itself, once it calls its weights this version."""
    async with client(server) as alone:
        while True:
            response = await alone.agenerate(request(20, 9))
            if set(response.output_versions) == {version}:
                return response


async def test_a_server_killed_between_two_buckets_is_fenced_and_comes_back_with_whole_weights(
    trainer: Trainee, first: EmbeddedServer, second: EmbeddedServer
) -> None:
    def kill_at_the_second_bucket(address: str, start: int) -> None:
        if start and address == second.address:
            second.kill()

    hooked = HookedEngine(trainer)
    with transport() as sending:
        async with client(first, second) as engine:
            await sending.deliver(sending.snapshot(hooked), engine)
            trainer.train()
            hooked.before_send = kill_at_the_second_bucket
            async with busy(engine, trainer):
                await sending.deliver(sending.snapshot(hooked), engine)
                hooked.before_send = nothing
                assert await asyncio.to_thread(second.process.wait) == -signal.SIGKILL
                assert engine.version == 1
                await asyncio.to_thread(second.start)
                trainer.assert_of_its_versions((9, *PROMPT), await until_served(second, 1))


async def test_what_fails_at_the_trainer_between_two_buckets_leaves_the_server_whole(
    trainer: Trainee, first: EmbeddedServer
) -> None:
    def fail_at_the_second_bucket(address: str, start: int) -> None:
        if start:
            raise TransportError("the weights could not be gathered")

    hooked = HookedEngine(trainer)
    with transport() as sending:
        async with client(first) as engine:
            await sending.deliver(sending.snapshot(hooked), engine)
            trainer.train()
            hooked.before_send = fail_at_the_second_bucket
            async with busy(engine, trainer):
                with pytest.raises(ServerError, match="could not be gathered"):
                    await sending.deliver(sending.snapshot(hooked), engine)
                hooked.before_send = nothing
                trainer.train()
                await sending.deliver(sending.snapshot(hooked), engine)
                response = await engine.agenerate(request(20, 9))
    assert set(response.output_versions) == {2}


async def test_a_server_that_stalls_costs_the_others_nothing_and_is_brought_up_to_date_later(
    trainer: Trainee, first: EmbeddedServer, second: EmbeddedServer
) -> None:
    def stall_at_the_second_bucket(address: str, start: int) -> None:
        if start and address == second.address:
            second.process.send_signal(signal.SIGSTOP)

    hooked = HookedEngine(trainer)
    with transport() as sending:
        async with client(first, second, update_timeout_s=3.0) as engine:
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
                trainer.assert_of_its_versions((9, *PROMPT), await until_served(second, 1))


@pytest.mark.slow
async def test_a_server_that_was_restarted_between_two_publishes_is_met_anew(
    trainer: Trainee, first: EmbeddedServer, second: EmbeddedServer
) -> None:
    with transport() as sending:
        async with client(first, second) as engine:
            await sending.deliver(sending.snapshot(trainer.engine), engine)
            trainer.train()
            second.kill()
            await asyncio.to_thread(second.start)
            await sending.deliver(sending.snapshot(trainer.engine), engine)
            trainer.assert_of_its_versions((9, *PROMPT), await until_served(second, 1))

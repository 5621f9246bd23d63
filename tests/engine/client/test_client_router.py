"""A router in front of the servers: requests go to it, weights to each server, and versions hold nevertheless."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from protocol_server import ProtocolServer, ask, assert_seamless
from scripted_weights import ScriptedWeights, raising, weights

from arl.api.config import SGLangEngineConfig
from arl.api.errors import ServerError
from arl.engine.client import upkeep
from arl.engine.client.sglang import RemoteSGLangEngine


@asynccontextmanager
async def router_over(servers: Sequence[ProtocolServer]) -> AsyncIterator[str]:
    """Passes /generate on to one server after another; gives its address."""
    turns = iter(range(1_000_000))

    async def generate(request: web.Request) -> web.Response:
        server = servers[next(turns) % len(servers)]
        async with session.post(f"{server.address}/generate", data=await request.read()) as answer:
            return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")

    async def health(request: web.Request) -> web.Response:
        return web.Response(text="OK")

    app = web.Application()
    app.add_routes([web.post("/generate", generate), web.get("/health", health)])
    runner = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True)
    async with aiohttp.ClientSession() as session:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


@asynccontextmanager
async def engine_behind_router(*servers: ProtocolServer, **settings: object) -> AsyncIterator[RemoteSGLangEngine]:
    addresses = [server.address for server in servers]
    async with router_over(servers) as router:
        config = SGLangEngineConfig.model_validate(
            {"addresses": addresses, "router": router, "request_timeout_s": 20.0, **settings}
        )
        async with RemoteSGLangEngine(addresses, config) as engine:
            yield engine


@pytest.mark.parametrize("order", ["all", "rolling"])
async def test_requests_go_to_the_router_and_weights_to_each_server(
    server: ProtocolServer, other: ProtocolServer, order: str
) -> None:
    async with engine_behind_router(server, other, update_order=order) as engine:
        for version in (0, 1, 2):
            responses = [await engine.agenerate(ask(session="s")) for _ in range(2)]
            assert {response.output_versions for response in responses} == {(version,) * 4}
            await engine.update_weights(weights(version + 1))
    for each in (server, other):
        assert each.names().count("update_weights_from_disk") == 3
        assert len(each.requests) == 3


async def test_prefixes_are_never_shared_across_a_load_of_any_server(
    server: ProtocolServer, other: ProtocolServer
) -> None:
    other.load_gate.clear()
    async with engine_behind_router(server, other) as engine, asyncio.TaskGroup() as group:
        await engine.agenerate(ask())
        updating = group.create_task(engine.update_weights(weights(1)))
        await server.until(lambda: "continue_generation" in server.names()[1:])
        await other.until(lambda: "update_weights_from_disk" in other.names())
        calls = [group.create_task(engine.agenerate(ask())) for _ in range(2)]
        await server.until(lambda: len(server.requests) == 2)
        other.load_gate.set()
        await updating
        await asyncio.gather(*calls)
    keys = [sent["extra_key"] for sent in server.requests]
    assert len(set(keys)) == 2


async def test_an_abort_by_a_pause_is_continued(server: ProtocolServer) -> None:
    server.is_automatic = False
    async with engine_behind_router(server, pause_mode="abort", max_retries=0) as engine, asyncio.TaskGroup() as group:
        call = group.create_task(engine.agenerate(ask(6)))
        await server.until(lambda: len(server.running) == 1)
        server.advance(2)
        await engine.update_weights(weights(1))
        await server.until(lambda: len(server.running) == 1)
        server.advance(4)
        response = await call
    assert_seamless(response, 6)
    assert response.output_versions == (0, 0, 1, 1, 1, 1)


async def test_an_answer_of_a_server_that_was_restarted_is_thrown_away_and_the_server_loaded(
    server: ProtocolServer, other: ProtocolServer
) -> None:
    async with engine_behind_router(server, other) as engine:
        await engine.update_weights(weights(1))
        server.label = "default"  # as after a quick restart
        responses = [await engine.agenerate(ask()) for _ in range(4)]
        assert {response.output_versions for response in responses} == {(1, 1, 1, 1)}
        await server.until(lambda: server.label == "1")


async def test_a_load_that_breaks_off_costs_what_runs_a_retry(server: ProtocolServer, other: ProtocolServer) -> None:
    server.is_automatic = False
    update = ScriptedWeights(1, midway=raising(ServerError("it broke off"), at=server.address))
    async with engine_behind_router(server, other) as engine, asyncio.TaskGroup() as group:
        call = group.create_task(engine.agenerate(ask()))
        await server.until(lambda: len(server.running) == 1)
        server.advance(2)
        await engine.update_weights(update)
        response = await call
    assert_seamless(response, 4)
    assert response.output_versions == (1, 1, 1, 1)


async def test_a_fault_in_the_middle_of_an_update_fences_no_server_for_being_busy(
    server: ProtocolServer, other: ProtocolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_PROBE_TIMEOUT_S", 0.05)
    other.load_gate.clear()
    async with engine_behind_router(server, other) as engine, asyncio.TaskGroup() as group:
        updating = group.create_task(engine.update_weights(weights(1)))
        await other.until(lambda: "update_weights_from_disk" in other.names())
        server.faults.append(500)
        server.calls.clear()
        call = group.create_task(engine.agenerate(ask()))
        await server.until(lambda: "model_info" in [name for name, _ in server.calls])
        await asyncio.sleep(0.1)
        assert len(engine._pool.serving) == 2
        other.load_gate.set()
        await updating
        assert_seamless(await call, 4)
    assert other.names().count("update_weights_from_disk") == 1


async def test_a_router_that_is_not_there_is_named(server: ProtocolServer) -> None:
    config = SGLangEngineConfig(addresses=(server.address,), router="http://127.0.0.1:9")
    with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:9 could not be reached"):
        async with RemoteSGLangEngine(config.addresses, config):
            pytest.fail("it opened")

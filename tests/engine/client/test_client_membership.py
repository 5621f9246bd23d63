"""Servers that join and leave while requests and updates go on."""

import asyncio

import pytest
from protocol_server import Server, ask, assert_seamless, over
from scripted_weights import ScriptedWeights, raising, waiting, weights

from arl.api.engine import WeightServer
from arl.api.errors import ConfigError, ServerError, TransportError


async def test_a_server_that_joins_holds_the_current_weights_before_its_first_request(server: Server, other: Server):
    gate = asyncio.Event()
    other.label = "3"  # as another run has left it
    async with over(server) as engine, asyncio.TaskGroup() as group:
        await engine.update_weights(ScriptedWeights(3, before=waiting(gate, at=other.address)))
        joining = group.create_task(engine.add_server(other.address))
        await other.until(lambda: "health" in [name for name, _ in other.calls])
        await asyncio.gather(*(engine.agenerate(ask()) for _ in range(4)))
        assert other.requests == []
        gate.set()
        await joining
        responses = await asyncio.gather(*(engine.agenerate(ask()) for _ in range(4)))
    assert len(other.requests) == 2
    assert other.names().count("update_weights_from_disk") == 1
    assert {response.output_versions for response in responses} == {(3, 3, 3, 3)}


async def test_a_server_that_joins_before_the_first_update_serves_as_it_is(server: Server, other: Server):
    other.label = "17"
    async with over(server, version=2) as engine:
        await engine.add_server(other.address + "/")
        responses = await asyncio.gather(*(engine.agenerate(ask()) for _ in range(4)))
        assert {response.output_versions for response in responses} == {(2, 2, 2, 2)}
    assert len(other.requests) == 2


@pytest.mark.parametrize("error", [None, ServerError("no such weights"), TransportError("released")])
async def test_a_server_that_joins_during_an_update_gets_the_newer_weights(
    server: Server, other: Server, error: Exception | None
):
    """Also if those that it was loading have been removed meanwhile."""
    gate = asyncio.Event()

    async def removed(joined: WeightServer) -> None:
        if joined.address == other.address:
            await gate.wait()
            if error is not None:
                raise error

    async with over(server) as engine, asyncio.TaskGroup() as group:
        await engine.update_weights(ScriptedWeights(1, midway=removed))
        joining = group.create_task(engine.add_server(other.address))
        await other.until(lambda: "update_weights_from_disk" in other.names())
        await engine.update_weights(weights(2))
        gate.set()
        await joining
        assert other.label == "2"
        assert engine.version == 2


async def test_a_server_that_cannot_join_is_an_error_and_leaves_all_as_it_was(server: Server, other: Server):
    async with over(server, update_timeout_s=0.5) as engine:
        with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:9/model_info could not be reached"):
            await engine.add_server("http://127.0.0.1:9")
        with pytest.raises(ConfigError, match="base URLs"):
            await engine.add_server("127.0.0.1:9")
        with pytest.raises(ConfigError, match="is already one of the servers"):
            await engine.add_server(server.address)
        await engine.update_weights(
            ScriptedWeights(1, before=raising(TransportError("no mirror"), at=other.address, times=9))
        )
        with pytest.raises(ServerError, match="did not get the current weights: no mirror"):
            await engine.add_server(other.address)
        assert "pause_generation" not in other.names()
        await engine.update_weights(ScriptedWeights(1, midway=raising(ServerError("it broke"), at=other.address)))
        with pytest.raises(ServerError, match="it broke"):
            await engine.add_server(other.address)
        assert "pause_generation" in other.names()
        assert other.pause_mode is None
        other.load_gate.clear()
        await engine.update_weights(weights(2))
        with pytest.raises(ServerError, match=r"was not ready within 0\.5 s \(engine\.update_timeout_s\)"):
            await engine.add_server(other.address)
        assert [s.address for s in engine._pool.servers] == [server.address]
        assert_seamless(await engine.agenerate(ask()), 4)
        other.load_gate.set()


async def test_a_server_that_leaves_ends_what_it_runs_and_gets_nothing_new(server: Server, other: Server):
    server.is_automatic = False
    async with over(server, other) as engine, asyncio.TaskGroup() as group:
        call = await server.begin(group, engine.agenerate(ask(session="s")))
        leaving = group.create_task(engine.remove_server(server.address))
        await asyncio.sleep(0)
        for _ in range(3):
            await engine.agenerate(ask(session="s"))
        assert not leaving.done()
        server.advance(4)
        assert_seamless(await call, 4)
        await leaving
        await engine.update_weights(weights(1))
    assert len(server.requests) == 1
    assert server.names() == []
    assert server.aborted == []


@pytest.mark.parametrize("answers_aborts", [True, False])
async def test_requests_that_outlast_the_draining_are_continued_elsewhere(
    server: Server,
    other: Server,
    answers_aborts: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("arl.engine.client.membership._HANDOVER_TIMEOUT_S", 0.2)
    server.is_automatic = False
    if not answers_aborts:
        server.tells["abort_request"] = {}
    async with over(server, other) as engine, asyncio.TaskGroup() as group:
        call = await server.begin(group, engine.agenerate(ask(6, session="s")))
        server.advance(2)
        await engine.remove_server(server.address, drain_timeout_s=0.05)
        assert_seamless(await call, 6)
    kept = 2 if answers_aborts else 0
    assert [len(sent["input_ids"]) for sent in other.requests] == [3 + kept]


async def test_the_last_server_that_serves_cannot_leave(server: Server, other: Server):
    async with over(server, other) as engine:
        with pytest.raises(ConfigError, match=r"is not one of the servers: http://127\.0\.0\.1"):
            await engine.remove_server("http://127.0.0.1:9")
        await other.stop()
        await engine.update_weights(weights(1))  # fences the other
        with pytest.raises(ServerError, match="is the last server that serves; add another before"):
            await engine.remove_server(server.address)
        await engine.remove_server(other.address)
        with pytest.raises(ServerError, match="is the last server that serves"):
            await engine.remove_server(server.address)
        assert_seamless(await engine.agenerate(ask()), 4)


async def test_no_server_leaves_that_makes_too_few(server: Server, other: Server):
    async with over(server, other, min_servers=2) as engine:
        with pytest.raises(ServerError, match=r"engine\.min_servers is 2, and without .* there are 1"):
            await engine.remove_server(other.address)


async def test_a_fenced_server_that_left_is_probed_no_more(server: Server, other: Server):
    async with over(server, other) as engine:
        other.tells["update_weights_from_disk"] = 500
        await engine.update_weights(weights(1))
        await engine.remove_server(other.address)
        assert not engine._upkeep._tasks
        assert engine.counters()["servers/fenced"] == 0
        assert other.pause_mode is None


async def test_a_removal_that_is_given_up_leaves_the_server_in_service(server: Server, other: Server):
    server.is_automatic = False
    async with over(server, other) as engine, asyncio.TaskGroup() as group:
        await server.begin(group, engine.agenerate(ask()))
        leaving = group.create_task(engine.remove_server(server.address))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        server.advance(4)
        server.is_automatic = True
        for _ in range(2):
            await asyncio.gather(*(engine.agenerate(ask()) for _ in range(4)))
    assert len(server.requests) > 1

"""Updates of several servers: at once or one after another, and what a failure in the middle of one may not do."""

import asyncio

import pytest
from protocol_server import Server, ask, assert_seamless, over, turns, when
from scripted_weights import ScriptedWeights, raising, waiting, weights

from arl.api.engine import WeightServer
from arl.api.errors import ConfigError, ProcessLostError, ServerError, ServerFailedError, TransportError
from arl.api.settings.engines import ClientConfig
from arl.engine.client.remote_engine import RemoteInferenceEngine


async def test_rolling_updates_one_server_after_another(server: Server, other: Server):
    gate = asyncio.Event()
    update = ScriptedWeights(1, before=waiting(gate, at=server.address))
    async with over(server, other, update_order="rolling") as engine, asyncio.TaskGroup() as group:
        running = group.create_task(engine.update_weights(update))
        await when(lambda: update.calls)
        for session in ("a", "b"):  # preparing disturbs no request
            assert (await engine.agenerate(ask(session=session))).output_versions == (0, 0, 0, 0)
        assert server.names() == other.names() == []
        assert server.requests
        assert [address for _, address in update.calls] == [server.address]
        gate.set()
        await running
        assert update.calls == [(step, s.address) for s in (server, other) for step in ("prepare", "load")]
        assert engine.version == 1


@pytest.mark.parametrize("order", ["all", "rolling"])
async def test_a_session_whose_server_is_paused_goes_on_at_another(server: Server, other: Server, order: str):
    server.load_gate.clear()
    async with over(server, other, update_order=order) as engine, asyncio.TaskGroup() as group:
        await engine.agenerate(ask(session="s"))
        assert len(server.requests) == 1
        running = group.create_task(engine.update_weights(weights(1)))
        await server.until(lambda: "update_weights_from_disk" in server.names())
        if order == "all":
            await other.until(lambda: "continue_generation" in other.names())
        assert_seamless(await engine.agenerate(ask(session="s")), 4)
        assert len(other.requests) == 1
        server.load_gate.set()
        await running


async def test_the_version_is_that_of_the_server_furthest_behind(server: Server, other: Server):
    other.load_gate.clear()
    async with over(server, other, update_order="rolling") as engine, asyncio.TaskGroup() as group:
        running = group.create_task(engine.update_weights(weights(1)))
        await other.until(lambda: "update_weights_from_disk" in other.names())
        assert (await engine.agenerate(ask())).output_versions == (1, 1, 1, 1)
        assert engine.version == 0
        other.load_gate.set()
        await running
        assert engine.version == 1


async def test_a_server_that_new_weights_do_not_reach_ends_what_it_runs_and_gets_nothing_new(
    server: Server, other: Server
):
    server.is_automatic = False
    unreachable = raising(TransportError("the mirror is gone"), at=server.address, times=10**6)
    async with over(server, other, max_retries=0) as engine, asyncio.TaskGroup() as group:
        call = await server.begin(group, engine.agenerate(ask(session="s")))
        server.advance(2)
        await engine.update_weights(ScriptedWeights(1, before=unreachable))
        assert engine.version == 1
        assert (await engine.agenerate(ask(session="s"))).output_versions == (1, 1, 1, 1)
        server.advance(2)
        assert (await call).output_versions == (0, 0, 0, 0)
        assert "pause_generation" not in server.names()
    assert len(server.requests) == 1


async def test_a_label_alone_does_not_bring_a_server_back_after_a_load_that_broke_off(server: Server, other: Server):
    update = ScriptedWeights(1, midway=raising(TransportError("the sender is gone"), at=server.address, times=2))
    async with over(server, other) as engine:
        await engine.update_weights(update)
        assert engine.version == 1
        assert server.label == "1"  # and yet it may hold anything
        assert server.pause_mode == "in_place"
        for _ in range(4):
            await engine.agenerate(ask())
        assert server.requests == []
        await server.until(lambda: server.pause_mode is None)
        assert update.calls.count(("load", server.address)) == 3


async def test_a_fence_in_the_middle_of_an_update_does_not_load_the_server_twice_at_once(server: Server, other: Server):
    gate = asyncio.Event()
    update = ScriptedWeights(1, before=waiting(gate, at=server.address))
    async with over(server, other) as engine, asyncio.TaskGroup() as group:
        running = group.create_task(engine.update_weights(update))
        await when(lambda: ("load", other.address) in update.calls)
        engine._upkeep.fence(engine._pool.servers[0], "it failed two requests")
        await turns()  # its probe starts
        assert update.calls.count(("prepare", server.address)) == 1
        gate.set()
        await running
        assert server.names().count("update_weights_from_disk") == 1
        assert engine.version == 1


async def test_an_update_waits_for_a_lone_server_that_died_in_the_middle_of_it(server: Server):
    has_died = asyncio.Event()

    async def die(_: WeightServer) -> None:
        if not has_died.is_set():
            await server.stop()
            has_died.set()

    async with over(server) as engine, asyncio.TaskGroup() as group:
        running = group.create_task(engine.update_weights(ScriptedWeights(1, midway=die)))
        await has_died.wait()
        server.label = "default"
        await server.start()
        await running
        assert engine.version == 1
        assert (await engine.agenerate(ask())).output_versions == (1, 1, 1, 1)


async def test_an_update_that_only_dead_servers_could_take_gives_up_in_the_end(server: Server):
    async with over(server, update_timeout_s=0.3) as engine:
        await server.stop()
        with pytest.raises(ServerError, match=r"no server took version 1: .*could not be reached"):
            await engine.update_weights(weights(1))


async def test_an_error_of_the_update_itself_passes_and_no_server_serves_what_it_left(server: Server, other: Server):
    update = ScriptedWeights(1, midway=raising(KeyError("a bug"), at=server.address))
    async with over(server, other, update_order="rolling") as engine:
        with pytest.raises(KeyError, match="a bug"):
            await engine.update_weights(update)
        assert server.pause_mode == "in_place"
        response = await engine.agenerate(ask())
        assert len(other.requests) == 1
        assert_seamless(response, 4)


async def test_weights_that_lost_their_sender_end_no_engine_and_the_server_gets_the_next(server: Server, other: Server):
    asked = asyncio.Event()

    async def prepare(at: WeightServer) -> None:
        if at.address == server.address:
            if asked.is_set():
                raise ProcessLostError("rank 0 died")
            asked.set()
            raise TransportError("it broke off")

    async with over(server, other) as engine:
        await engine.update_weights(ScriptedWeights(1, before=prepare))
        await server.until(lambda: "rank 0 died" in engine._pool.report())
        await engine.update_weights(weights(2))
        await server.until(lambda: server.label == "2")
        assert_seamless(await engine.agenerate(ask()), 4)


async def test_an_update_whose_sender_is_lost_before_any_server_has_it_all_says_so_and_the_next_is_taken(
    server: Server,
):
    asked = asyncio.Event()

    async def prepare(at: WeightServer) -> None:
        if asked.is_set():
            raise ProcessLostError("the trainer's process was ended")
        asked.set()
        raise ServerFailedError("the connection was reset")

    async with over(server) as engine:
        with pytest.raises(ProcessLostError, match="the trainer's process was ended"):
            await engine.update_weights(ScriptedWeights(1, before=prepare))
        await engine.update_weights(weights(1))
        assert_seamless(await engine.agenerate(ask()), 4)


@pytest.mark.parametrize("block_error", [None, ConfigError("the block's own")])
async def test_an_error_in_a_background_task_is_raised_as_it_is_unless_the_block_had_its_own(
    server: Server, other: Server, block_error: Exception | None
):
    async def prepare(at: WeightServer) -> None:
        if at.address == server.address:
            if not engine._upkeep._probes:
                raise TransportError("it broke off")
            raise ZeroDivisionError("in the probe")

    async def block() -> None:
        try:
            await engine.update_weights(ScriptedWeights(1, before=prepare))
            await asyncio.wait_for(asyncio.Event().wait(), 5)
        finally:
            if block_error is not None:
                raise block_error

    engine = RemoteInferenceEngine([server.address, other.address], ClientConfig())
    try:
        async with engine:
            await block()
    except (ZeroDivisionError, ConfigError) as error:
        raised = error
    else:
        pytest.fail("nothing was raised")
    assert isinstance(raised, ZeroDivisionError if block_error is None else ConfigError)
    assert "in the probe" in str(raised) + str(getattr(raised, "__notes__", ""))

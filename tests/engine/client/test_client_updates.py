"""Weight updates: of each server by itself, in flight; at once or one after another; what fails gets them later."""

import asyncio
from typing import Any

import pytest
from protocol_server import Server, ask, assert_seamless, over, turns, when
from scripted_weights import ScriptedWeights, raising, waiting, weights

from arl.api.engine import WeightServer
from arl.api.errors import (
    ConfigError,
    EngineClosedError,
    ProcessLostError,
    ServerError,
    ServerFailedError,
    TransportError,
)
from arl.api.settings.engines import ClientConfig
from arl.api.types import ModelResponse
from arl.engine.client.remote_engine import RemoteInferenceEngine


@pytest.mark.parametrize(("mode", "flush"), [("in_place", False), ("retract", True), ("abort", True)])
async def test_an_update_is_pause_load_resume(server: Server, mode: str, flush: bool):
    async with over(server, pause_mode=mode) as engine:
        stats = await engine.update_weights(weights(1))
        assert engine.version == 1
    assert server.names() == ["pause_generation", "update_weights_from_disk", "continue_generation"]
    pause_body, load_body = (body for _, body in server.calls[:2])
    assert pause_body == {"mode": mode}
    assert load_body["model_path"] == "/weights/1"
    assert load_body["weight_version"] == "1"
    assert load_body["flush_cache"] is flush
    assert 0 < stats.load_s <= stats.pause_s


AHEAD = {"disable_overlap_schedule": False}
"""What a server tells that launches its next step before it has read the last one."""
COURSES: dict[str, tuple[dict[str, Any], str, tuple[int | str, ...], tuple[int, ...]]] = {
    "spans": ({}, "in_place", ("ask", 1, "3", 3), (2, 3, 3, 3)),
    "no spans: that of the moment when it was sent": ({"spans": False}, "in_place", ("ask", "3", 4), (2, 2, 2, 2)),
    "a label of another run": ({"label": "37"}, "in_place", ("ask", 1, "3", 3), (2, 3, 3, 3)),
    "ahead by a token": ({"told": AHEAD}, "in_place", ("ask", 1, "3", 3), (2, 2, 3, 3)),
    "ahead by a draft": (
        {"told": {**AHEAD, "speculative_num_draft_tokens": 2}}, "in_place", ("ask", 1, "3", 3), (2, 2, 2, 3)
    ),
    "ahead, sampled again": ({"told": AHEAD}, "retract", ("ask", 1, "3", 3), (2, 3, 3, 3)),
    "not ahead": ({"told": {"disable_overlap_schedule": True}}, "in_place", ("ask", 1, "3", 3), (2, 3, 3, 3)),
    "ahead from the first token on": ({"told": AHEAD}, "in_place", ("3", "ask", "4", 2, "5", 2), (3, 4, 4, 5)),
}  # fmt: skip
"""A server, the mode, and a course: the request, numbers of tokens, published versions. Then the tokens' versions."""


@pytest.mark.parametrize(("traits", "mode", "course", "versions"), COURSES.values(), ids=COURSES)
async def test_each_token_has_the_version_that_sampled_it_or_the_oldest_that_it_can_be(
    server: Server,
    traits: dict[str, Any],
    mode: str,
    course: tuple[int | str, ...],
    versions: tuple[int, ...],
):
    server.is_automatic, server.label = False, traits.get("label", "default")
    server.sends_spans, server.tells["server_info"] = traits.get("spans", True), traits.get("told", {})
    calls: list[asyncio.Task[ModelResponse]] = []
    async with over(server, version=2, pause_mode=mode) as engine, asyncio.TaskGroup() as group:
        for step in course:
            if step == "ask":
                calls.append(await server.begin(group, engine.agenerate(ask())))
            elif isinstance(step, int):
                server.advance(step)
            else:
                await engine.update_weights(weights(int(step)))
        response = await calls[0]
        assert_seamless(response, 4)
        assert response.output_versions == versions
        assert len(server.requests) == len(calls)  # the server itself goes on


async def test_a_server_that_takes_too_long_to_load_is_fenced_and_its_requests_go_elsewhere(
    server: Server, other: Server
):
    server.is_automatic = False
    server.load_gate.clear()
    async with over(server, other, update_timeout_s=0.3) as engine, asyncio.TaskGroup() as group:
        call = await server.begin(group, engine.agenerate(ask(session="s")))
        await engine.update_weights(weights(1))
        response = await call
        assert response.output_versions == (1, 1, 1, 1)
        assert len(other.requests) == 1
        server.load_gate.set()


async def test_a_server_that_hangs_in_an_update_is_fenced_long_before_the_limit_once_updates_are_known(
    server: Server, other: Server, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("arl.engine.client.health._LEAST_PAUSE_S", 0.2)
    async with over(server, other, update_timeout_s=60.0) as engine:
        for version in (1, 2):
            await engine.update_weights(weights(version))
        server.load_gate.clear()
        async with asyncio.timeout(30):
            await engine.update_weights(weights(3))
        assert engine.counters()["servers/serving"] == 1
        server.load_gate.set()


async def test_a_transport_that_runs_out_of_time_itself_fences_the_server_and_ends_no_engine(
    server: Server, other: Server
):
    async with over(server, other) as engine:
        late = raising(TimeoutError("the sender gave up"), at=server.address)
        await engine.update_weights(ScriptedWeights(1, midway=late))
        assert engine.version == 1
        assert_seamless(await engine.agenerate(ask()), 4)


async def test_an_update_that_no_server_takes_is_an_error_naming_each(server: Server, other: Server):
    server.load_works = other.load_works = False
    async with over(server, other) as engine:
        with pytest.raises(ServerError, match=r"no server took version 1.*no such weights.*no such weights"):
            await engine.update_weights(weights(1))
        assert engine.version == 0


async def test_an_update_waits_for_a_server_that_is_fenced_for_a_moment(server: Server):
    server.faults.append(500)
    async with over(server) as engine, asyncio.TaskGroup() as group:
        server.is_healthy = False
        call = group.create_task(engine.agenerate(ask()))
        await when(lambda: not engine._pool.in_service)
        update = group.create_task(engine.update_weights(weights(1)))
        await turns()
        server.is_healthy = True
        await update
        assert engine.version == 1
        assert (await call).output_versions == (1, 1, 1, 1)


@pytest.mark.parametrize("is_closed", [False, True])
async def test_an_update_that_is_given_up_leaves_no_server_paused(server: Server, is_closed: bool):
    server.load_gate.clear()
    async with over(server) as engine, asyncio.TaskGroup() as group:
        update = group.create_task(engine.update_weights(weights(1)))
        await server.until(lambda: "update_weights_from_disk" in server.names())
        update.cancel()
        if is_closed:
            await engine.aclose()
            with pytest.raises(EngineClosedError):
                await engine.update_weights(weights(2))
        else:
            server.load_gate.set()
            assert_seamless(await engine.agenerate(ask()), 4)
    assert server.pause_mode is None


async def test_an_update_while_paused_leaves_the_engine_paused_and_resuming_waits_for_it(server: Server):
    async with over(server) as engine, asyncio.TaskGroup() as group:
        await engine.pause()
        await engine.update_weights(weights(1))
        assert server.pause_mode == "in_place"
        server.load_gate.clear()
        update = group.create_task(engine.update_weights(weights(2)))
        await server.until(lambda: server.names().count("update_weights_from_disk") == 2)
        resume = group.create_task(engine.resume())
        call = group.create_task(engine.agenerate(ask()))
        await turns()
        assert server.names()[-1] == "update_weights_from_disk"
        assert server.requests == []
        server.load_gate.set()
        await asyncio.gather(update, resume)
        assert (await call).output_versions == (2, 2, 2, 2)


async def test_a_version_can_be_published_again_but_none_that_is_older(server: Server):
    async with over(server) as engine:
        for _ in range(2):
            await engine.update_weights(weights(5))
        with pytest.raises(ValueError, match="version 2 was published, but the servers already hold 5"):
            await engine.update_weights(weights(2))
        assert (await engine.agenerate(ask())).output_versions == (5, 5, 5, 5)
    assert server.names().count("update_weights_from_disk") == 2


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

"""Weight updates: every server by itself, in flight, and those that fail are fenced off and brought up to date."""

import asyncio

import pytest
from protocol_server import Engines, ProtocolServer, ask, assert_seamless
from scripted_weights import weights

from arl.api.errors import EngineClosedError, ServerError


@pytest.mark.parametrize(("mode", "flush"), [("in_place", False), ("retract", True), ("abort", True)])
async def test_an_update_is_pause_load_resume(
    server: ProtocolServer, engine_over: Engines, mode: str, flush: bool
) -> None:
    async with engine_over([server], pause_mode=mode) as engine:
        stats = await engine.update_weights(weights(1))
        assert engine.version == 1
    (pause, pause_body), (load, load_body), (resume, _) = server.calls[:3]
    assert (pause, load, resume) == ("pause_generation", "update_weights_from_disk", "continue_generation")
    assert pause_body == {"mode": mode}
    assert load_body["model_path"] == "/weights/1"
    assert load_body["weight_version"] == "1"
    assert load_body["flush_cache"] is flush
    assert 0 < stats.load_s <= stats.pause_s


async def test_new_requests_wait_while_their_server_loads(server: ProtocolServer, engine_over: Engines) -> None:
    server.load_gate.clear()
    async with engine_over([server]) as engine, asyncio.TaskGroup() as group:
        update = group.create_task(engine.update_weights(weights(1)))
        await server.until(lambda: "update_weights_from_disk" in server.names())
        call = group.create_task(engine.agenerate(ask()))
        await asyncio.sleep(0.02)
        assert server.requests == []
        server.load_gate.set()
        await update
        assert (await call).output_versions == (1, 1, 1, 1)


async def test_without_spans_a_token_has_the_version_from_before_the_request_was_sent(
    server: ProtocolServer, engine_over: Engines
) -> None:
    server.is_automatic = server.sends_spans = False
    async with engine_over([server]) as engine, asyncio.TaskGroup() as group:
        call = group.create_task(engine.agenerate(ask()))
        await server.until(lambda: len(server.running) == 1)
        await engine.update_weights(weights(1))
        server.advance(4)
        assert (await call).output_versions == (0, 0, 0, 0)


@pytest.mark.parametrize("label", ["default", "37"])
async def test_what_a_server_calls_its_first_weights_is_the_engines_first_version(
    server: ProtocolServer, engine_over: Engines, label: str
) -> None:
    server.is_automatic, server.label = False, label
    async with engine_over([server], version=2) as engine, asyncio.TaskGroup() as group:
        call = group.create_task(engine.agenerate(ask()))
        await server.until(lambda: len(server.running) == 1)
        server.advance(1)
        await engine.update_weights(weights(3))
        server.advance(3)
        assert (await call).output_versions == (2, 3, 3, 3)


@pytest.mark.parametrize(
    ("told", "mode", "versions"),
    [
        ({"disable_overlap_schedule": False}, "in_place", (0, 0, 1, 1)),
        ({"disable_overlap_schedule": False, "speculative_num_draft_tokens": 2}, "in_place", (0, 0, 0, 1)),
        ({"disable_overlap_schedule": False}, "retract", (0, 1, 1, 1)),
        ({"disable_overlap_schedule": True}, "in_place", (0, 1, 1, 1)),
        ({}, "in_place", (0, 1, 1, 1)),
    ],
)
async def test_where_a_server_runs_ahead_a_token_after_an_update_may_be_of_the_version_before(
    server: ProtocolServer, engine_over: Engines, told: dict[str, object], mode: str, versions: tuple[int, ...]
) -> None:
    server.is_automatic, server.tells["server_info"] = False, told
    async with engine_over([server], pause_mode=mode) as engine, asyncio.TaskGroup() as group:
        call = group.create_task(engine.agenerate(ask()))
        await server.until(lambda: len(server.running) == 1)
        server.advance(1)
        await engine.update_weights(weights(1))
        server.advance(3)
        assert (await call).output_versions == versions


async def test_where_a_server_runs_ahead_the_first_token_may_be_of_the_version_that_the_request_was_sent_under(
    server: ProtocolServer, engine_over: Engines
) -> None:
    server.is_automatic, server.tells["server_info"] = False, {"disable_overlap_schedule": False}
    async with engine_over([server]) as engine, asyncio.TaskGroup() as group:
        await engine.update_weights(weights(3))
        call = group.create_task(engine.agenerate(ask()))
        await server.until(lambda: len(server.running) == 1)
        await engine.update_weights(weights(4))
        server.advance(2)
        await engine.update_weights(weights(5))
        server.advance(2)
        assert (await call).output_versions == (3, 4, 4, 5)


async def test_a_server_that_fails_an_update_is_fenced_and_the_others_go_on(
    server: ProtocolServer, other: ProtocolServer, engine_over: Engines
) -> None:
    async with engine_over([server, other]) as engine:
        server.load_works = False
        await engine.update_weights(weights(1))
        assert engine.version == 1
        for _ in range(4):
            assert (await engine.agenerate(ask())).output_versions == (1, 1, 1, 1)
        assert server.requests == []
        server.load_works = True
        await server.until(lambda: server.label == "1")
        await server.until(lambda: server.names()[-1] == "continue_generation")


async def test_a_server_that_missed_an_update_gets_the_newest(
    server: ProtocolServer, other: ProtocolServer, engine_over: Engines
) -> None:
    async with engine_over([server, other]) as engine:
        server.is_healthy = False
        await engine.update_weights(weights(1))
        await engine.update_weights(weights(2))
        server.is_healthy = True
        server.calls.clear()
        await server.until(lambda: server.label == "2")
        assert {body["model_path"] for name, body in server.calls if name == "update_weights_from_disk"} == {
            "/weights/2"
        }


async def test_a_server_that_takes_too_long_to_load_is_fenced_and_its_requests_go_elsewhere(
    server: ProtocolServer, other: ProtocolServer, engine_over: Engines
) -> None:
    server.is_automatic = False
    server.load_gate.clear()
    async with engine_over([server, other], update_timeout_s=0.3) as engine, asyncio.TaskGroup() as group:
        call = group.create_task(engine.agenerate(ask(session="s")))
        await server.until(lambda: len(server.running) == 1)
        await engine.update_weights(weights(1))
        response = await call
        assert response.output_versions == (1, 1, 1, 1)
        assert len(other.requests) == 1
        server.load_gate.set()


async def test_an_update_that_no_server_takes_is_an_error_naming_each(
    server: ProtocolServer, other: ProtocolServer, engine_over: Engines
) -> None:
    server.load_works = other.load_works = False
    async with engine_over([server, other]) as engine:
        with pytest.raises(ServerError, match=r"no server took version 1.*no such weights.*no such weights"):
            await engine.update_weights(weights(1))
        assert engine.version == 0


async def test_an_update_waits_for_a_server_that_is_fenced_for_a_moment(
    server: ProtocolServer, engine_over: Engines
) -> None:
    server.faults.append(500)
    async with engine_over([server]) as engine, asyncio.TaskGroup() as group:
        server.is_healthy = False
        call = group.create_task(engine.agenerate(ask()))
        await server.until(lambda: "model_info" in [name for name, _ in server.calls])
        update = group.create_task(engine.update_weights(weights(1)))
        await asyncio.sleep(0.02)
        server.is_healthy = True
        await update
        assert engine.version == 1
        assert (await call).output_versions == (1, 1, 1, 1)


async def test_a_cancelled_update_leaves_no_server_paused(server: ProtocolServer, engine_over: Engines) -> None:
    server.load_gate.clear()
    async with engine_over([server]) as engine, asyncio.TaskGroup() as group:
        update = group.create_task(engine.update_weights(weights(1)))
        await server.until(lambda: "update_weights_from_disk" in server.names())
        update.cancel()
        server.load_gate.set()
        assert_seamless(await engine.agenerate(ask()), 4)
    assert server.pause_mode is None


async def test_an_engine_closed_in_the_middle_of_an_update_leaves_no_server_paused(
    server: ProtocolServer, engine_over: Engines
) -> None:
    server.load_gate.clear()
    async with engine_over([server]) as engine, asyncio.TaskGroup() as group:
        update = group.create_task(engine.update_weights(weights(1)))
        await server.until(lambda: "update_weights_from_disk" in server.names())
        update.cancel()
        await engine.aclose()
        with pytest.raises(EngineClosedError):
            await engine.update_weights(weights(2))
    assert server.pause_mode is None


async def test_an_update_while_paused_leaves_the_engine_paused(server: ProtocolServer, engine_over: Engines) -> None:
    async with engine_over([server]) as engine, asyncio.TaskGroup() as group:
        await engine.pause()
        await engine.update_weights(weights(1))
        assert server.pause_mode == "in_place"
        call = group.create_task(engine.agenerate(ask()))
        await asyncio.sleep(0.02)
        assert server.requests == []
        await engine.resume()
        assert (await call).output_versions == (1, 1, 1, 1)


async def test_resuming_waits_for_an_update_under_way(server: ProtocolServer, engine_over: Engines) -> None:
    async with engine_over([server]) as engine, asyncio.TaskGroup() as group:
        await engine.pause()
        server.load_gate.clear()
        update = group.create_task(engine.update_weights(weights(1)))
        await server.until(lambda: "update_weights_from_disk" in server.names())
        resume = group.create_task(engine.resume())
        await asyncio.sleep(0.02)
        assert server.names()[-1] == "update_weights_from_disk"
        server.load_gate.set()
        await update
        await resume
        assert server.names()[-1] == "continue_generation"


async def test_a_version_that_goes_backwards_is_refused(server: ProtocolServer, engine_over: Engines) -> None:
    async with engine_over([server]) as engine:
        await engine.update_weights(weights(5))
        with pytest.raises(ValueError, match="version 2 was published, but the servers hold 5"):
            await engine.update_weights(weights(2))
        assert (await engine.agenerate(ask())).output_versions == (5, 5, 5, 5)


async def test_the_same_version_can_be_published_again(server: ProtocolServer, engine_over: Engines) -> None:
    async with engine_over([server]) as engine:
        await engine.update_weights(weights(5))
        await engine.update_weights(weights(5))
    assert server.names().count("update_weights_from_disk") == 2

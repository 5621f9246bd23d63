"""Weight updates: every server by itself, in flight, and those that fail are fenced off and brought up to date."""

import asyncio
from typing import Any

import pytest
from protocol_server import Server, ask, assert_seamless, over, turns, when
from scripted_weights import ScriptedWeights, raising, weights

from arl.api.errors import EngineClosedError, ServerError
from arl.api.types import ModelResponse


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

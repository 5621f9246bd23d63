"""Servers that fail: their requests go elsewhere without losing or repeating a token, and they come back."""

import asyncio
import itertools
import math

import pytest
from aiohttp import web
from protocol_server import Server, ask, assert_seamless, outcome, over, turns, when
from scripted_weights import ScriptedWeights, weights

from arl.api.engine import WeightServer
from arl.api.errors import RequestTimeoutError, ServerError

ASKING = ("model_info", "health", "server_info", "get_server_info", "v1/models", "tokenize")


@pytest.mark.parametrize("fault", ["reset", 500, 503, 429])
async def test_a_request_whose_server_fails_is_answered_by_another(server: Server, other: Server, fault: str | int):
    server.faults.append(fault)
    async with over(server, other) as engine:
        server.is_healthy = False
        assert_seamless(await engine.agenerate(ask(session="s")), 4)
        assert len(server.requests) == 1
        assert len(other.requests) == 1


async def test_a_request_is_sent_to_a_busy_server_rather_than_again_to_the_one_that_failed_it(
    server: Server, other: Server
):
    other.is_automatic = False
    async with over(server, other) as engine, asyncio.TaskGroup() as group:
        await engine.pause()
        for session in ("a", "b", "b", "b"):
            group.create_task(engine.agenerate(ask(session=session)))
        await engine.resume()
        await other.until(lambda: len(other.running) == 3)
        server.faults.append(500)
        call = await other.begin(group, engine.agenerate(ask(session="a")))
        other.advance(4)
        assert_seamless(await call, 4)
    assert len(server.requests) == 2


async def test_a_request_that_always_fails_gives_up_after_max_retries(server: Server):
    server.faults += [500] * 10
    async with over(server, max_retries=2) as engine:
        with pytest.raises(ServerError, match=r"failed 3 times.*HTTP 500: it broke"):
            await engine.agenerate(ask())
    assert len(server.requests) == 3


async def test_a_server_that_comes_back_without_the_weights_gets_them_before_any_request(server: Server, other: Server):
    async with over(server, other) as engine:
        await engine.update_weights(weights(1))
        await server.stop()
        assert_seamless(await engine.agenerate(ask()), 4)
        server.label = "default"
        server.calls.clear()
        await server.start()
        await server.until(lambda: "continue_generation" in server.names())
        assert server.names(without=ASKING) == ["pause_generation", "update_weights_from_disk", "continue_generation"]
        assert server.label == "1"
        while not server.requests:
            response = await engine.agenerate(ask())
        assert response.output_versions == (1, 1, 1, 1)


async def test_a_server_that_comes_back_as_another_model_stays_out(server: Server, other: Server):
    for each in (server, other):
        each.info["model_type"] = "qwen3"
    async with over(server, other) as engine:
        await engine.update_weights(weights(1))
        server.label, server.info["model_type"] = "default", "llama"
        server.faults.extend([500, 500])
        server.calls.clear()
        await asyncio.gather(*(engine.agenerate(ask()) for _ in range(4)))
        await server.until(lambda: server.names().count("tokenize") == 2)
        assert "the model type is qwen3" in engine._pool.report()
        assert [s.address for s in engine._pool.in_service] == [other.address]
    assert "update_weights_from_disk" not in server.names()


async def test_a_server_that_comes_back_with_other_ranks_is_given_weights_as_such(server: Server, other: Server):
    num_ranks: list[int] = []

    async def note(at: WeightServer) -> None:
        if at.address == server.address:
            num_ranks.append(at.num_ranks)

    async with over(server, other) as engine:
        await engine.update_weights(ScriptedWeights(1, before=note))
        server.label, server.tells["server_info"] = "default", {"tp_size": 2}
        server.faults.extend([500, 500])
        await asyncio.gather(*(engine.agenerate(ask()) for _ in range(4)))
        await server.until(lambda: server.label == "1")
    assert num_ranks == [1, 2]


async def test_a_late_probe_loads_no_weights_that_newer_ones_have_replaced(
    server: Server, other: Server, monkeypatch: pytest.MonkeyPatch
):
    asked, gate = asyncio.Event(), asyncio.Event()

    async def answer_late(body: dict[str, object]) -> dict[str, object]:
        asked.set()
        await gate.wait()
        return {"model_path": "m", "weight_version": server.label}

    async with over(server, other) as engine:
        monkeypatch.setattr(server, "_on_model_info", answer_late)
        server.load_works = False
        await engine.update_weights(weights(1))
        await asked.wait()
        await engine.update_weights(weights(2))
        server.load_works = True
        server.calls.clear()
        gate.set()
        await server.until(lambda: server.label == "2")
    loads = [body["model_path"] for name, body in server.calls if name == "update_weights_from_disk"]
    assert loads == ["/weights/2"]


async def test_the_version_is_the_last_that_was_served_also_if_nobody_looked_while_it_was(server: Server):
    async with over(server) as engine, asyncio.TaskGroup() as group:
        await engine.update_weights(weights(1))
        server.is_healthy = False
        server.faults.append(500)
        call = group.create_task(engine.agenerate(ask()))
        await server.until(lambda: not engine._pool.in_service)
        assert engine.version == 1
        server.is_healthy = True
        await call


async def test_a_server_that_lost_its_weights_unnoticed_has_its_answer_thrown_away(server: Server):
    async with over(server) as engine:
        await engine.update_weights(weights(1))
        server.label = "default"  # as after a quick restart
        response = await engine.agenerate(ask())
        assert len(server.requests) == 2
    assert response.output_versions == (1, 1, 1, 1)


async def test_a_hanging_request_is_named_with_its_server_and_the_time_and_the_server_is_probed(server: Server):
    server.faults.append("hang")
    async with over(server, request_timeout_s=0.2) as engine:
        request = ask()
        with pytest.raises(RequestTimeoutError) as raised:
            await engine.agenerate(request)
        await server.until(lambda: len(server.aborted) == 1)
        await server.until(lambda: "continue_generation" in server.names())  # the probe ends with it
    assert request.rid in str(raised.value)
    assert server.address in str(raised.value)
    assert "0.2 s (engine.request_timeout_s)" in str(raised.value)


async def test_a_request_that_waits_for_a_paused_server_times_out_and_casts_no_suspicion_on_it(server: Server):
    server.faults.append("hang")
    async with over(server, request_timeout_s=0.5) as engine, asyncio.TaskGroup() as group:
        await engine.pause()
        call = group.create_task(outcome(engine.agenerate(ask())))
        await turns()
        await engine.resume()
        await server.until(lambda: bool(server.running))
        (attempt,) = engine._pool.servers[0].attempts
        attempt.sent_at += 20.0  # as after so long a pause, however late the time limit is noticed
        server.calls.clear()
        error = await call
        assert isinstance(error, RequestTimeoutError)
        assert "not answered within 0.5 s" in str(error)
        assert engine._pool.in_service
        assert "model_info" not in [name for name, _ in server.calls]
        await engine.pause()
        with pytest.raises(RequestTimeoutError, match="while generation was paused"):
            await engine.agenerate(ask())


async def test_waiting_for_servers_that_are_gone_ends_with_who_they_are_and_why(server: Server, other: Server):
    async with over(server, other, request_timeout_s=0.5, max_retries=5) as engine:
        await server.stop()
        await other.stop()
        with pytest.raises(ServerError) as raised:
            await engine.agenerate(ask())
    assert server.address in str(raised.value)
    assert other.address in str(raised.value)
    assert "could not be reached" in str(raised.value)


async def test_requests_stuck_on_a_server_that_fell_ill_are_sent_elsewhere(server: Server, other: Server):
    server.faults += ["hang", "hang", 500]
    async with over(server, other) as engine, asyncio.TaskGroup() as group:
        stuck = [group.create_task(engine.agenerate(ask(session=session))) for session in ("a", "b", "c", "d")]
        await server.until(lambda: len(server.running) == 2)
        server.is_healthy = False
        # The third request there: its failure brings the illness to light.
        assert_seamless(await engine.agenerate(ask(session="a")), 4)
        for call in stuck:
            assert_seamless(await call, 4)


async def test_hundreds_run_at_once_and_are_aborted_when_cancelled(server: Server):
    server.is_automatic = False
    async with over(server) as engine:
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(engine.agenerate(ask())) for _ in range(300)]
            await server.until(lambda: len(server.running) == 300)
            for call in calls:
                call.cancel()
        await server.until(lambda: len(server.aborted) == 300 and not server.running)
        assert set(server.aborted) == {sent["rid"] for sent in server.requests}
        await when(lambda: not engine._upkeep._tasks)
        assert not any(s.attempts for s in engine._pool.servers)


async def test_a_server_that_does_not_abort_gets_no_requests_until_it_answers_a_probe(server: Server, other: Server):
    server.faults.append("hang")
    async with over(server, other) as engine, asyncio.TaskGroup() as group:
        server.tells |= {"abort_request": 500, "model_info": 503}
        call = await server.begin(group, engine.agenerate(ask()))
        call.cancel()
        await server.until(lambda: server.names(without=()).count("model_info") == 2)  # a check, and the first probe
        assert "it did not abort a request" in engine._pool.report()
        assert [s.address for s in engine._pool.in_service] == [other.address]
        server.tells.clear()
        await server.until(lambda: "continue_generation" in server.names())


async def test_one_failed_request_is_tried_elsewhere_and_a_second_in_a_row_fences(server: Server, other: Server):
    async with over(server, other) as engine:
        server.faults.append(500)
        assert_seamless(await engine.agenerate(ask(session="s")), 4)
        assert [len(each.requests) for each in (server, other)] == [1, 1]
        await server.until(lambda: "model_info" in server.names(without=()))
        await engine.agenerate(ask())  # it serves on, and a success forgives the failure
        assert [len(each.requests) for each in (server, other)] == [2, 1]
        for expected in (0, 1):
            server.faults.append(500)
            await engine.agenerate(ask())
            assert engine.counters()["servers/fences"] == expected
        assert engine.counters()["servers/failed_requests"] == 3
        while len(engine._pool.in_service) < 2:
            await engine._pool.changed()
        server.faults.append(500)
        await engine.agenerate(ask())  # its return forgives them too
        assert engine.counters()["servers/fences"] == 1


@pytest.mark.parametrize("call_name", ["pause_generation", "continue_generation"])
async def test_a_pause_or_resume_that_fails_once_is_repeated_and_loses_no_request(server: Server, call_name: str):
    server.is_automatic = False
    failed: list[str] = []

    async def fail_once(body: dict[str, object]) -> dict[str, object]:
        if not failed:
            failed.append(call_name)
            raise web.HTTPInternalServerError
        return await act(body)

    act = getattr(server, f"_on_{call_name}")
    async with over(server) as engine, asyncio.TaskGroup() as group:
        call = await server.begin(group, engine.agenerate(ask()))
        setattr(server, f"_on_{call_name}", fail_once)
        await engine.update_weights(weights(1))
        server.advance(4)
        assert_seamless(await call, 4)
    assert failed
    assert len(server.requests) == 1


NONSENSE: dict[str, list[object]] = {
    "model_info": ["[" * 5000, "[]", {"model_path": 3, "weight_version": []}],
    "v1/models": [{"data": 3}, {"data": [3]}, {"data": {"a": 1}}],
    "server_info": [{"tp_size": "x"}, {"dp_size": [2]}, "<html>"],
    "tokenize": [{"tokens": "a"}, "[" * 5000],
}


@pytest.mark.parametrize(("path", "told"), [(path, told) for path, all_told in NONSENSE.items() for told in all_told])
async def test_a_probe_that_is_answered_with_nonsense_ends_no_engine(
    server: Server, other: Server, path: str, told: object
):
    for each in (server, other):
        each.tells["tokenize"] = {"tokens": [1, 2]}
    async with over(server, other) as engine:
        await engine.update_weights(weights(1))
        server.label, tokens = "default", server.tells["tokenize"]  # as after a restart, so that it is greeted again
        server.tells[path] = told
        server.calls.clear()
        engine._upkeep.fence(engine._pool.servers[0], "a test")
        await server.until(lambda: server.names(without=()).count(path) > 1 or server.label == "1")
        server.tells = {"tokenize": tokens}
        await server.until(lambda: server.label == "1")
        assert_seamless(await engine.agenerate(ask()), 4)


async def test_a_server_that_is_fenced_again_and_again_in_updates_has_one_probe_and_after_its_removal_none(
    server: Server, other: Server
):
    async with over(server, other) as engine:
        for version in (1, 2, 3):
            server.load_gate.clear()
            updating = asyncio.create_task(engine.update_weights(weights(version)))
            await server.until(lambda version=version: server.names().count("update_weights_from_disk") == version)
            engine._upkeep.fence(engine._pool.servers[0], "a test")
            server.load_gate.set()
            await updating
        server.is_healthy = False
        engine._upkeep.fence(engine._pool.servers[0], "a test")
        await engine.remove_server(server.address)
        await when(lambda: not engine._upkeep._tasks)  # a probe would not end: the server is unwell


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request takes too long after 0.1 s."""
    for name, value in (("_LEAST_S", 0.1), ("_RETURN_S", 0.1), ("_ENOUGH", 2), ("_LOOK_S", 0.02)):
        monkeypatch.setattr(f"arl.engine.client.watchdog.{name}", value)


async def test_a_request_that_hangs_goes_elsewhere_long_before_its_time_limit(
    server: Server, other: Server, impatient: None
):
    async with over(server, other, request_timeout_s=600.0) as engine:
        for _ in range(2):
            await engine.agenerate(ask(session="s"))
        server.faults.append("hang")
        assert_seamless(await engine.agenerate(ask(session="s")), 4)
        assert [len(each.requests) for each in (server, other)] == [3, 1]
        assert server.aborted == [server.requests[-1]["rid"]]


async def test_a_request_that_hangs_goes_elsewhere_though_updates_pause_its_server_again_and_again(
    server: Server, other: Server, impatient: None
):
    async with over(server, other, request_timeout_s=600.0) as engine, asyncio.TaskGroup() as group:
        for _ in range(2):
            await engine.agenerate(ask(session="s"))
        server.faults.append("hang")
        call = await server.begin(group, engine.agenerate(ask(session="s")))
        for version in itertools.count(1):
            await engine.update_weights(weights(version))
            if call.done():
                break
            await asyncio.sleep(0.05)
        assert_seamless(await call, 4)
        assert server.aborted == [server.requests[-1]["rid"]]


async def test_a_request_that_its_server_was_told_to_return_keeps_its_tokens_through_a_pause(
    server: Server, impatient: None
):
    async with over(server, max_retries=0) as engine, asyncio.TaskGroup() as group:
        for _ in range(2):
            await engine.agenerate(ask())
        server.is_automatic = False
        server.abort_gate.clear()
        call = await server.begin(group, engine.agenerate(ask()))
        server.advance(2)
        await server.until(lambda: len(server.aborted) == 1)
        await engine.pause()
        (attempt,) = engine._pool.servers[0].attempts
        due = attempt.due
        await when(lambda: attempt.due > due)  # it got more time
        server.abort_gate.set()
        await engine.resume()
        await server.until(lambda: len(server.requests) == 4)
        server.advance(2)
        assert_seamless(await call, 4)
        assert len(server.requests[-1]["input_ids"]) == 3 + 2


@pytest.mark.parametrize("seed", [None, 7])
async def test_a_request_that_is_only_slow_keeps_its_tokens_and_is_cut_once(
    server: Server, impatient: None, seed: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("arl.engine.client.watchdog._RETURN_S", 600.0)  # it returns the request, however slowly
    async with over(server, max_retries=0) as engine, asyncio.TaskGroup() as group:
        for _ in range(2):
            await engine.agenerate(ask())
        server.is_automatic = False
        call = await server.begin(group, engine.agenerate(ask(seed=seed)))
        server.advance(2)
        if seed is None:
            await server.until(lambda: len(server.requests) == 4 and len(server.running) == 1)
            assert len(server.requests[-1]["input_ids"]) == 3 + 2
        (attempt,) = engine._pool.servers[0].attempts
        assert attempt.due == math.inf
        assert len(server.aborted) == (1 if seed is None else 0)
        server.advance(2)
        assert_seamless(await call, 4)
        assert engine.counters()["servers/failed_requests"] == 0

"""Servers that let go of their memory, as arl's client sees to it; conformance/test_server_engine.py asks real ones."""

import asyncio
from typing import Any

import pytest
from protocol_server import Server, ask, over, turns, when
from scripted_weights import ScriptedWeights, weights

from arl.api.errors import ServerError, ServerFailedError
from arl.api.settings.engines import RELEASED
from arl.runtime.clocks import CLOCK, EpisodeClock

QUIET = ("health", "model_info", "server_info", "get_server_info", "v1/models", "tokenize")
SLEEP = ["pause_generation", "flush_cache", "update_weight_version", "release_memory_occupation"]
WAKE = ["resume_memory_occupation", "update_weight_version", "update_weights_from_disk", "continue_generation"]


async def test_a_server_is_idle_and_labelled_before_it_lets_go_and_loaded_before_it_serves(server: Server):
    async with over(server, pause_mode="retract") as engine:
        server.calls.clear()
        await engine.release_memory()
        await engine.release_memory()
        assert (server.names(without=QUIET), server.label, engine.is_asleep) == (SLEEP, RELEASED, True)
        await engine.update_weights(weights(1))
        assert (server.names(without=QUIET), server.label, engine.is_asleep) == (SLEEP + WAKE, "1", False)


async def test_a_server_that_still_runs_a_batch_is_awaited(server: Server):
    """Stock SGLang would end itself."""
    server.tells["flush_cache"] = 400
    async with over(server, pause_mode="retract") as engine, asyncio.TaskGroup() as group:
        releasing = group.create_task(engine.release_memory())
        await server.until(lambda: server.names().count("flush_cache") == 3)
        assert "release_memory_occupation" not in server.names()
        del server.tells["flush_cache"]
        await releasing
        assert server.names()[-1] == "release_memory_occupation"


async def test_the_time_of_requests_and_episodes_stands_still_while_servers_sleep(server: Server):
    server.is_automatic = False
    clock = EpisodeClock(60.0)

    async def episode() -> Any:
        CLOCK.set(clock)
        async with clock.begin():
            return await engine.agenerate(ask(2))

    async with over(server, pause_mode="retract") as engine, asyncio.TaskGroup() as group:
        running = await server.begin(group, episode())
        await engine.release_memory()
        left_s = clock.left_s
        waiting = group.create_task(engine.agenerate(ask(2)))
        await turns()
        assert [limit.when() for limit in engine._pool.clock._deadlines] == [None, None]
        assert (clock.is_still, clock.left_s) == (True, left_s)
        server.is_automatic = True
        await engine.update_weights(weights(1))
        server.advance(2)
        assert len((await running).output_ids) == len((await waiting).output_ids) == 2
        assert not clock.is_still


async def test_a_server_that_was_started_again_meanwhile_sleeps_too_and_comes_back_with_the_others(
    server: Server, other: Server
):
    async with over(server, other, pause_mode="retract") as engine:
        await engine.update_weights(weights(1))
        await engine.release_memory()
        await other.stop()
        other.label = "default"
        engine._upkeep.fence(engine._pool.servers[1], "it died")
        await other.start()
        other.calls.clear()
        await other.until(lambda: "release_memory_occupation" in other.names())
        assert not {"continue_generation", "update_weights_from_disk"} & {*other.names()}
        await engine.update_weights(weights(2))
        await other.until(lambda: other.label == "2" and "continue_generation" in other.names())
        assert server.label == "2"


async def test_memory_that_a_server_has_is_not_asked_for_again_after_a_failed_load(server: Server):
    """It would end stock SGLang."""

    async def fail_once(_: object) -> None:
        if len(update.calls) == 2:
            raise ServerFailedError("its connection broke")

    update = ScriptedWeights(version=1, midway=fail_once)
    async with over(server, pause_mode="retract") as engine:
        await engine.release_memory()
        await engine.update_weights(update)
        assert (engine.version, server.names().count("resume_memory_occupation")) == (1, 1)


async def test_a_server_that_refuses_to_let_go_ends_the_turn(server: Server):
    server.tells["release_memory_occupation"] = 404
    async with over(server, pause_mode="retract") as engine:
        with pytest.raises(ServerError, match="release_memory_occupation"):
            await engine.release_memory()


async def test_a_server_that_cannot_let_go_of_its_memory_is_refused_at_the_start(server: Server):
    with pytest.raises(
        ServerError, match=r"cannot let go of its memory, .*: start it with --enable-memory-saver, on a GPU"
    ):
        async with over(server, colocated=True):
            pass
    server.tells["server_info"] = {"enable_memory_saver": True}
    async with over(server, colocated=True) as engine:
        await engine.release_memory()
    assert server.names(without=QUIET)[-2:] == ["update_weight_version", "continue_generation"]


async def test_a_server_that_dies_before_it_is_idle_is_not_waited_for(server: Server):
    server.tells["flush_cache"] = 500
    async with over(server, pause_mode="retract") as engine:
        async with asyncio.timeout(5):
            await engine.release_memory()
        assert engine.counters()["servers/fenced"] == 1
        assert "release_memory_occupation" not in server.names()


async def test_a_server_that_joins_while_others_sleep_sleeps_until_they_wake_however_late(
    server: Server, other: Server
):
    other.label = RELEASED  # as another run left it; its memory is the trainer's now
    async with over(server, pause_mode="retract") as engine, asyncio.TaskGroup() as group:
        await engine.release_memory()
        joining = group.create_task(engine.add_server(other.address))
        await other.until(lambda: other.names(without=()).count("model_info") == 2)
        await turns()
        assert [limit.when() for limit in engine._pool.clock._deadlines] == [None]
        assert not {*WAKE} & {*other.names()}
        await engine.update_weights(weights(1))
        await joining
        assert (other.label, other.names(without=QUIET)) == ("1", [*WAKE[:2], "pause_generation", *WAKE[2:], WAKE[3]])


async def test_the_devices_are_free_only_when_a_server_that_is_just_joining_sleeps_too(server: Server, other: Server):
    async with over(server, pause_mode="retract") as engine, asyncio.TaskGroup() as group:
        await engine.update_weights(weights(1))
        other.load_gate.clear()
        joining = group.create_task(engine.add_server(other.address))
        await other.until(lambda: "update_weights_from_disk" in other.names())
        releasing = group.create_task(engine.release_memory())
        await when(lambda: engine._pool.servers[0].state == "asleep")
        await turns()
        assert not releasing.done()
        other.load_gate.set()
        await releasing
        assert (other.names()[-1], other.label) == ("release_memory_occupation", RELEASED)
        await engine.update_weights(weights(2))
        await joining
        assert other.label == "2"


async def test_a_server_whose_addition_is_given_up_while_others_sleep_is_left_awake(server: Server, other: Server):
    async with over(server, pause_mode="retract") as engine, asyncio.TaskGroup() as group:
        await engine.release_memory()
        joining = group.create_task(engine.add_server(other.address))
        await other.until(lambda: "release_memory_occupation" in other.names())
        joining.cancel()
        await asyncio.wait([joining])
        assert other.names(without=QUIET)[-3:] == [*WAKE[:2], "continue_generation"]


async def test_a_server_that_is_removed_while_it_sleeps_leaves_when_it_wakes(server: Server, other: Server):
    """Left running, it would take memory that the trainer has."""
    async with over(server, other, pause_mode="retract") as engine, asyncio.TaskGroup() as group:
        await engine.release_memory()
        removing = group.create_task(engine.remove_server(other.address))
        await turns()
        assert (removing.done(), "resume_memory_occupation" in other.names()) == (False, False)
        await engine.update_weights(weights(1))
        await removing
        assert other.names().count("resume_memory_occupation") == 1
        assert other.names(without=QUIET)[-1] == "continue_generation"

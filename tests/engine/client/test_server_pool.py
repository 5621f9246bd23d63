"""The states of a server: which calls lead where, and which are bugs."""

import asyncio
import math
import random
from contextlib import suppress
from typing import Any, cast

import pytest

from arl.api.events import IterationSums, ServerWorked
from arl.engine.client.load_balancer import Line
from arl.engine.client.server_pool import Attempt, Server, ServerPool, ServerState
from arl.engine.client.sglang_client import SGLangClient

Calls = tuple[str, ...]

PATHS: dict[ServerState, Calls] = {
    ServerState.JOINING: (),
    ServerState.SERVING: ("admit",),
    ServerState.PAUSED: ("admit", "pause"),
    ServerState.ASLEEP: ("admit", "pause", "sleep"),
    ServerState.LOADING: ("admit", "pause", "begin_load"),
    ServerState.FENCED: ("admit", "fence"),
    ServerState.DRAINING: ("admit", "leave"),
    ServerState.GONE: ("admit", "drop"),
}
"""How a server that joined gets into each state."""
ARGUMENTS: dict[str, tuple[object, ...]] = {
    "sleep": (0.1,),
    "wake": (0.1,),
    "end_load": (1,),
    "turn_to": (1, "a"),
    "fence": ("it failed",),
}


@pytest.fixture
async def pool() -> ServerPool:
    return ServerPool(version=0)


def brought(pool: ServerPool, *calls: str) -> Server:
    """A server that went through these calls."""
    server = pool.join(SGLangClient(cast(Any, None), "http://127.0.0.1:9"))
    for call in calls:
        getattr(pool, call)(server, *ARGUMENTS.get(call, ()))
    return server


@pytest.mark.parametrize(
    ("state", "call"),
    [
        (ServerState.SERVING, "begin_load"),
        (ServerState.DRAINING, "begin_load"),
        (ServerState.LOADING, "begin_load"),
        (ServerState.SERVING, "end_load"),
        (ServerState.PAUSED, "end_load"),
        (ServerState.SERVING, "sleep"),
        (ServerState.PAUSED, "wake"),
        (ServerState.ASLEEP, "begin_load"),
        *(
            (state, call)
            for state in (ServerState.ASLEEP, ServerState.LOADING)
            for call in ("pause", "resume", "admit", "turn_to")
        ),
    ],
)
async def test_a_load_out_of_turn_is_a_bug(pool: ServerPool, state: ServerState, call: str):
    with pytest.raises(RuntimeError, match=f"is {state}: {call} is out of turn"):
        brought(pool, *PATHS[state], call)


@pytest.mark.parametrize("state", [ServerState.JOINING, ServerState.FENCED, ServerState.GONE])
async def test_a_server_out_of_service_is_loaded_without_being_put_into_service(pool: ServerPool, state: ServerState):
    server = brought(pool, *PATHS[state], "pause", "begin_load", "end_load", "resume")
    assert server.state == state
    assert (server.version, pool.version) == (1, 0)


@pytest.mark.parametrize("state", [ServerState.JOINING, ServerState.PAUSED, ServerState.FENCED])
async def test_a_server_that_leaves_drains_from_where_it_would_serve(pool: ServerPool, state: ServerState):
    server = brought(pool, *PATHS[state], "leave")
    assert server.state == state
    pool.admit(server)
    pool.resume(server)
    assert server.state == ServerState.DRAINING
    pool.stay(server)
    assert server.state == ServerState.SERVING


async def test_a_load_that_breaks_off_leaves_weights_without_version(pool: ServerPool):
    server = brought(pool, "admit", "pause", "begin_load", "fence")
    assert not server.weights.is_whole
    assert server.reason == "it failed"
    assert not pool.fence(server, "another reason")
    assert server.reason == "it failed"


@pytest.mark.parametrize(
    ("path", "call"), [(("admit", "pause"), "resume"), ((), "admit"), (("admit", "leave"), "stay")]
)
async def test_a_server_that_serves_again_wakes_waiting_requests(pool: ServerPool, path: Calls, call: str):
    server = brought(pool, *path)
    waiting = asyncio.create_task(pool.changed())
    await asyncio.sleep(0)
    getattr(pool, call)(server)
    await asyncio.wait_for(waiting, 1)
    assert await asyncio.wait_for(Line(pool).find(None, math.inf), 1) is server


async def test_a_request_whose_server_fails_as_it_is_chosen_goes_to_another(pool: ServerPool):
    failing, other = brought(pool), brought(pool)
    waiting = asyncio.create_task(Line(pool).find("s", math.inf))
    await asyncio.sleep(0)
    pool.admit(failing)
    await asyncio.sleep(0)  # it is chosen, and the request not yet awake
    pool.admit(other)
    pool.fence(failing, "it failed")
    assert await asyncio.wait_for(waiting, 1) is other


async def test_what_the_pool_notes_is_what_a_look_at_all_servers_finds(pool: ServerPool):
    rng, attempts, last = random.Random(0), list[tuple[Server, Attempt]](), pool.version
    for step in range(6000):
        server = rng.choice(pool.servers) if pool.servers else brought(pool)
        match rng.choice(("join", "expect", "begin", "end", "promise", "move", "move", "move", "move", "drop")):
            case "join" if len(pool.servers) < 8:
                brought(pool, *(("admit",) if rng.random() < 0.7 else ()))
            case "expect":
                pool.expect(rng.sample(pool.servers, rng.randrange(len(pool.servers) + 1)))
            case "begin":
                attempts.append((server, pool.begin(server, "r", asyncio.timeout(None))))
            case "end" if attempts:
                pool.end(*attempts.pop(rng.randrange(len(attempts))))
            case "promise":
                server.num_coming = 1 - server.num_coming
            case "drop" if rng.random() < 0.2:
                pool.drop(server)
            case _:
                call = rng.choice(("admit", "pause", "begin_load", "end_load", "resume", "fence", "leave", "stay"))
                arguments = {"end_load": (step // 100,)}.get(call, ARGUMENTS.get(call, ()))
                with suppress(RuntimeError):  # it is out of turn
                    getattr(pool, call)(server, *arguments)
        ready = [one for one in pool.servers if one.state is ServerState.SERVING]
        assert pool.ready == ready
        is_outage = pool.expectation.is_outage
        out = [s for s in pool.expectation.servers if (s.state == "fenced" if is_outage else s.is_paused)]
        soon = [one for one in out if not one.is_leaving]
        assert {*pool.expected} == {*soon}
        last = min((one.version for one in pool.in_service), default=last)
        assert pool.version == last


async def test_generated_tokens_are_counted_from_the_first_pause_on_over_servers_and_their_restarts(pool: ServerPool):
    def told(server: str, decoded: float, begun: float = 0.0) -> ServerWorked:
        one = IterationSums(reads=False, number=1, decoded=decoded, context=0, prompt=0, begun=begun, seconds=0.1)
        return ServerWorked(server=server, iterations=[one, one])

    assert pool.num_generated is None
    for worked, total in [
        (told("a", 50), 0),
        (told("a", 60, 5), 30),
        (told("b", 0), 30),
        (told("b", 7), 44),
        (told("b", 2), 48),
        (told("a", 60, 5), 48),
    ]:
        pool.note_work(worked)
        assert pool.num_generated == total

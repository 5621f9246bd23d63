"""Which server gets a request when several will serve soon: its share, in order, and none that does not come back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from protocol_server import Server, ask, over
from scripted_weights import weights


@pytest.fixture
async def servers() -> AsyncIterator[list[Server]]:
    """Four servers that load when their gates open, and answer when the test says so."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(Server()) for _ in range(4)]
        for server in servers:
            server.is_automatic = False
            server.load_gate.clear()
        yield servers


async def all_loading(servers: list[Server]) -> None:
    for server in servers:
        await server.until(lambda server=server: "update_weights_from_disk" in server.names())


def serve_on(servers: list[Server]) -> None:
    """Open the gates, answer what runs, and whatever comes."""
    for server in servers:
        server.load_gate.set()
        server.is_automatic = True
        server.advance(4)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held for servers that are expected is held for ever."""
    monkeypatch.setattr("arl.engine.client.load_balancer._HOLD_S", 600.0)


@pytest.mark.parametrize("mode", ["in_place", "abort"])
async def test_requests_held_by_an_update_are_shared_among_the_servers_as_they_come_back(
    servers: list[Server], mode: str
):
    async with over(*servers, pause_mode=mode) as engine, asyncio.TaskGroup() as group:
        running = group.create_task(engine.update_weights(weights(1)))
        await all_loading(servers)
        calls = [group.create_task(engine.agenerate(ask(session=f"{i}"))) for i in range(32)]
        for number, server in enumerate(servers, start=1):
            server.load_gate.set()
            await server.until(lambda server=server: len(server.running) >= 8)
            assert [len(each.running) for each in servers] == [8] * number + [0] * (4 - number)
        serve_on(servers)
        await asyncio.wait([*calls, running])
        for session in range(32):  # each stays where it went
            await engine.agenerate(ask(session=f"{session}"))
    assert [len(each.requests) for each in servers] == [16] * 4


async def test_a_resumed_engine_shares_out_what_waited(servers: list[Server]):
    async with over(*servers) as engine, asyncio.TaskGroup() as group:
        for server in servers[1:]:
            server.resume_gate.clear()
        await engine.pause()
        calls = [group.create_task(engine.agenerate(ask())) for _ in range(16)]
        resuming = group.create_task(engine.resume())
        await servers[0].until(lambda: len(servers[0].running) == 4)
        for server in servers[1:]:
            server.resume_gate.set()
            await server.until(lambda server=server: len(server.running) == 4)
        serve_on(servers)
        await asyncio.wait([*calls, resuming])


async def test_requests_wait_in_order_and_the_next_goes_when_one_has_ended(servers: list[Server], held: None):
    first = servers[0]
    async with over(*servers) as engine, asyncio.TaskGroup() as group:
        running = group.create_task(engine.update_weights(weights(1)))
        await all_loading(servers)
        calls = [group.create_task(engine.agenerate(ask(i + 1))) for i in range(12)]
        first.load_gate.set()
        await first.until(lambda: len(first.requests) == 3)
        calls.append(group.create_task(engine.agenerate(ask(13))))
        first.advance(2)  # ends the first two; 11 are left, and a share is 3 of them
        await first.until(lambda: len(first.requests) == 5)
        asked = [sent["sampling_params"]["max_new_tokens"] for sent in first.requests]
        assert asked == [1, 2, 3, 4, 5]
        serve_on(servers)
        for server in servers:
            group.create_task(_answer_all(server, running))
        await asyncio.gather(*calls)


async def _answer_all(server: Server, until: asyncio.Task[object]) -> None:
    while server.running or not until.done():
        server.advance(20)
        await asyncio.sleep(0.01)


async def test_a_server_that_fails_gives_its_share_back_at_once(servers: list[Server], held: None):
    first, *others = servers
    async with over(*servers) as engine, asyncio.TaskGroup() as group:
        running = group.create_task(engine.update_weights(weights(1)))
        await all_loading(servers)
        calls = [group.create_task(engine.agenerate(ask())) for _ in range(12)]
        first.load_gate.set()
        await first.until(lambda: len(first.running) == 3)
        for server in others:
            server.load_works = server.is_healthy = False
            server.load_gate.set()
        await first.until(lambda: len(first.running) == 12)
        serve_on(servers)
        await asyncio.wait([*calls, running])


async def test_a_server_that_takes_too_long_gets_no_share(servers: list[Server], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("arl.engine.client.load_balancer._HOLD_S", 0.05)
    first = servers[0]
    async with over(*servers) as engine, asyncio.TaskGroup() as group:
        running = group.create_task(engine.update_weights(weights(1)))
        await all_loading(servers)
        calls = [group.create_task(engine.agenerate(ask())) for _ in range(12)]
        first.load_gate.set()
        await first.until(lambda: len(first.running) == 12)
        serve_on(servers)
        await asyncio.wait([*calls, running])


@pytest.mark.parametrize("hold_s", [600.0, 0.05])
async def test_after_an_outage_the_first_server_takes_its_share_and_the_rest_when_no_other_comes_back(
    servers: list[Server], hold_s: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("arl.engine.client.load_balancer._OUTAGE_HOLD_S", hold_s)
    async with over(*servers) as engine, asyncio.TaskGroup() as group:
        for server, known in zip(servers, engine._pool.servers, strict=True):
            server.is_healthy = False
            engine._upkeep.fence(known, "the network is gone")
        calls = [group.create_task(engine.agenerate(ask())) for _ in range(12)]
        servers[0].is_healthy = True
        if hold_s < 1:
            await servers[0].until(lambda: len(servers[0].running) == 12)
        else:
            for number, server in enumerate(servers, start=1):
                server.is_healthy = True
                await server.until(lambda server=server: len(server.running) >= 3)
                assert [len(each.running) for each in servers] == [3] * number + [0] * (4 - number)
        serve_on(servers)
        await asyncio.wait(calls)


async def test_rolling_holds_no_request_while_a_server_is_free(servers: list[Server], held: None):
    async with over(*servers, update_order="rolling") as engine, asyncio.TaskGroup() as group:
        running = group.create_task(engine.update_weights(weights(1)))
        await all_loading(servers[:1])
        calls = [group.create_task(engine.agenerate(ask())) for _ in range(12)]
        for server in servers[1:]:
            await server.until(lambda server=server: len(server.running) == 4)
        serve_on(servers)
        await asyncio.wait([*calls, running])


async def test_a_session_leaves_a_server_that_is_far_busier_than_another(server: Server, other: Server):
    async with over(server, other) as engine, asyncio.TaskGroup() as group:
        await engine.agenerate(ask(session="s"))
        server.is_automatic = False
        calls = [await server.begin(group, engine.agenerate(ask(session="s"))) for _ in range(9)]
        await engine.agenerate(ask(session="s"))
        assert [len(each.requests) for each in (server, other)] == [10, 1]
        server.advance(4)
        await asyncio.gather(*calls)


async def test_requests_that_give_up_in_line_let_the_next_pass(servers: list[Server]):
    async with over(*servers) as engine, asyncio.TaskGroup() as group:
        running = group.create_task(engine.update_weights(weights(1)))
        await all_loading(servers)
        early = [group.create_task(engine.agenerate(ask())) for _ in range(4)]
        late = [group.create_task(engine.agenerate(ask())) for _ in range(4)]
        while len(engine._line._line) < 8:  # noqa: ASYNC110 - the line sets no event
            await asyncio.sleep(0)
        for call in early:
            call.cancel()
        serve_on(servers)
        await asyncio.wait([*late, running])
    assert sum(len(server.requests) for server in servers) == 4

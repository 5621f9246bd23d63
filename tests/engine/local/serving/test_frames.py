"""Calls of /generate in frames: the same answers as over HTTP, to the bit, for less."""

import asyncio
import base64
import gc
import hashlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import aiohttp
import numpy as np
import pytest
from embedded_server import server_here
from protocol_client import Client

from arl.api.errors import EngineClosedError, PromptTooLongError, ServerError
from arl.api.settings.engines import ClientConfig
from arl.api.types import ModelRequest, ModelResponse, SamplingParams
from arl.engine.client.frame_client import FrameClient
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.client.server_pool import Server
from arl.engine.client.sglang_client import SGLangClient
from arl.engine.frames import (
    PATH,
    BrokenFrameError,
    Call,
    Cancel,
    Result,
    calls_of,
    messages_of,
    results_of,
)
from arl.engine.local import frame_server
from arl.runtime.http.client import Connections

LONG = SamplingParams(max_new_tokens=4000, ignore_eos=True)


@asynccontextmanager
async def engine_over(
    url: str, *, takes_frames: bool = True
) -> AsyncIterator[tuple[RemoteInferenceEngine, SGLangClient]]:
    async with RemoteInferenceEngine([url], ClientConfig(request_timeout_s=60.0)) as engine:
        client = engine._pool.servers[0].client
        assert client.takes_frames
        client.takes_frames = takes_frames
        yield engine, client


def connection_of(client: SGLangClient) -> FrameClient:
    assert client._frames is not None
    return client._frames


async def turns(engine: RemoteInferenceEngine, session: str, num_turns: int = 3) -> list[ModelResponse]:
    """An episode whose prompt grows by answers and by what a tool says, and at last branches."""
    prompt, responses = [place % 31 for place in range(300)], list[ModelResponse]()
    for turn in range(num_turns):
        sampling = SamplingParams(max_new_tokens=12, temperature=0.9, top_p=0.95, seed=turn, ignore_eos=True)
        responses.append(await engine.agenerate(ModelRequest(input_ids=prompt, sampling=sampling, session_id=session)))
        prompt = [*prompt, *responses[-1].output_ids, 3, 1, 4, turn]
    branch = [*prompt[:310], 9, 9]
    sampling = SamplingParams(max_new_tokens=5, seed=9)
    return [*responses, await engine.agenerate(ModelRequest(input_ids=branch, sampling=sampling, session_id=session))]


def sets_of(response: ModelResponse) -> list[list[bool]]:
    """Whether each token was sampled among each id; the two ways store large sets differently."""
    return response.kept_ids.mask(288).tolist() if response.kept_ids else []


async def test_answers_are_the_same_to_the_bit_and_say_what_was_cached(
    shared_url: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    encode = Call.encode

    def noted(call: Call) -> bytes:
        sent.append(len(call.ids))
        return encode(call)

    monkeypatch.setattr(Call, "encode", noted)
    async with engine_over(shared_url, takes_frames=False) as (engine, _):
        wanted = await turns(engine, "a")
    assert sent == []
    await client.post("/flush_cache")
    async with engine_over(shared_url) as (engine, _):
        made = await turns(engine, "a")
    assert [replace(response, kept_ids=None) for response in made] == [replace(r, kept_ids=None) for r in wanted]
    assert list(map(sets_of, made)) == list(map(sets_of, wanted))
    assert sent == [300, 316, 332, 312]
    first, second, _, branch = made
    assert (first.cached_tokens, second.cached_tokens) == (0, 300 + 12 - 1)
    assert 310 - 12 <= branch.cached_tokens <= 310


async def test_stop_strings_names_and_refusals_are_as_over_http(shared_url: str, client: Client) -> None:
    async def outcomes(engine: RemoteInferenceEngine) -> list[object]:
        stopping = SamplingParams(max_new_tokens=30, stop=("a", "e"), seed=3)
        answer = await engine.agenerate(ModelRequest(input_ids=[5, 6], sampling=stopping))
        large = SamplingParams(max_new_tokens=3, seed=2**70)
        named = await engine.agenerate(ModelRequest(input_ids=[1] * 300, sampling=large, session_id="s" * 2000))
        others: list[object] = []
        for prompt, rid in (([7] * 9000, "a"), ([10**6], "b"), ([1, 2], "r" * 70_000), ([1, 2], "\ud800")):
            try:
                others.append(await engine.agenerate(ModelRequest(input_ids=prompt, sampling=large, rid=rid)))
            except (PromptTooLongError, ServerError) as error:
                others.append((type(error), str(error)))
        return [answer, named, *others]

    async with engine_over(shared_url, takes_frames=False) as (engine, _):
        wanted = await outcomes(engine)
    async with engine_over(shared_url) as (engine, there):
        assert await outcomes(engine) == wanted
        assert connection_of(there)._waiting == {}


async def test_a_caller_that_gives_up_frees_its_place(shared_url: str, client: Client) -> None:
    async with engine_over(shared_url) as (engine, there), asyncio.TaskGroup() as group:
        call = group.create_task(engine.agenerate(ModelRequest(input_ids=[1, 2], sampling=LONG)))
        await client.until_running(1)
        connection = connection_of(there)
        there.abort = None  # type: ignore[method-assign, assignment] # the frame alone tells the server
        engine._upkeep.abort = lambda server, rid: None  # type: ignore[method-assign]
        call.cancel()
        await client.until_running(0)
        assert connection._waiting == {}


@pytest.mark.parametrize("takes_frames", [True, False])
async def test_one_request_may_be_sent_at_once_and_again_after_a_cancellation(
    shared_url: str, client: Client, takes_frames: bool
) -> None:
    request = ModelRequest(input_ids=[1, 2], sampling=SamplingParams(max_new_tokens=500, ignore_eos=True))
    async with engine_over(shared_url, takes_frames=takes_frames) as (engine, _), asyncio.TaskGroup() as group:
        await client.post("/pause_generation", {"mode": "in_place"})  # else they may end before they are seen
        first, second = (group.create_task(engine.agenerate(request)) for _ in range(2))
        await client.until_waiting(2)
        first.cancel()
        await asyncio.wait([first])
        await client.post("/continue_generation")
        third = await engine.agenerate(request)
        assert len(third.output_ids) == len((await second).output_ids) == 500
        assert engine.counters()["servers/failed_requests"] == 0


async def test_requests_outlive_their_connection(shared_url: str, client: Client) -> None:
    async with engine_over(shared_url) as (engine, there), asyncio.TaskGroup() as group:
        sampling = SamplingParams(max_new_tokens=200, ignore_eos=True)
        await client.post("/pause_generation", {"mode": "in_place"})  # else they may end before their connection
        calls = [group.create_task(engine.agenerate(ModelRequest(input_ids=[i], sampling=sampling))) for i in (1, 2)]
        await client.until_waiting(2)
        connection = connection_of(there)
        await connection._socket.close()
        await client.post("/continue_generation")
        assert [len((await call).output_ids) for call in calls] == [200, 200]
        assert connection_of(there) is not connection
        assert engine.counters()["servers/failed_requests"] == 2
        assert engine.counters()["servers/fences"] == 0  # the end of a connection is one fault, however many it carried


async def test_a_server_that_ends_sends_what_its_requests_have(model_a: str) -> None:
    here = server_here(model_a)
    url = await asyncio.to_thread(here.__enter__)
    connection = await FrameClient.opened(url, None, 10.0)
    assert connection is not None
    settings = b'{"sampling_params": {"max_new_tokens": 2000, "ignore_eos": true}}'
    async with asyncio.TaskGroup() as group:
        group.create_task(connection.run())
        call = group.create_task(connection.generate("r", np.arange(3, dtype=np.int32), settings, b""))
        async with aiohttp.ClientSession(url) as session:
            await Client(session).until_gained(2)
        await asyncio.to_thread(here.__exit__, None, None, None)
        result = await call
    assert b'"type":"abort"' in result.head
    assert len(result.ids) >= 2
    assert not connection.is_open


async def test_a_server_that_refuses_the_connection_is_asked_over_http(
    shared_url: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arl.engine.client.frame_client.PATH", "/nowhere")
    async with engine_over(shared_url) as (engine, there):
        assert len((await engine.agenerate(ModelRequest(input_ids=[1]))).output_ids) > 0
        assert not there.takes_frames


async def test_what_takes_a_websocket_and_never_answers_is_asked_over_http() -> None:
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await FrameClient.opened(url, None, 0.05) is None


@asynccontextmanager
async def connection_to_a_stalled_server() -> AsyncIterator[
    tuple[FrameClient, asyncio.Task[None], Callable[[], object]]
]:
    """A connection to a server that takes a WebSocket and then reads nothing; its run; and how the server cuts it."""
    taken = asyncio.Queue[asyncio.StreamWriter]()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        key = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key: "))[19:]
        accepted = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n")
        writer.write(b"Sec-WebSocket-Accept: " + accepted + b"\r\n\r\n")
        cast("asyncio.ReadTransport", writer.transport).pause_reading()
        taken.put_nowait(writer)

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        connection = await FrameClient.opened(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, 10.0)
        assert connection is not None
        cut = (await taken.get()).transport.abort
        running = asyncio.create_task(connection.run())
        await asyncio.sleep(0)  # it reads
        yield connection, running, cut
        cut()
        await asyncio.wait([running])


async def test_a_connection_to_a_server_that_reads_nothing_can_be_closed() -> None:
    async with connection_to_a_stalled_server() as (connection, running, _):
        call = asyncio.ensure_future(connection.generate("r", np.zeros(4_000_000, np.int32), b"{}", b""))
        await asyncio.sleep(0)
        while connection._outgoing:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await connection.aclose()
            await running
        with pytest.raises(ConnectionError, match="was closed"):
            await call


@pytest.mark.parametrize("end", ["cancelled", "closed", "cut"])
async def test_however_a_connection_ends_it_holds_no_socket_that_nobody_closes(end: str) -> None:
    """Else the garbage collector finds it, and warns in whatever runs then."""
    async with connection_to_a_stalled_server() as (connection, running, cut):
        if end == "cancelled":
            running.cancel()
        elif end == "closed":
            await connection.aclose()
        else:
            cut()
        await asyncio.wait([running])
    held = [one for one in gc.get_objects() if type(one) is aiohttp.connector.Connection and one.protocol is not None]
    assert held == []


async def test_a_client_that_was_closed_leaves_no_connection_behind(shared_url: str, client: Client) -> None:
    spawned: list[object] = []
    async with Connections() as connections:
        there = SGLangClient(connections, shared_url, spawn=spawned.append)
        there.takes_frames = True
        opening = asyncio.ensure_future(there._frame_client())
        await asyncio.sleep(0)
        await there.aclose()
        connection = await opening
        assert connection is not None
        assert not connection.is_open
    assert spawned == []


async def test_a_request_that_gets_its_server_after_the_end_is_refused(shared_url: str, client: Client) -> None:
    async with engine_over(shared_url) as (engine, _):
        find = engine._line.find

        async def late(session_id: str | None, deadline: float, avoid: Server | None = None) -> Server:
            server = await find(session_id, deadline, avoid)
            await engine.aclose()
            return server

        engine._line.find = late  # type: ignore[method-assign]
        with pytest.raises(EngineClosedError, match="the engine is closed"):
            await engine.agenerate(ModelRequest(input_ids=[1]))


async def test_a_server_waits_for_no_client_that_does_not_say_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stalled:
        """A socket whose client reads nothing."""

        def __aiter__(self) -> "Stalled":
            return self

        async def __anext__(self) -> aiohttp.WSMessage:
            return aiohttp.WSMessage(aiohttp.WSMsgType.TEXT, "text", None)

        async def close(self, **_: object) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(frame_server, "_SHUTDOWN_S", 0.01)
    connection = frame_server._FrameConnection(cast(Any, None), cast(Any, Stalled()))
    async with asyncio.timeout(10):
        await connection.finish()
        await connection.run()


class OneMessage:
    """A socket whose client sends one message, and reads nothing."""

    def __init__(self, message: bytes) -> None:
        self._messages = [aiohttp.WSMessage(aiohttp.WSMsgType.BINARY, message, None)]
        self.reason = b""

    def __aiter__(self) -> "OneMessage":
        return self

    async def __anext__(self) -> aiohttp.WSMessage:
        if not self._messages:
            raise StopAsyncIteration
        return self._messages.pop()

    async def close(self, *, code: int, message: bytes) -> None:
        self.reason = message


async def test_a_message_of_many_calls_lets_others_run_and_its_results_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def num_turns() -> None:
        while True:
            turns.append(len(connection._outgoing))
            await asyncio.sleep(0)

    monkeypatch.setattr(frame_server, "_MAX_UNSENT", 1000)
    call = Call(number=1, rid="r", settings=b"{}", ids=np.arange(3, dtype=np.int32)).encode()
    socket, turns = OneMessage(call * 5000), list[int]()
    server = frame_server.FrameServer(cast(Any, None), cast(Any, None), lambda error: {})
    connection = frame_server._FrameConnection(server, cast(Any, socket))
    other = asyncio.ensure_future(num_turns())
    await connection._read()
    other.cancel()
    assert max(map(int.__sub__, turns[1:], turns[:-1])) < 100
    assert len(connection._outgoing) < 1100
    assert socket.reason == b"its results are not read"


async def test_what_is_no_frame_ends_its_connection_alone(shared_url: str, client: Client) -> None:
    call = Call(number=1, rid="r", settings=b"{}", ids=np.arange(3, dtype=np.int32)).encode()
    async with aiohttp.ClientSession(shared_url) as session:
        for broken in (b"\x07", call[:-1], call[:20], b"\x02", call.replace(b"r{}", b"\xff{}")):
            async with session.ws_connect(PATH) as socket:
                await socket.send_bytes(broken)
                await socket.receive()
                assert socket.close_code == aiohttp.WSCloseCode.PROTOCOL_ERROR
        async with session.ws_connect(PATH) as socket:  # what is wrong with one call is told, and that is all
            for _ in range(2):
                await socket.send_bytes(call)
                (result,) = results_of((await socket.receive()).data)
                assert (result.number, result.status) == (1, 400)
                assert b"sampling_params is missing" in result.head
            ids = np.arange(3, dtype=np.int32)
            await socket.send_bytes(Call(number=1, rid="r" * 2000, settings=b"{}", ids=ids).encode())
            (result,) = results_of((await socket.receive()).data)
            assert b"at most 1024 bytes" in result.head
        async with session.ws_connect(PATH) as socket:
            await socket.send_str("text")
            await socket.receive()
            assert socket.close_code == aiohttp.WSCloseCode.PROTOCOL_ERROR


async def test_the_kernel_notices_a_client_that_is_gone_and_one_that_is_blocked_is_not_given_up(
    shared_url: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[float | None, int, int]] = []
    run = frame_server._FrameConnection.run

    async def noted(connection: frame_server._FrameConnection) -> None:
        request = connection._socket._req
        assert request is not None
        assert request.transport is not None
        sock = request.transport.get_extra_info("socket")
        idle_s = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        found.append((connection._socket._heartbeat, sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), idle_s))
        await run(connection)

    monkeypatch.setattr(frame_server._FrameConnection, "run", noted)
    async with engine_over(shared_url) as (engine, _):
        await engine.agenerate(ModelRequest(input_ids=[1], sampling=SamplingParams(max_new_tokens=1)))
    assert found == [(None, 1, 60)]


async def test_pages_in_a_browser_are_refused(shared_url: str, client: Client) -> None:
    async with aiohttp.ClientSession(shared_url) as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(PATH, origin="http://elsewhere")
        assert refused.value.status == 403
    assert (await client.get(PATH)).status == 400


def test_frames_are_read_as_they_were_written() -> None:
    ids = np.array([0, 5, 2**31 - 1], dtype=np.int32)
    calls = [
        Call(number=2**40, rid="é.0", settings=b'{"a":1}', ids=ids),
        Cancel(3),
        Call(number=1, rid="", settings=b"", ids=ids[:0]),
    ]
    read = list(calls_of(b"".join(call.encode() for call in calls)))
    assert list(map(str, read)) == list(map(str, calls))
    logprobs = np.array([-0.1, 0.0, -1e30], dtype=np.float32)
    results = [Result(number=5, head=b"{}", ids=ids, logprobs=logprobs), Result(number=6, status=400, head=b"no")]
    message = b"".join(result.encode() for result in results)
    first, second = results_of(message)
    assert first.logprobs.tolist() == logprobs.tolist()
    assert (first.ids.tolist(), second.status, second.head) == (ids.tolist(), 400, b"no")
    with pytest.raises(BrokenFrameError, match="ends early"):
        list(results_of(message[:-1]))


def test_messages_are_bounded_and_in_order() -> None:
    frames = [bytes([i]) * (1 << 18) for i in range(10)]
    messages = messages_of(frames)
    assert b"".join(messages) == b"".join(frames)
    assert max(map(len, messages)) == 1 << 20
    assert messages_of([bytes(1 << 21), b"a"]) == [bytes(1 << 21), b"a"]

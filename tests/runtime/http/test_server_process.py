"""A server's process ends with its parent or at a signal; what all servers share: bodies, errors, events, keys."""

import asyncio
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any

import pytest
from aiohttp import web
from embedded_server import command
from pydantic import Field

from arl.api.errors import ConfigError, NoSuchPathError, RequestTimeoutError, ServerError, ServerFailedError
from arl.runtime.http.bodies import BodyError, Integers, RequestBody, RequestError, Strings, parse
from arl.runtime.http.client import Connections, JsonClient, Reply
from arl.runtime.http.server import (
    DONE,
    EventStream,
    bind,
    boundary,
    check_address,
    event,
    json_response,
    require_key,
    serving,
)
from arl.runtime.processes import parent_watch as module
from arl.runtime.processes.parent_watch import Watch

DEADLINE_S = 60.0

SERVER = """
import asyncio, sys
from arl.runtime.http import server
from arl.runtime.processes import parent_watch
parent_watch._GRACE_S = 0.2

async def main(watch):
    stop = watch.stop_event()
    print("ready", flush=True)
    if sys.argv[1] == "blocked":
        while True:
            pass
    await stop.wait()

sys.exit(server.run_server(main, int(sys.argv[2])))
"""

PARENT = """
import os, subprocess, sys
child = subprocess.Popen([*sys.argv[1:], str(os.getpid())], stdout=subprocess.PIPE)
print(child.pid, flush=True)
child.stdout.readline()
print("ready", flush=True)
sys.stdin.read()
"""


def server(state: str) -> list[str]:
    return [sys.executable, "-c", SERVER, state]


@contextmanager
def child_of_another(argv: list[str], **options: object) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has started `argv`, with its process id at the end, and a descriptor of that child."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *argv], **pipes, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    try:
        yield parent, child
    finally:
        if not has_ended(child, 0):
            signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)
        parent.kill()
        parent.communicate()


def has_ended(child: int, within_s: float = DEADLINE_S) -> bool:
    return select.select([child], [], [], within_s)[0] == [child]


@pytest.mark.parametrize("state", ["waiting", "blocked"])
def test_it_ends_with_its_parent_whatever_its_loop_does(state: str) -> None:
    with child_of_another(server(state)) as (parent, child):
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        assert not has_ended(child, 0)
        parent.kill()
        assert has_ended(child)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_blocked_loop_and_shows_what_it_did(number: signal.Signals) -> None:
    argv = [*server("blocked"), str(os.getpid())]
    blocked = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert blocked.stdout is not None
    assert blocked.stdout.readline() == "ready\n"
    blocked.send_signal(number)
    _, told = blocked.communicate(timeout=DEADLINE_S)
    assert blocked.returncode == 1
    assert re.search(r"File \"<string>\", line 1[12] in main", told)


def test_an_embedded_server_ends_with_its_parent_while_it_imports_torch(tmp_path: Path) -> None:
    began = tmp_path / "began"
    os.mkfifo(began)
    (tmp_path / "torch.py").write_text(f"open({str(began)!r}, 'w').close()\nwhile True:\n    pass\n")
    (tmp_path / "config.json").write_text("{}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with child_of_another([*command(str(tmp_path)), "--parent-pid"], env=environment) as (parent, child):
        began.read_text()  # returns when the import has begun
        parent.kill()
        assert has_ended(child)


@pytest.mark.parametrize("has_descriptors", [True, False])
async def test_a_watch_ends_with_its_block_and_leaves_the_signals_as_they_were(
    has_descriptors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    parent = await asyncio.create_subprocess_exec("sleep", "60")
    if not has_descriptors:
        monkeypatch.delattr(os, "pidfd_open")
        monkeypatch.setattr(module, "_PARENT_POLL_S", 0.01)
    with Watch(parent.pid) as watch:
        stop = watch.stop_event()
        assert not stop.is_set()
        parent.kill()
        await parent.wait()
        async with asyncio.timeout(DEADLINE_S):
            await stop.wait()
    with Watch() as watch:
        stop = watch.stop_event()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            await stop.wait()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


async def test_a_signal_that_comes_while_the_watch_begins_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    arrange = signal.set_wakeup_fd

    def interrupted(*args: int, **options: bool) -> int:
        if args != (-1,):
            os.kill(os.getpid(), signal.SIGTERM)
        return arrange(*args, **options)

    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    monkeypatch.setattr(signal, "set_wakeup_fd", interrupted)
    with Watch() as watch:
        stop = watch.stop_event()
        if not received:
            async with asyncio.timeout(DEADLINE_S):
                await stop.wait()
    signal.signal(signal.SIGTERM, before)


def test_an_address_that_others_can_reach_needs_a_key() -> None:
    check_address("127.0.0.1", 0, None)
    check_address("0.0.0.0", 8000, "key")
    with pytest.raises(ConfigError, match=r"--host is 0\.0\.0\.0, open to other machines"):
        check_address("0.0.0.0", 0, None)
    with pytest.raises(ConfigError, match="--port is 65536"):
        check_address("127.0.0.1", 65536, None)


class Part(RequestBody):
    text: str


class Query(RequestBody, ignored=("user",), only={"penalty": (0,)}, refused={"audio": "the model takes text alone"}):
    parts: Sequence[Part] = ()
    top_k: Annotated[int, Field(ge=1)] = 5
    stop: Strings = ()
    input_ids: Integers = ()


def test_a_body_becomes_a_model_and_null_counts_as_absent() -> None:
    body = b'{"parts": [{"text": "a"}], "top_k": null, "stop": "x", "input_ids": [1], "user": "me", "penalty": 0.0}'
    assert parse(Query, body) == Query(parts=[Part(text="a")], stop=["x"], input_ids=[1])
    assert parse(Query, b"") == Query()


VALUE, UNSUPPORTED = "unsupported_value", "unsupported_parameter"


@pytest.mark.parametrize(
    ("body", "param", "sentence", "code"),
    [
        ("[1]", None, "the request body is [1]; it must be a JSON object", None),
        ('{"top_k": 1.5}', "top_k", "top_k is 1.5; it must be an integer", None),
        ('{"top_k": true}', "top_k", "top_k is true; it must be an integer", None),
        ('{"top_k": 0}', "top_k", "top_k is 0; it must be at least 1", None),
        ('{"parts": [{}]}', "parts[0].text", "parts[0].text is missing", None),
        ('{"parts": ["a"]}', "parts[0]", 'parts[0] is "a"; it must be a JSON object', None),
        ('{"input_ids": [1.5]}', "input_ids", "input_ids is [1.5]; it must be a list of integers", None),
        ('{"stop": [1]}', "stop", "stop is [1]; it must be a string or a list of strings, none of them empty", None),
        *((bad, None, "the request body is not JSON", None) for bad in ("{bad", '{"parts": ' + "[" * 100_000)),
        ('{"top_k": NaN}', None, "NaN is not a JSON number", None),
        (r'{"stop": "\ud800"}', None, "the request body is not JSON", None),
        ('{"penalty": 2}', "penalty", "is 2, which cannot be honoured here; leave it out, or set it to 0", VALUE),
        ('{"audio": {}}', "audio", "audio: the model takes text alone; leave it out", UNSUPPORTED),
        ('{"parts": [{"text": "", "x": 1}]}', "parts[0].x", "it is not known here", UNSUPPORTED),
    ],
)
def test_a_wrong_body_is_one_sentence_naming_the_field(
    body: str, param: str | None, sentence: str, code: str | None
) -> None:
    with pytest.raises(BodyError) as raised:
        parse(Query, body.encode())
    assert sentence in raised.value.message
    assert (raised.value.param, raised.value.code, raised.value.status) == (param, code or "invalid_value", 400)


def in_shape(error: RequestError) -> Any:
    return {"error": {"message": error.message}}


@asynccontextmanager
async def served(*, api_key: str | None = None, **settings: Any) -> AsyncIterator[JsonClient]:
    async def answer(request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/echo":
                return json_response(await request.json())
            case "/refuse":
                raise RequestError("not this", 409)
            case "/conflict":
                raise KeyError("gone")
            case "/hang":
                await asyncio.Event().wait()
            case "/events":
                stream = EventStream(request)
                await stream.send(event({"a": 1}))
                return await stream.end(event({}, "last") + DONE)
            case "/text":
                return web.Response(text="fine")
        raise ValueError("what is this?")

    middlewares = [boundary(in_shape, {KeyError: 410}), *([require_key(api_key)] if api_key else [])]
    app = web.Application(middlewares=middlewares, client_max_size=1 << 10)
    for path in ("echo", "refuse", "conflict", "hang", "events", "text", "fail", "health"):
        app.router.add_route("*", f"/{path}", answer)
    async with serving(app, bind("127.0.0.1", 0)) as port:
        client = JsonClient(f"http://127.0.0.1:{port}", **{"retries": 0, **settings})
        try:
            yield client
        finally:
            await client.aclose()


@pytest.mark.parametrize(
    ("path", "kind", "sentence"),
    [
        ("/refuse", ServerError, "/refuse answered HTTP 409: not this"),
        ("/conflict", ServerError, "HTTP 410: 'gone'"),
        ("/nowhere", NoSuchPathError, "HTTP 404: Not Found"),
        ("/fail", ServerFailedError, r"HTTP 500: internal error: ValueError\('what is this\?'\)"),
        ("/text", ServerError, "something other than JSON: b'fine'"),
    ],
)
async def test_an_error_of_the_server_is_an_exception_of_the_client(
    path: str, kind: type[Exception], sentence: str
) -> None:
    async with served() as client:
        assert await client.ask("/echo", {"a": 1}) == {"a": 1}
        with pytest.raises(kind, match=sentence) as raised:
            await client.ask(path)
        with pytest.raises(ServerError, match="HTTP 413: the body is too large"):
            await client.ask("/echo", {"a": "b" * 2000})
    assert isinstance(raised.value, ServerFailedError) == (kind is ServerFailedError)


def test_an_answer_that_is_nested_without_end_is_no_json() -> None:
    reply = Reply(url="http://server/path", path="/path", status=200, headers=(), body=b"[" * 100_000)
    assert reply.json_object() == {}
    with pytest.raises(ServerError, match="something other than JSON"):
        reply.json()


async def test_every_path_but_probes_needs_the_key() -> None:
    async with served(api_key="secret") as client:
        with pytest.raises(ServerError, match="HTTP 401: Unauthorized; pass the api_key"):
            await client.ask("/text")
        for key, status in (("Bearer wrong", 401), ("secret", 401), ("Bearer secret", 200)):
            assert (await client.send("GET", "/text", headers={"Authorization": key})).status == status
        with pytest.raises(ServerFailedError, match="HTTP 500"):
            await client.ask("/health")


async def test_a_server_that_does_not_answer_in_time_is_a_timeout() -> None:
    async with served(timeout_s=0.05) as client:
        with pytest.raises(RequestTimeoutError, match=r"/hang took longer than timeout_s=0\.05"):
            await client.ask("/hang")


async def test_a_stream_is_events_and_several_clients_may_share_connections() -> None:
    async with served() as client, Connections() as connections:
        other = JsonClient(client.url, connections=connections)
        reply = await other.send("GET", "/events")
        await other.aclose()
        assert not connections.is_closed
    assert reply.body.decode() == 'data: {"a":1}\n\nevent: last\ndata: {}\n\ndata: [DONE]\n\n'

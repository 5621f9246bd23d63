"""HTTP/1.1 as arl's clients speak it, against servers that answer byte by byte as a test says."""

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from arl.api.errors import RequestTimeoutError, ServerError, ServerFailedError
from arl.runtime.http import client as module
from arl.runtime.http.client import Connections, HttpConnection, JsonClient, request_head

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class RawServer:
    """Each connection has a script, later ones the last: what it answers to one request after another; the last entry
    is for all further ones, and None closes the connection instead. `requests` holds what came, `gone` is set when a
    connection ends."""

    def __init__(self, *scripts: list[bytes | None]) -> None:
        self.scripts = scripts
        self.requests: list[bytes] = []
        self.opened: list[RawConnection] = []
        self.asked, self.gone = asyncio.Event(), asyncio.Event()


class RawConnection(asyncio.Protocol):
    def __init__(self, server: RawServer) -> None:
        self.server = server
        self.script = [*server.scripts[min(len(server.opened), len(server.scripts) - 1)]]
        self.received = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.server.opened.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.gone.set()

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, _, body = self.received.partition(b"\r\n\r\n")
        length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0] or 0)
        is_whole = body.endswith(b"0\r\n\r\n") if b"chunked" in head else len(body) >= length
        if not is_whole or b"\r\n\r\n" not in self.received:
            return
        self.server.requests.append(self.received)
        self.server.asked.set()
        self.received = b""
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        self.transport.write(answer or b"")
        if answer is None or b"Connection: close" in answer:
            self.transport.close()


@asynccontextmanager
async def listening(
    protocol: Callable[[], asyncio.Protocol], host: str = "127.0.0.1", **tls: Any
) -> AsyncIterator[int]:
    server = await asyncio.get_running_loop().create_server(protocol, host, 0, **tls)
    async with server, asyncio.timeout(20):
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def raw(*scripts: list[bytes | None], host: str = "127.0.0.1", **settings: Any) -> AsyncIterator[Any]:
    """A RawServer and a client of it."""
    server = RawServer(*scripts)
    tls = {"ssl": settings.pop("tls")} if "tls" in settings else {}
    async with listening(lambda: RawConnection(server), host, **tls) as port:
        place = f"{settings.pop('user', '')}{f'[{host}]' if ':' in host else host}:{port}"
        client = JsonClient(f"{'https' if tls else 'http'}://{place}", **{"retries": 0, **settings})
        try:
            yield server, client
        finally:
            await client.aclose()
            for connection in server.opened:
                connection.transport.abort()


@pytest.mark.parametrize(
    "answer",
    [
        OK,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\nX: y\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{}",
        b"HTTP/1.0 200 OK\r\nX: Connection: close\r\n\r\n{}",
    ],
)
async def test_a_response_is_read_however_it_tells_its_length(answer: bytes) -> None:
    async with raw([answer]) as (_, client):
        assert await client.ask("/", {"a": 1}) == {}


async def test_bytes_that_come_one_by_one_are_a_response() -> None:
    parser = HttpConnection(set())
    parser.connection_made(asyncio.Transport())
    response = parser._response = asyncio.get_running_loop().create_future()
    for byte in OK:
        assert not response.done()
        parser.data_received(bytes([byte]))
    assert (await response).body == b"{}"


async def test_a_connection_serves_one_request_after_another_and_several_at_once_get_their_own() -> None:
    async with raw([OK]) as (server, client):
        for _ in range(3):
            await client.ask("/")
        assert len(server.opened) == 1
        await asyncio.gather(*(client.ask("/") for _ in range(3)))
        assert len(server.opened) == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "the server closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nConnection: close\r\n\r\n{}", "the server closed the connection"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n5\r\n{}", "the server closed"),
        (b"SSH-2.0-OpenSSH_9.7\r\n", "something other than HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", "something other than HTTP/1.1"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "something other than"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 9000 + b"\r\n\r\n", "a header of its response exceeds 8190 bytes"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 40000, "the headers of its response exceed 32768 bytes"),
    ],
)
async def test_what_is_no_whole_response_is_a_server_that_was_not_reached(answer: bytes | None, reason: str) -> None:
    async with raw([answer]) as (server, client):
        with pytest.raises(ServerFailedError, match=rf"/x could not be reached: .*{reason}"):
            await client.ask("/x", {})
        assert len(server.opened) == 1


async def test_a_connection_that_was_closed_while_idle_is_replaced_for_a_get_and_reported_for_a_post() -> None:
    async with raw([OK, None], [OK]) as (server, client):
        assert [await client.ask("/") for _ in range(2)] == [{}, {}]
        assert len(server.opened) == 2
    async with raw([OK, None], [OK]) as (server, client):  # a POST may have taken effect
        await client.ask("/", {})
        with pytest.raises(ServerFailedError, match="closed the connection"):
            await client.ask("/", {})


async def test_an_idle_connection_is_closed_in_time_and_not_used_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    async with Connections(keepalive_s=5.0) as connections, raw([OK], connections=connections) as (server, client):
        await client.ask("/")
        with monkeypatch.context() as patch:
            patch.setattr(loop, "time", lambda now=loop.time: now() + 5.1)
            await client.ask("/")
            assert len(server.opened) == 2
    async with Connections(keepalive_s=0.01) as connections, raw([OK], connections=connections) as (server, client):
        await client.ask("/")
        await server.gone.wait()


async def test_a_response_that_nobody_asked_for_is_given_to_nobody() -> None:
    async with raw([OK + b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"a": "b"}'], [OK]) as (server, client):
        assert await client.ask("/", {}) == {}
        assert await client.ask("/", {}) == {}
        assert len(server.opened) == 2


async def test_a_caller_that_gives_up_and_a_timeout_close_the_connection() -> None:
    async with raw([b""], timeout_s=None) as (server, client):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await client.ask("/", {})
        await server.gone.wait()
    async with raw([b""], timeout_s=0.02) as (server, client):
        with pytest.raises(RequestTimeoutError, match=r"timeout_s=0\.02 s"):
            await client.ask("/", {})
        await server.gone.wait()


async def test_connecting_has_a_timeout_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connect)
    client = JsonClient("http://127.0.0.1:9", connect_timeout_s=0.01, retries=0)
    with pytest.raises(ServerFailedError, match=r"could not be reached: no connection within 0\.01 s"):
        await client.ask("/")
    await client.aclose()


async def test_a_response_is_bounded_and_its_trailers_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with raw([chunked + b"2\r\n{}\r\n0\r\n" + b"X: y\r\n" * 9 + b"\r\n"]) as (_, client):
        assert len((await client.send("GET", "/")).headers) == 1
    monkeypatch.setattr(module, "_MAX_BYTES", 1000)
    for endless in (b"2\r\n{}\r\n" * 200, b"0\r\n" + b"X: y\r\n" * 200, b"2;" + b"x" * 1000):
        async with raw([chunked + endless]) as (_, client):
            with pytest.raises(ServerFailedError, match="its response exceeds 1000 bytes"):
                await client.ask("/")


async def test_a_redirect_is_refused_and_says_where_to() -> None:
    answer = b"HTTP/1.1 307 Temporary Redirect\r\nLocation: https://elsewhere/v1\r\nContent-Length: 0\r\n\r\n"
    async with raw([answer], api_key="secret") as (_, client):
        with pytest.raises(ServerError, match=r"HTTP 307: .*it redirects to https://elsewhere/v1"):
            await client.ask("/v1", {})


async def pieces(*parts: bytes, then: Callable[[], Any] = lambda: None) -> AsyncIterator[bytes]:
    for part in parts:
        await asyncio.sleep(0)
        yield part
    await asyncio.sleep(0)
    then()


async def test_pieces_are_sent_as_they_come_with_or_without_a_known_length() -> None:
    async with raw([OK]) as (server, client):
        assert (await client.send("PUT", "/", pieces(b"ab", b"", b"cde"))).status == 200
        assert (await client.send("PUT", "/", pieces(b"ab", b"cde"), {"Content-Length": "5"})).status == 200
        await client.send("POST", "/", body := bytes(range(256)) * (1 << 14))
    assert server.requests[0].endswith(b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n")
    assert server.requests[1].endswith(b"Content-Length: 5\r\n\r\nabcde")
    assert server.requests[2].endswith(body)
    assert len(server.opened) == 1


async def test_a_body_that_is_refused_before_its_end_is_not_sent_to_it() -> None:
    class Refusing(RawConnection):
        def data_received(self, data: bytes) -> None:
            self.transport.pause_reading()
            self.transport.write(b"HTTP/1.1 409 Conflict\r\nContent-Length: 2\r\n\r\n{}")

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1 << 20)
            await asyncio.sleep(0)

    server = RawServer([OK])
    async with listening(lambda: Refusing(server)) as port:
        client = JsonClient(f"http://127.0.0.1:{port}", retries=0)
        assert (await client.send("PUT", "/", endless())).status == 409
        await client.aclose()
        server.opened[0].transport.abort()


async def test_pieces_that_fail_are_the_callers_error() -> None:
    def fail() -> None:
        raise KeyError("the file is gone")

    async with raw([OK]) as (_, client):
        with pytest.raises(KeyError, match="the file is gone"):
            await client.send("PUT", "/", pieces(b"ab", then=fail))


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
async def test_a_server_at_an_ipv6_address_is_reached() -> None:
    async with raw([OK], host="::1") as (server, client):
        await client.ask("/")
    assert b"\r\nHost: [::1]:" in server.requests[0]


async def test_a_key_and_a_user_in_the_url_are_sent_and_not_told() -> None:
    async with raw([OK, None], api_key="k") as (server, client):
        await client.ask("/")
    assert b"\r\nAuthorization: Bearer k\r\n" in server.requests[0]
    async with raw([OK, None], user="me:p%40ss@") as (server, client):
        await client.ask("/")
        assert "p%40ss" not in client.url
    assert b"\r\nAuthorization: Basic bWU6cEBzcw==\r\n" in server.requests[0]


def test_a_head_is_one_line_for_each_header() -> None:
    head = request_head("GET", URL("http://a/b c?d=e f"), {"X": "y"})
    assert head.startswith(b"GET /b%20c?d=e+f HTTP/1.1\r\nHost: a\r\n")
    for headers, key in (({"X": "a\r\nY: b"}, None), ({}, "k\r\nY: b")):
        with pytest.raises(ValueError, match="more than one line"):
            request_head("GET", URL("http://a/"), headers, key)


async def test_closing_ends_requests_under_way_those_that_are_connecting_and_later_ones() -> None:
    connections = Connections()
    async with raw([OK, b""], connections=connections) as (server, client):
        await client.ask("/")
        server.asked.clear()
        asked = asyncio.ensure_future(client.ask("/"))
        await server.asked.wait()
        connecting = asyncio.ensure_future(client.ask("/", {}))
        await asyncio.sleep(0)
        await connections.aclose()
        for ended in (asked, connecting):
            with pytest.raises(ServerFailedError, match="closed"):
                await ended
        with pytest.raises(RuntimeError, match="connections are closed"):
            await client.ask("/", {})


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
async def test_tls_is_used_and_an_unknown_certificate_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made.pem"
    process = await asyncio.create_subprocess_exec(
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
        *("-keyout", f"{made}.key", "-out", str(made), "-subj", "/CN=localhost"),
        *("-addext", "subjectAltName=IP:127.0.0.1"),
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert await process.wait() == 0
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(made, f"{made}.key")
    async with raw([OK], tls=served) as (server, client):
        with pytest.raises(ServerFailedError, match="CERTIFICATE_VERIFY_FAILED"):
            await client.ask("/", {})
        assert server.requests == []
    monkeypatch.setattr(module, "_tls_context", lambda: ssl.create_default_context(cafile=made))
    async with raw([OK], tls=served) as (server, client):
        assert [await client.ask("/", {}) for _ in range(2)] == [{}, {}]
        assert len(server.opened) == 1

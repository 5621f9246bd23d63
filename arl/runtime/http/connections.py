"""HTTP/1.1 connections to servers: opened when they are needed, kept while they are idle, closed at the end.

    request --> an idle connection, else a new one --> write --> parser --> Response --> idle again

aiohttp's client takes three times as much CPU time for a request, and an engine has thousands of requests a second.
These connections know what arl's clients need: no cookies, proxies, redirects or compression. llhttp parses responses.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import ipaddress
import ssl
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast
from urllib.parse import unquote

import httptools
from yarl import URL

from arl.api.errors import first_error

Body = bytes | AsyncIterator[bytes]
"""Pieces are sent as they come: in chunks, unless the headers tell their total length."""

_MAX_HEAD_BYTES = 1 << 15
"""Most bytes of a response's status line and headers."""
_MAX_FIELD_BYTES = 8190
_MAX_BYTES = 1 << 30
"""Most bytes of a whole response."""
_EYEBALLS_S = 0.25
_LENGTHS = frozenset((b"content-length", b"transfer-encoding"))
_LINE_END = frozenset("\r\n\0")


class DisconnectedError(ConnectionError):
    """The connection ended before the response did."""


class NotConnectedError(ConnectionError):
    """There was no connection, so the request was not sent."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server is: what a connection is opened to."""

    host: str
    port: int
    is_tls: bool

    @classmethod
    def of(cls, url: URL) -> ServerAddress:
        return cls(url.raw_host or "", url.port or 0, url.scheme == "https")


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: Sequence[tuple[bytes, bytes]]
    """As they were sent."""
    body: bytes


class Connections:
    """The connections of one event loop; several clients may share them.

    keepalive_s: how long an idle connection is kept. `aclose` ends all, also those in use.
    """

    def __init__(self, *, keepalive_s: float = 15.0) -> None:
        self.is_closed = False
        self._keepalive_s = keepalive_s
        self._idle: defaultdict[ServerAddress, deque[HttpConnection]] = defaultdict(deque)
        """The last used one at the end."""
        self._open: set[HttpConnection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self.is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in [*self._open]:
            connection.abort()
        await asyncio.sleep(0)  # the sockets are closed in the next turn of the event loop

    async def request(
        self, method: str, head: tuple[ServerAddress, bytes], body: Body, connect_timeout_s: float | None = None
    ) -> Response:
        """head: where to send the request, and its `request_head`. Raises OSError, but never TimeoutError."""
        to, lines = head
        while True:
            connection = self._take(to)
            is_new = connection is None
            if connection is None:
                connection = await self._connect(to, connect_timeout_s)
            try:
                response = await connection.exchange(lines, body)
            except DisconnectedError:
                if is_new or self.is_closed or method != "GET":  # else the server closed it while it was idle
                    raise
                continue
            if connection.is_reusable and not self.is_closed:
                self._keep(to, connection)
            else:
                connection.abort()
            return response

    def _take(self, to: ServerAddress) -> HttpConnection | None:
        idle = self._idle.get(to)
        oldest = asyncio.get_running_loop().time() - self._keepalive_s
        while idle:
            connection = idle.pop()
            if connection.is_reusable and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    def _keep(self, to: ServerAddress, connection: HttpConnection) -> None:
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle[to].append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(self._keepalive_s, self._close_idle)

    def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        oldest = loop.time() - self._keepalive_s
        for to, idle in [*self._idle.items()]:
            while idle and (idle[0].idle_since <= oldest or not idle[0].is_reusable):
                idle.popleft().abort()
            if not idle:
                del self._idle[to]
        self._sweep = loop.call_later(self._keepalive_s, self._close_idle) if self._idle else None

    async def _connect(self, to: ServerAddress, timeout_s: float | None) -> HttpConnection:
        if self.is_closed:
            raise RuntimeError("these connections are closed")
        connect = asyncio.get_running_loop().create_connection
        tls: dict[str, Any] = {"ssl": _tls_context()} if to.is_tls else {}
        eyeballs_s = None if _is_ip_address(to.host) else _EYEBALLS_S  # a name may have several addresses
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await connect(
                    lambda: HttpConnection(self._open), to.host, to.port, happy_eyeballs_delay=eyeballs_s, **tls
                )
        except TimeoutError as error:
            raise NotConnectedError(f"no connection within {timeout_s} s: {error or 'no answer'}") from error
        except UnicodeError as error:  # of a host that is no name
            raise NotConnectedError(f"{to.host!r} is not the name of a host: {error}") from error
        except OSError as error:
            raise NotConnectedError(str(error)) from error
        if self.is_closed:
            connection.abort()
            raise NotConnectedError("these connections were closed")
        return connection


class HttpConnection(asyncio.Protocol):
    """One exchange at a time: a request written, and its response parsed."""

    def __init__(self, opened: set[HttpConnection]) -> None:
        self.idle_since = 0.0
        self.is_reusable = True
        self._opened = opened
        self._parser = httptools.HttpResponseParser(self)
        self._response: asyncio.Future[Response] | None = None
        self._may_write: asyncio.Future[None] | None = None
        self._is_sending = False
        self._begin_response()

    def abort(self) -> None:
        self.is_reusable = False
        self._transport.abort()

    async def exchange(self, head: bytes, body: Body) -> Response:
        """Send a request and wait for its response. Cancellation closes the connection. Raises OSError."""
        response = self._response = asyncio.get_running_loop().create_future()
        try:
            if isinstance(body, bytes):
                self._transport.write(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
                return await response
            return await self._stream(head, body, response)
        except BaseException:
            self.abort()
            raise
        finally:
            self._response = None

    async def _stream(self, head: bytes, pieces: AsyncIterator[bytes], response: asyncio.Future[Response]) -> Response:
        """Send pieces until they end, or a response comes: a server may refuse a body before it has read it."""
        is_chunked = b"\r\nContent-Length: " not in head
        self._transport.write(head + (b"Transfer-Encoding: chunked\r\n\r\n" if is_chunked else b"\r\n"))
        self._is_sending = True
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._send(pieces, is_chunked=is_chunked))
                await response
                sending.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return response.result()

    async def _send(self, pieces: AsyncIterator[bytes], *, is_chunked: bool) -> None:
        async for piece in pieces:
            if piece:
                self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece)
            while self._may_write is not None:
                await asyncio.shield(self._may_write)
        if is_chunked:
            self._transport.write(b"0\r\n\r\n")
        self._is_sending = False

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._opened.add(self)

    def data_received(self, data: bytes) -> None:
        if self._response is None or self._response.done():  # nothing was asked
            return self.abort()
        self._num_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            return self._fail(ConnectionError(f"it answered with something other than HTTP/1.1: {error}"))
        if not self._has_head and self._num_bytes > _MAX_HEAD_BYTES:
            self._fail(ConnectionError(f"the headers of its response exceed {_MAX_HEAD_BYTES} bytes"))
        elif self._num_bytes > _MAX_BYTES:
            self._fail(ConnectionError(f"its response exceeds {_MAX_BYTES} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        self._opened.discard(self)
        self.resume_writing()
        lasts_to_end = self._has_head and not _LENGTHS & {name.lower() for name, _ in self._headers}
        if exc is None and lasts_to_end:
            self.on_message_complete()
        self._fail(DisconnectedError(str(exc or "the server closed the connection")))

    def pause_writing(self) -> None:
        self._may_write = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._may_write is not None:
            self._may_write.set_result(None)
            self._may_write = None

    # The parser's callbacks

    def _begin_response(self) -> None:
        self._has_head = False
        self._num_bytes = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []

    def on_message_begin(self) -> None:
        if self._response is None or self._response.done():  # a second response
            self.is_reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) + len(value) > _MAX_FIELD_BYTES:
            self._fail(ConnectionError(f"a header of its response exceeds {_MAX_FIELD_BYTES} bytes"))
        if not self._has_head:  # else it is a trailer, which nobody reads
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._has_head = True
        self.is_reusable = self.is_reusable and self._parser.should_keep_alive()

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        status, response = self._parser.get_status_code(), self._response
        answer = Response(status, self._headers, b"".join(self._pieces))
        self._begin_response()
        if status < 200:  # 100 Continue and the like come before the response
            return
        self.is_reusable = self.is_reusable and not self._is_sending
        if response is not None and not response.done():
            response.set_result(answer)

    def _fail(self, error: Exception) -> None:
        if self._response is not None and not self._response.done():
            self._response.set_exception(error)
        self.abort()


def request_head(method: str, url: URL, headers: Mapping[str, str], api_key: str | None = None) -> bytes:
    """The request line and all headers except those of the body's length. A user in the URL replaces the key.

    Raises ValueError for headers that are not one line of text.
    """
    host = url.host_subcomponent or ""
    named = {"Host": host if url.is_default_port() else f"{host}:{url.port}", "Accept-Encoding": "identity"}
    if url.raw_user is not None or url.raw_password is not None:
        user = f"{unquote(url.raw_user or '')}:{unquote(url.raw_password or '')}"
        named["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
    elif api_key:
        named["Authorization"] = f"Bearer {api_key}"
    lines = [f"{name}: {value}" for name, value in {**named, **headers}.items()]
    if any(_LINE_END & set(line) for line in lines):
        raise ValueError("a header has more than one line")
    return "\r\n".join([f"{method} {url.raw_path_qs} HTTP/1.1", *lines, ""]).encode("latin-1")


@functools.lru_cache(maxsize=4096)
def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@functools.cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()

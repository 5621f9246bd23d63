"""JSON over HTTP to one server: bounded connections, named timeouts, retries, and errors as exceptions.

    JsonClient --> an idle connection, else a new one --> write --> parser --> Response --> idle again

aiohttp's client takes three times as much CPU time for a request, and an engine has thousands of requests a second.
The connections know what arl's clients need: no cookies, proxies, redirects or compression. llhttp parses responses.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import ipaddress
import json
import random
import ssl
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Self, cast
from urllib.parse import unquote
from weakref import WeakKeyDictionary

import httptools
import orjson
from yarl import URL

from arl.api.errors import (
    ArlError,
    ConfigError,
    NoSuchPathError,
    RequestTimeoutError,
    ServerError,
    ServerFailedError,
    first_error,
)

_BUSY = 429
_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 8.0
_LONGEST_ASKED_WAIT_S = 120.0
"""The longest wait for a server's Retry-After."""
_MAX_QUOTED = 500
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    url: str
    """Without a password."""
    path: str
    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    def header(self, name: str) -> str | None:
        """The first header of this name, in whatever case."""
        wanted = name.lower().encode()
        return next((value.decode("latin-1") for given, value in self.headers if given.lower() == wanted), None)

    def json(self) -> Any:
        """Raises ServerError for a body that is not JSON."""
        try:
            return _decoded(self.body)
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{self.url} answered with something other than JSON: {self.body[:200]!r}") from error

    def json_object(self) -> dict[str, Any]:
        """The body as a JSON object; {} for anything else, such as the plain text of an acknowledgement."""
        try:
            content = _decoded(self.body)
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    @property
    def reason(self) -> str:
        """The server's own words about an error.

        Servers send {"error": {"message": ..}}, {"error": ".."}, {"message": ..}, {"error_message": ..} or text.
        """
        content = self.json_object()
        error = content.get("error", content)
        if isinstance(error, dict):
            error = error.get("message") or error.get("error_message")
        return str(error or self.body.decode(errors="replace").strip() or "(no explanation)")[:_MAX_QUOTED]


@dataclass(slots=True)
class _InLoop:
    connections: Connections
    places: asyncio.Semaphore | nullcontext[None]
    """One place for each request under way; without a limit, of no effect."""
    next_at: float = field(default=0.0)
    """The time at which the next request may begin."""


class JsonClient:
    """A client of one server. It opens connections when it needs them, keeps them, and closes them in `aclose`.

    max_concurrent: requests under way at once; others wait their turn. None: no limit.
    requests_per_minute: how many requests begin in a minute, evenly spread. None: no limit.
    timeout_s: the longest that a request may take from when it is sent. None: the caller limits it.
    connect_timeout_s: the longest that opening a connection may take.
    retries: how often `ask` repeats a request that did not reach the server, or failed there (HTTP 5xx and 429).
        The waits between double up to 8 s, or are as long as Retry-After says. The default spans some 90 s, enough to
        restart a server.
    connections: those that several clients share; their owner closes them.
    """

    key_hint = "pass the api_key that the server was started with"
    """Advice for HTTP 401 and 403."""
    path_hint = ""
    """Advice for HTTP 404."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        max_concurrent: int | None = 64,
        requests_per_minute: float | None = None,
        timeout_s: float | None = 120.0,
        connect_timeout_s: float | None = None,
        retries: int = 20,
        connections: Connections | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url is {url!r}; it must begin with http:// or https://, as in http://127.0.0.1:30000")
        if (
            (max_concurrent is not None and max_concurrent < 1)
            or (timeout_s is not None and timeout_s <= 0)
            or retries < 0
        ):
            raise ConfigError(
                f"max_concurrent is {max_concurrent}, timeout_s {timeout_s} and retries {retries}; they must be at "
                "least 1, above 0 and at least 0"
            )
        if requests_per_minute is not None and not requests_per_minute > 0:
            raise ConfigError(f"requests_per_minute is {requests_per_minute}; it must be above 0, or None for no limit")
        self._base = url.rstrip("/")
        self.url = str(URL(self._base).with_user(None)).rstrip("/")
        """The URL for messages, without a password."""
        self._api_key = api_key
        self._heads: dict[tuple[str, str], tuple[ServerAddress, bytes]] = {}
        """The heads of JSON requests, by method and URL."""
        self._max_concurrent = max_concurrent
        self._gap_s = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._retries = retries
        self._shared = connections
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _InLoop] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out objects of the event loop: a copy in another process opens its own connections."""
        return {name: value for name, value in vars(self).items() if not isinstance(value, WeakKeyDictionary)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._loops = WeakKeyDictionary()

    async def aclose(self) -> None:
        """Close this event loop's connections, unless they are shared. Idempotent; a later call opens others."""
        kept = self._loops.pop(asyncio.get_running_loop(), None)
        if kept is not None and kept.connections is not self._shared:
            await kept.connections.aclose()

    async def ask(self, path: str, payload: Mapping[str, Any] | None = None, *, max_retries: int | None = None) -> Any:
        """GET, or POST a payload; returns JSON. Raises ServerError, RequestTimeoutError and `error_of`'s errors."""
        wait_s, retries = _FIRST_WAIT_S, self._retries if max_retries is None else min(self._retries, max_retries)
        for left in range(retries, -1, -1):
            try:
                return await self._ask_once(path, payload)
            except ServerFailedError as error:
                if not retries:
                    raise
                if not left:
                    raise ServerFailedError(f"{error} (asked {retries + 1} times)") from error
                asked_s = min(error.retry_after_s, _LONGEST_ASKED_WAIT_S)
            await asyncio.sleep(max(wait_s * random.uniform(0.5, 1.0), asked_s))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        raise AssertionError("unreachable")

    async def _ask_once(self, path: str, payload: Mapping[str, Any] | None) -> Any:
        return (await self.call("GET" if payload is None else "POST", path, payload)).json()

    async def call(self, method: str, path: str, payload: Mapping[str, Any] | None = None) -> Reply:
        """One request with a JSON body, without retries. Raises as `ask` does."""
        url = self._base + path
        if (head := self._heads.get((method, url))) is None:
            head = self._heads[method, url] = self._head(method, path, _JSON)
        reply = await self._send(method, path, b"" if payload is None else encoded(payload), head)
        if reply.status != 200:
            raise self.error_of(reply)
        return reply

    async def send(self, method: str, path: str, body: Body = b"", headers: Mapping[str, str] | None = None) -> Reply:
        """One request; returns the response whatever its status. Raises ServerFailedError and RequestTimeoutError."""
        return await self._send(method, path, body, self._head(method, path, headers or {}))

    def _head(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[ServerAddress, bytes]:
        url = URL(self._base + path)
        return ServerAddress.of(url), request_head(method, url, headers, self._api_key)

    async def _send(self, method: str, path: str, body: Body, head: tuple[ServerAddress, bytes]) -> Reply:
        loop, limit_s = asyncio.get_running_loop(), self._timeout_s
        if (kept := self._loops.get(loop)) is None:
            places = asyncio.Semaphore(self._max_concurrent) if self._max_concurrent else nullcontext()
            kept = self._loops[loop] = _InLoop(self._shared or Connections(), places)
        async with kept.places:
            if self._gap_s:
                await self._turn(kept)
            asked = kept.connections.request(method, head, body, self._connect_timeout_s)
            try:
                if limit_s is None:
                    answer = await asked
                else:
                    async with asyncio.timeout(limit_s):
                        answer = await asked
            except TimeoutError:
                raise RequestTimeoutError(
                    f"{self.url}{path} took longer than timeout_s={limit_s:g} s; set it higher for a slow server"
                ) from None
            except OSError as error:
                raise self._unreached(path, error) from error
        return Reply(url=self.url + path, path=path, status=answer.status, headers=answer.headers, body=answer.body)

    def _unreached(self, path: str, error: Exception) -> ServerFailedError:
        reason = str(error) or type(error).__name__
        return ServerFailedError(f"{self.url}{path} could not be reached: {reason}; is its server running?")

    def error_of(self, reply: Reply) -> ArlError:
        """The exception for a failed response, never with the API key; ServerFailedError if a later try may succeed."""
        reason = reply.reason.replace(self._api_key, "(the api_key)") if self._api_key else reply.reason
        message = f"{reply.url} answered HTTP {reply.status}: {reason}"
        match reply.status:
            case 301 | 302 | 303 | 307 | 308:
                return ServerError(f"{message}; it redirects to {reply.header('Location')}, which is to be asked")
            case 401 | 403:
                return ServerError(f"{message}; {self.key_hint}")
            case 404:
                return NoSuchPathError(f"{message}; {self.path_hint}" if self.path_hint else message)
            case status if status >= 500 or status == _BUSY:
                return ServerFailedError(message, _seconds(reply.header("Retry-After"), reply.header("Date")))
            case _:
                return ServerError(message)

    async def _turn(self, kept: _InLoop) -> None:
        now = asyncio.get_running_loop().time()
        begin = max(now, kept.next_at)
        kept.next_at = begin + self._gap_s
        if begin > now:
            await asyncio.sleep(begin - now)


def encoded(payload: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # it takes no integers of more than 64 bits, and no keys but strings
        return json.dumps(payload, separators=(",", ":"), default=_listed).encode()


def _listed(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no value of JSON")


def _decoded(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except ValueError:  # it takes no NaN, and no halves of surrogate pairs
        return json.loads(body)


def _seconds(retry_after: str | None, date: str | None = None) -> float:
    """date: when the server sent this, by its own clock, which a time in Retry-After goes by."""
    try:
        return max(float(retry_after or 0), 0.0)
    except ValueError:
        pass
    try:
        until = parsedate_to_datetime(retry_after or "").timestamp()
        with suppress(ValueError, OverflowError):
            return max(until - parsedate_to_datetime(date or "").timestamp(), 0.0)
        return max(until - time.time(), 0.0)
    except (ValueError, OverflowError):
        return 0.0


# Connections

Body = bytes | AsyncIterator[bytes]
"""Pieces are sent as they come: in chunks, unless the headers tell their total length."""

_MAX_HEAD_BYTES = 1 << 15
"""Most bytes of a response's status line and headers."""
_MAX_FIELD_BYTES = 8190
_MAX_BYTES = 1 << 30
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
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


@functools.cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()

"""An HTTP server: it checks keys, answers in JSON or events, and turns exceptions into errors.

The second half is the frame of a server process: its socket, signals and limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from aiohttp import web

from arl.api.errors import ArlError, ConfigError
from arl.web.bodies import RequestError

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ErrorShape = Callable[[RequestError], Any]
"""From an error to the JSON of its response."""
Statuses = Mapping[type[Exception], int]
"""Exception -> HTTP status; other exceptions are failures of the server."""

PROBES = frozenset(("/health",))
DONE = "data: [DONE]\n\n"
"""The last event of an OpenAI stream."""
BACKLOG = 4096
"""Most connections that wait for acceptance: thousands of clients may start at once."""
_PARENT_POLL_S = 1.0
_BAD_START = 2


@asynccontextmanager
async def serving(app: web.Application, sock: socket.socket, *, shutdown_timeout_s: float = 2.0) -> AsyncIterator[int]:
    """Answer on a socket of `bind` within the block; yields the port, and closes the socket at the end.

    A client that goes away cancels its handler. shutdown_timeout_s: how long running handlers may take at the end.
    """
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout_s)
    with sock:
        await runner.setup()
        try:
            await web.SockSite(runner, sock, backlog=BACKLOG).start()
            yield sock.getsockname()[1]
        finally:
            await runner.cleanup()


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    body = json.dumps(content, separators=(",", ":")).encode()
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


class EventStream:
    """Server-sent events. The response begins with the first event, so an earlier error still gets its status."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )

    @property
    def has_begun(self) -> bool:
        return self._response.prepared

    async def send(self, events: str) -> None:
        """events: each with its trailing empty line, as `event` writes it."""
        if not self._response.prepared:
            await self._response.prepare(self._request)
        await self._response.write(events.encode())

    async def end(self, events: str = "") -> web.StreamResponse:
        await self.send(events)
        await self._response.write_eof()
        return self._response


def event(content: Any, kind: str | None = None) -> str:
    """One server-sent event of JSON. kind: its name, in protocols that name their events."""
    data = f"data: {json.dumps(content, separators=(',', ':'))}\n\n"
    return data if kind is None else f"event: {kind}\n{data}"


def answering(handler: Handler, shape: ErrorShape, statuses: Statuses | None = None) -> Handler:
    """The handler, which now answers every exception in `shape` and logs failures of the server."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except ConnectionResetError:
            raise  # the client went away, so nobody reads an answer
        except Exception as error:
            failure = request_error(error, statuses or {})
            if failure.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                log.error("%s failed", request.path, exc_info=error)
            return json_response(shape(failure), failure.status)

    return answer


def boundary(shape: ErrorShape, statuses: Statuses | None = None) -> Any:
    """A middleware that puts every handler of an application, and unknown paths, behind `answering`."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await answering(handler, shape, statuses)(request)

    return answer


def request_error(error: Exception, statuses: Statuses) -> RequestError:
    match error:
        case RequestError():
            return error
        case web.HTTPRequestEntityTooLarge():
            return RequestError("the body is too large", error.status)
        case web.HTTPException():
            return RequestError(error.reason, error.status)
        case _:
            for kind, status in statuses.items():
                if isinstance(error, kind):
                    return RequestError(str(error), status)
            return RequestError(f"internal error: {error!r}", HTTPStatus.INTERNAL_SERVER_ERROR)


def require_key(api_key: str, *, open_paths: frozenset[str] = PROBES, shape: ErrorShape | None = None) -> Any:
    """A middleware that refuses calls without the bearer token `api_key`. open_paths: paths that need no key."""
    expected = f"Bearer {api_key}".encode()
    refusal = RequestError("Unauthorized", HTTPStatus.UNAUTHORIZED)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if request.path not in open_paths and not hmac.compare_digest(given, expected):
            return json_response(shape(refusal) if shape else {"error": refusal.message}, refusal.status)
        return await handler(request)

    return check


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_address(host: str, port: int, api_key: str | None) -> None:
    """Raise ConfigError for a port out of range, and for an address open to other machines without a key."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port is {port}; it must be between 0 (any free port) and 65535")
    if not api_key and not is_loopback(host):
        raise ConfigError(f"--host is {host}, open to other machines; give --api-key KEY too, or listen on 127.0.0.1")


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; the caller closes it. Raises ConfigError if the address is not free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as opened:
            sock = opened.enter_context(socket.socket(family, kind, protocol))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(BACKLOG)
            opened.pop_all()
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return sock


def stop_event(parent_pid: int | None = None) -> asyncio.Event:
    """An event of the running loop that SIGTERM, SIGINT or the end of process `parent_pid` sets."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if parent_pid is not None:
        _watch_parent(parent_pid, loop, stop)
    return stop


def _watch_parent(pid: int, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    def ended(descriptor: int) -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        stop.set()

    def look() -> None:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            stop.set()
        else:
            loop.call_later(_PARENT_POLL_S, look)

    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):  # it is gone, or this system has no such call
        look()
    else:
        loop.add_reader(descriptor, ended, descriptor)


async def answer_until(
    stop: asyncio.Event, app: web.Application, sock: socket.socket, ready: Callable[[int], str]
) -> None:
    """Answer on a socket of `bind` until `stop` is set. Prints the line `ready(port)` once it answers."""
    async with serving(app, sock) as port:
        sys.stdout.write(ready(port) + "\n")
        sys.stdout.flush()
        await stop.wait()


def run_server(main: Callable[[], Coroutine[Any, Any, int | None]]) -> int:
    """Run a server process; returns its exit code. It logs to stderr. An ArlError is one line there, and code 2."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    try:
        return asyncio.run(main()) or 0
    except ArlError as error:
        sys.stderr.write(f"error: {error}\n")
        return _BAD_START


def allow_many_connections() -> None:
    """Raise the soft limit of open files, here and in child processes: each request in flight holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

"""An HTTP server: it listens, checks keys, answers in JSON or events, and turns exceptions into errors.

Then the frame of a server's process: its arguments, its start and end, its address, its limit of open files.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import os
import resource
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http import HttpProcessingError

from arl.api.errors import ArlError, ConfigError
from arl.api.settings.endpoint import EndpointConfig
from arl.runtime.http.bodies import RequestError
from arl.runtime.processes.parent_watch import Watch

log = logging.getLogger(__name__)
_requests_log = logging.getLogger(f"{__name__}.requests")
_SENDERS_FAULTS = (web.RequestPayloadError, HttpProcessingError)
"""aiohttp logs these with a traceback, so anybody could fill the log."""
_requests_log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], _SENDERS_FAULTS)))

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ErrorShape = Callable[[RequestError], Any]
"""From an error to the JSON of its response."""
Statuses = Mapping[type[Exception], int]
"""Exception -> HTTP status; other exceptions are failures of the server."""

PROBES = frozenset(("/health",))
DONE = "data: [DONE]\n\n"
BACKLOG = 4096
"""Most connections that wait for acceptance: thousands of clients may start at once."""
_IDLE_S = 75.0
"""How long a connection may be silent, or take to send the headers of a request."""
_BODY_S = 120.0
_READING = {"Expect": "100-continue", "Content-Encoding": "identity"}
_UNSUPPORTED = 415
_BAD_START = 2
_GIVE_A_KEY = "give it a key (--api-key-file)"


@asynccontextmanager
async def serving(
    app: web.Application, sock: socket.socket, *, tls: ssl.SSLContext | None = None, shutdown_timeout_s: float = 2.0
) -> AsyncIterator[int]:
    """Answer on a socket of `bind` within the block; yields the port, and closes the socket at the end.

    A client that goes away cancels its handler. tls: encrypts; None: plain HTTP. shutdown_timeout_s: how long running
    handlers may take at the end.
    """
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=shutdown_timeout_s,
        keepalive_timeout=_IDLE_S,
        auto_decompress=False,
        logger=_requests_log,
    )
    with sock:
        await runner.setup()
        assert runner.server is not None
        runner.server.request_handler = _understanding(runner.server.request_handler)
        try:
            await web.SockSite(runner, sock, ssl_context=tls, backlog=BACKLOG).start()
            yield sock.getsockname()[1]
        finally:
            await runner.cleanup()


def _understanding(handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> Callable[[Any], Any]:
    """The handler, behind a check that refuses headers which change how a request is read. aiohttp would unpack a body
    without a bound, and fail at an Expect that is not text, both before the key is checked."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        for name, usual in _READING.items():
            if request.headers.get(name, usual).lower() != usual:
                return web.Response(status=_UNSUPPORTED, text=f"{name} must be {usual}, or be left out")
        return await handler(request)

    return answer


async def body_of(request: web.Request) -> bytes:
    """The body. Raises RequestError if it does not arrive, or is not framed as its headers say."""
    try:
        async with asyncio.timeout(_BODY_S):
            return await request.read()
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {_BODY_S:g} s", HTTPStatus.REQUEST_TIMEOUT) from None


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
            return RequestError(f"the body is too large: {error.text}", error.status)
        case web.HTTPException():
            return RequestError(error.reason, error.status)
        case web.RequestPayloadError():
            return RequestError(f"the body cannot be read: {error}")
        case _:
            for kind, status in statuses.items():
                if isinstance(error, kind):
                    return RequestError(str(error), status)
            return RequestError(f"internal error: {error!r}", HTTPStatus.INTERNAL_SERVER_ERROR)


def is_same(given: str, expected: str) -> bool:
    """Compare keys in constant time. Headers and variables may hold bytes that are not text."""
    return hmac.compare_digest(*(key.encode(errors="surrogateescape") for key in (given, expected)))


def require_key(api_key: str, *, open_paths: frozenset[str] = PROBES) -> Any:
    """A middleware that refuses calls without the bearer token `api_key`. open_paths: paths that need no key."""
    expected = f"Bearer {api_key}"

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in open_paths and not is_same(request.headers.get("Authorization", ""), expected):
            return json_response({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)
        return await handler(request)

    return check


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


def endpoint_socket(endpoint: EndpointConfig) -> socket.socket:
    """It listens; the caller closes it. Raises ConfigError if the address is not this machine's, or taken."""
    try:
        return bind(endpoint.host, endpoint.port)
    except ConfigError as error:
        raise ConfigError(
            f"endpoint: {error}; choose an endpoint.host of this machine, and a free endpoint.port (0: any)"
        ) from error


def tls_of(endpoint: EndpointConfig) -> ssl.SSLContext | None:
    """How the endpoint encrypts; None if it does not. Raises ConfigError for files that are no certificate and key."""
    if endpoint.certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(endpoint.certificate, password=lambda: "")
    except (OSError, ValueError) as error:  # ssl's errors are OSErrors
        raise ConfigError(
            f"endpoint.certificate: {endpoint.certificate} cannot be used: {error}; it must be a PEM file with a "
            "certificate and its private key, without a password"
        ) from error
    return context


def check_endpoint(endpoint: EndpointConfig) -> None:
    """Raise ConfigError if the endpoint could not be opened now."""
    tls_of(endpoint)
    if endpoint.changed:
        endpoint_socket(endpoint).close()


def warn_if_open(endpoint: EndpointConfig) -> None:
    """Log a warning for an address that other machines can reach, where they could read what is sent."""
    is_encrypted = endpoint.certificate or (endpoint.public_url or "").startswith("https:")
    if not endpoint.is_loopback and not is_encrypted:
        log.warning(
            "the endpoint at %s is open to other machines without TLS: anybody who can read the network "
            "can read prompts, answers and keys. Set endpoint.certificate, or use a private network",
            endpoint.host,
        )


# The process


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
        raise ConfigError(f"--host is {host}, open to other machines; {_GIVE_A_KEY}, or listen on 127.0.0.1")


def add_key_option(parser: argparse.ArgumentParser, variable: str) -> None:
    """Add an option for a file, not for the key: every user of the machine can read command lines."""
    parser.allow_abbrev = False  # so that --api-key KEY is an error, not the name of a file
    about = f"a file with the bearer token that clients must send; by default ${variable}, if it is set"
    parser.add_argument("--api-key-file", type=Path, help=about)


def key_of(file: Path | None, variable: str) -> str | None:
    """The API key in a file, or without one in an environment variable. Raises ConfigError for a file without a key."""
    if file is None:
        return os.environ.get(variable) or None
    try:
        key = file.read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-key-file is {file}, which cannot be read: {error}") from error
    if not key or not key.isprintable() or not key.isascii():
        raise ConfigError(f"--api-key-file is {file}; it must hold one line of ASCII letters, the key")
    return key


async def answer_until(
    stop: asyncio.Event, app: web.Application, sock: socket.socket, ready: Callable[[int], str]
) -> None:
    """Answer on a socket of `bind` until `stop` is set. Prints the line `ready(port)` once it answers."""
    async with serving(app, sock) as port:
        sys.stdout.write(ready(port) + "\n")
        sys.stdout.flush()
        await stop.wait()


def run_server(main: Callable[[Watch], Coroutine[Any, Any, int | None]], parent_pid: int | None = None) -> int:
    """Run a server process under a Watch; returns its exit code. It logs to stderr. An ArlError is one line there, and
    code 2."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    try:
        with Watch(parent_pid) as watch:
            return asyncio.run(main(watch)) or 0
    except ArlError as error:
        sys.stderr.write(f"error: {error}\n")
        return _BAD_START


def allow_many_connections() -> None:
    """Raise the soft limit of open files, here and in child processes: each request in flight holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def addresses_of(url: str) -> set[str]:
    """The IP addresses of a server's host; empty if its name is unknown here. May wait for a server of names."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(urlsplit(url).hostname, None)}
    except (OSError, ValueError):
        return set()


def is_here(url: str) -> bool:
    """Whether a server's host is this machine, by its addresses. A name that is unknown here is elsewhere."""
    return any(map(_is_own, addresses_of(url)))


def _is_own(address: str) -> bool:
    """A machine reaches its own address from that address; asking which one it would use sends nothing."""
    host = ipaddress.ip_address(address.partition("%")[0])
    if host.is_loopback or host.is_unspecified:
        return True
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0]) == address
    except OSError:
        return False

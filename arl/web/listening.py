"""How a server process of arl listens: its socket, the key that guards an open address, the process it lives for."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import os
import resource
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from arl.api.errors import ConfigError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_PARENT_POLL_S = 1.0
_OPEN_PATHS = frozenset(("/health", "/health_generate"))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError where the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as opened:
            sock = opened.enter_context(socket.socket(family, kind, protocol))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(2048)
            opened.pop_all()  # the caller closes it
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return sock


def watch_parent(pid: int, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Set `stop` when process `pid` is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        stop.set()
    except (AttributeError, OSError):  # no such call on this system: look from time to time
        _poll_parent(pid, loop, stop)
    else:
        loop.add_reader(descriptor, _parent_ended, descriptor, loop, stop)


def _parent_ended(descriptor: int, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    loop.remove_reader(descriptor)
    os.close(descriptor)
    stop.set()


def _poll_parent(pid: int, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        stop.set()
    else:
        loop.call_later(_PARENT_POLL_S, _poll_parent, pid, loop, stop)


def require_key(api_key: str) -> Any:
    """A middleware that lets only bearers of `api_key` in; health stays open to probes."""
    expected = f"Bearer {api_key}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode()
        if request.path not in _OPEN_PATHS and not hmac.compare_digest(given, expected):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    return check


# Room for thousands of connections at once.


def allow_many_connections() -> None:
    """Raise this process's soft limit of open files, often 1,024 or less, to what it is allowed.

    Every request in flight holds a connection, and each connection is an open file, here and in the server; child
    processes inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

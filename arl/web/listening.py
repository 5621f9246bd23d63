"""Sockets, signals and limits of a server process. Needs no HTTP library."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import resource
import signal
import socket

from arl.api.errors import ConfigError

BACKLOG = 4096
"""Most connections that wait for acceptance: thousands of clients may start at once."""
_PARENT_POLL_S = 1.0


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
        raise ConfigError(
            f"--host is {host}, which other machines can reach; give --api-key KEY too, or listen on 127.0.0.1"
        )


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
        watch_parent(parent_pid, loop, stop)
    return stop


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


def allow_many_connections() -> None:
    """Raise this process's soft limit of open files, often 1,024 or less, as far as allowed.

    Every request in flight holds a connection, and each connection is an open file here and in the server. Child
    processes inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

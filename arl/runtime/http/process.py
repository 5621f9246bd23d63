"""The frame of a server process: its arguments, its start and end, its socket's address, its limit of open files."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import resource
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from arl.api.errors import ArlError, ConfigError
from arl.runtime.http.server import serving
from arl.runtime.processes.parent_watch import Watch

_BAD_START = 2
_GIVE_A_KEY = "give it a key (--api-key-file)"


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

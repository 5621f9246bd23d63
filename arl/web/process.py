"""The frame of a server process: its start and end, its socket's address, its limit of open files."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import ipaddress
import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from arl.api.errors import ArlError, ConfigError
from arl.web.server import serving

_PARENT_POLL_S = 1.0
_GRACE_S = 5.0
"""How long a process may take to end after it was told to. Then it is ended, whatever it does."""
_BAD_START = 2
_GIVE_A_KEY = "give it a key (--api-key-file)"
_STDERR = 2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_OVER = b"\0"
"""No signal has this number."""


class Watch:
    """Ends this process when its parent is gone or a signal says so, also while its event loop is blocked.

    A thread waits for both from the first line of `with`, before heavy imports. Until `stop_event` is called, the
    parent's end ends the process at once, and signals do what they always do. From then on both set the event. If the
    process still runs _GRACE_S later, faulthandler's timer writes the tracebacks of all threads to stderr and ends it
    with code 1. The timer needs no lock that a blocked thread could hold.
    """

    def __init__(self, parent_pid: int | None = None) -> None:
        self._parent_pid = parent_pid
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._stop: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._wait, name="arl-watch", daemon=True)

    def __enter__(self) -> Self:
        self._handlers = [(number, signal.getsignal(number)) for number in _SIGNALS]
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._stop is not None:
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers:
                signal.signal(number, handler)
        with contextlib.suppress(BlockingIOError):  # full of signals: the thread has ended
            self._write.send(_OVER)
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._read.close()
        self._write.close()

    def stop_event(self) -> asyncio.Event:
        """An event of the running loop that SIGTERM, SIGINT or the end of the parent sets. Call it once, on the main
        thread."""
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)
        # Before the handlers, or a signal that came between would be lost.
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)  # the thread reads its number, even while this one is blocked
        return stop

    def _wait(self) -> None:
        with contextlib.ExitStack() as opened:
            if not self._is_told(opened):
                return
        if self._stop is None:
            os._exit(0)
        faulthandler.dump_traceback_later(_GRACE_S, exit=True, file=_STDERR)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is about to end
            self._stop()

    def _is_told(self, opened: contextlib.ExitStack) -> bool:
        """Wait until the process has to end, or the watch is over. Returns whether the process has to end."""
        parent, waiting = self._parent(opened), select.poll()
        for descriptor in (self._read.fileno(), *parent):
            waiting.register(descriptor, select.POLLIN)
        is_polled = self._parent_pid is not None and not parent
        while not is_polled or _is_there(self._parent_pid):
            ready = [descriptor for descriptor, _ in waiting.poll(1000 * _PARENT_POLL_S if is_polled else None)]
            if self._read.fileno() in ready:
                return self._read.recv(1) != _OVER
            if ready:
                break
        return True

    def _parent(self, opened: contextlib.ExitStack) -> Sequence[int]:
        """A descriptor that becomes readable when the parent ends; none if it is gone, or this system has none."""
        try:
            descriptors = [] if self._parent_pid is None else [os.pidfd_open(self._parent_pid)]
        except (AttributeError, OSError):
            return ()
        for descriptor in descriptors:
            opened.callback(os.close, descriptor)
        return descriptors


def _is_there(pid: int | None) -> bool:
    try:
        os.kill(pid or 0, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


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

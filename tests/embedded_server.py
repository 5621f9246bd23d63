"""Embedded servers for tests: on a thread of this process, which is fast, or as the process that users start."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from arl.engine.local.__main__ import application, load_scheduler, parse_arguments
from arl.engine.local.generate import Inflight
from arl.web.server import bind, serving


@contextmanager
def server_here(model: str, *options: str) -> Iterator[str]:
    """The URL of a server that answers over HTTP from a thread of this process."""
    started: Future[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def answer() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        args, inflight = parse_arguments(["--model", model, *options]), Inflight(loop)
        scheduler = load_scheduler(args, inflight)
        scheduler.start()
        try:
            async with serving(application(args, scheduler, inflight), bind("127.0.0.1", 0)) as port:
                started.set_result((port, loop, stop))
                await stop.wait()
                scheduler.abort(None)
        finally:
            scheduler.close()

    def run() -> None:
        try:
            asyncio.run(answer())
        except Exception as error:  # noqa: BLE001 - the test that waits for the server is told
            started.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    port, loop, stop = started.result()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


class ServerProcess:
    """A server of arl in a process of its own, which may be killed, and started again at the same address."""

    def __init__(self, module: str, *options: str) -> None:
        self._command = [sys.executable, "-m", module, "--parent-pid", str(os.getpid()), *options]
        self._port = 0
        self.process = self.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> subprocess.Popen[str]:
        """Returns when it is ready."""
        command = [*self._command, "--port", str(self._port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
        assert self.process.stdout is not None
        self._port = json.loads(self.process.stdout.readline())["port"]
        return self.process

    def kill(self) -> None:
        """Idempotent."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def command(model: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "arl.engine.local", "--model", model, *options]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@contextmanager
def server_process(model: str, *options: str) -> Iterator[ServerProcess]:
    process = ServerProcess("arl.engine.local", "--model", model, *options)
    try:
        yield process
    finally:
        process.kill()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]

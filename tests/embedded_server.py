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
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class RunningServer:
    process: subprocess.Popen[str]
    ready: dict[str, Any]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ready['port']}"


def command(model: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "arl.engine.local", "--model", model, *options]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@contextmanager
def server_process(model: str, *options: str) -> Iterator[RunningServer]:
    process = subprocess.Popen(command(model, *options), stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    try:
        yield RunningServer(process, json.loads(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]

"""Embedded servers for tests: on a thread of this process, or as a process that a nursery forks, which is fast, too."""

import asyncio
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from nursery import Forked, Nursery

from arl.engine.local.__main__ import application, load_scheduler, parse_arguments
from arl.engine.local.generate import Inflight
from arl.runtime.http.server import bind, serving

IMPORTED_BY_SERVERS = ("arl.engine.local.app", "arl.engine.local.model_thread")
SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@contextmanager
def server_here(model: str, *options: str) -> Iterator[str]:
    """The URL of a server that answers over HTTP from a thread of this process."""
    started: Future[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def answer() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        args = parse_arguments(["--model", model, *options])
        scheduler = load_scheduler(args)
        inflight = Inflight(loop, scheduler)
        scheduler.start(inflight.deliver)
        try:
            async with serving(application(args, inflight), bind("127.0.0.1", 0)) as port:
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
        self._module = module
        self._options = ["--parent-pid", str(os.getpid()), *options]
        self._port = 0
        self.process = self.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> subprocess.Popen[str]:
        """Returns when it is ready."""
        command = [sys.executable, "-m", self._module, *self._options, "--port", str(self._port)]
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


class ForkedServer(ServerProcess):
    """An embedded server whose process finds torch imported."""

    serves = "embedded_server:serve"

    def __init__(self, nursery: Nursery, directory: Path, *options: str) -> None:
        self._nursery = nursery
        self._directory = directory
        super().__init__("arl.engine.local", *options)

    def start(self) -> "ForkedProcess":
        pipe, log = self._directory / "stdout", self._directory / "log"
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
        arguments = [*self._options, "--port", str(self._port)]
        forked = self._nursery.fork(self.serves, {"stdout": pipe, "arguments": arguments}, log)
        self.process = ForkedProcess(forked)
        with pipe.open() as reader:
            ready = reader.readline()
        assert ready, log.read_text()
        self._port = json.loads(ready)["port"]
        return self.process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class ForkedProcess:
    """As much of a Popen as tests need."""

    def __init__(self, forked: Forked) -> None:
        self._forked = forked

    def send_signal(self, number: int) -> None:
        if self._forked.is_running:
            os.kill(self._forked.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        return self._forked.code.result(timeout)


def serve(stdout: str, arguments: list[str]) -> None:
    """What the process does: all that `python -m arl.engine.local` would do."""
    os.dup2(os.open(stdout, os.O_WRONLY), 1)
    sys.argv = ["arl.engine.local", *arguments]
    runpy.run_module("arl.engine.local", run_name="__main__", alter_sys=True)


class SharedNursery:
    """Begins with the first server of the tests, and ends with the tests."""

    def __init__(self) -> None:
        self._nursery: Nursery | None = None

    def get(self) -> Nursery:
        if self._nursery is None:
            self._nursery = Nursery(["embedded_server", *IMPORTED_BY_SERVERS], **SETTINGS)
        return self._nursery

    def close(self) -> None:
        if self._nursery is not None:
            self._nursery.__exit__()
            self._nursery = None


NURSERY = SharedNursery()


def command(model: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "arl.engine.local", "--model", model, *options]


def environment() -> dict[str, str]:
    return {**os.environ, **SETTINGS}


@contextmanager
def server_process(model: str, *options: str) -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory(prefix="arl-server-") as directory:
        process = ForkedServer(NURSERY.get(), Path(directory), "--model", model, *options)
        try:
            yield process
        finally:
            process.kill()

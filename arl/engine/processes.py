"""Embedded servers as child processes: started together, watched, and gone when the block is left."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from arl.api.config import LocalEngineConfig
from arl.api.errors import ServerError, first_error
from arl.engine.descriptors import allow_many_connections

_STOP_TIMEOUT_S = 5.0
_LOG_LINES = 20

logger = logging.getLogger(__name__)


@asynccontextmanager
async def local_servers(model: str, config: LocalEngineConfig, log_dir: Path) -> AsyncIterator[Sequence[str]]:
    """Start config.num_servers embedded servers of the model directory `model`; gives their base URLs.

    What server K says goes to log_dir/server-K.log. A server that dies while others live is reported as a warning (the
    engine fences it by itself); when the last has died the block is cancelled and ServerError raised in its place.
    Leaving the block, however it is left, ends them: SIGTERM, and SIGKILL a few seconds later.

    Raises ServerError with the end of the log if one dies or is not ready within startup_timeout_s.
    """
    children: list[_Child] = []
    body_error: Exception | None = None
    allow_many_connections()
    try:
        for index in range(config.num_servers):
            await _start(children, model, config, log_dir / f"server-{index}.log")
        addresses = await _until_ready(children, config.startup_timeout_s)
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_watch(children))
            try:
                yield addresses
            except Exception as error:  # noqa: BLE001 - raised again below, outside the group that would wrap it
                body_error = error
            watcher.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    finally:
        await _stop(children)
    if body_error is not None:
        raise body_error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    process: asyncio.subprocess.Process
    log: Path

    def last_words(self) -> str:
        """How it ended, with the end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        code = self.process.returncode
        how = "is still running" if code is None else f"ended with exit code {code}"
        return f"the server {how}; the end of {self.log}:\n" + "\n".join(lines or ["(it is empty)"])


async def _start(children: list[_Child], model: str, config: LocalEngineConfig, log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        process = await asyncio.create_subprocess_exec(
            *_command(model, config),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=stream,
            env=_environment(config.num_threads),
            start_new_session=True,  # Ctrl-C reaches us alone; we stop them in order
        )
    children.append(_Child(process=process, log=log))


def _command(model: str, config: LocalEngineConfig) -> list[str]:
    command = [sys.executable, "-m", "arl.engine.local", "--model", model, "--port", "0"]
    command += ["--device", config.device, "--num-threads", str(config.num_threads)]
    command += ["--max-running-requests", str(config.max_running_requests)]
    if config.context_length is not None:
        command += ["--context-length", str(config.context_length)]
    return [*command, "--parent-pid", str(os.getpid())]


def _environment(num_threads: int) -> dict[str, str]:
    """Torch reads its thread counts when it is imported, so they have to be set from outside."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(num_threads))
    return {**os.environ, **threads, "PYTHONUNBUFFERED": "1"}


async def _until_ready(children: Sequence[_Child], timeout_s: float) -> list[str]:
    async with asyncio.TaskGroup() as group:
        waits = [group.create_task(_ready_address(child, timeout_s)) for child in children]
    return [wait.result() for wait in waits]


async def _ready_address(child: _Child, timeout_s: float) -> str:
    """The base URL, from the line that the server prints once it answers: {"event": "ready", "port": N}."""
    try:
        async with asyncio.timeout(timeout_s):
            while line := await _stdout(child).readline():
                if (port := _ready_port(line)) is not None:
                    return f"http://127.0.0.1:{port}"
            await child.process.wait()
    except TimeoutError:
        raise ServerError(
            f"an embedded server was not ready within {timeout_s:g} s (engine.startup_timeout_s): {child.last_words()}"
        ) from None
    raise ServerError(f"an embedded server did not start: {child.last_words()}")


def _stdout(child: _Child) -> asyncio.StreamReader:
    if child.process.stdout is None:
        raise RuntimeError("the child's stdout is not a pipe")
    return child.process.stdout


def _ready_port(line: bytes) -> int | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event["port"] if isinstance(event, dict) and event.get("event") == "ready" else None


async def _watch(children: Sequence[_Child]) -> None:
    """Wait for all children to end, which none should; raise when none is left."""

    async def watch(child: _Child) -> str:
        while await _stdout(child).read(65_536):
            pass  # nothing is said there after the ready line, but a full pipe would block whoever tries
        await child.process.wait()
        words = await asyncio.to_thread(child.last_words)
        logger.warning("an embedded server died: %s", words)
        return words

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(watch(child)) for child in children]
    raise ServerError(f"every embedded server died; {tasks[0].result()}")


async def _stop(children: Sequence[_Child]) -> None:
    """End what still runs: asked first, then killed; killed at once if this is cancelled in turn."""
    for child in children:
        _signal(child, signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            for child in children:
                await child.process.communicate()
    except TimeoutError:
        logger.warning("an embedded server did not stop within %g s and is killed", _STOP_TIMEOUT_S)
    finally:
        for child in children:
            _signal(child, signal.SIGKILL)
    for child in children:
        await child.process.communicate()


def _signal(child: _Child, number: signal.Signals) -> None:
    if child.process.returncode is None:
        child.process.send_signal(number)

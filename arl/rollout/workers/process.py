"""The process of a worker, as the controller's process starts it, watches it and ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from arl.rollout.workers.messages import Pipe
from arl.runtime.processes.logs import ChildLog, how_it_ended

_BEAT_S = 5.0
_SILENT_S = 15.0
"""A process that twice does not answer for this long is killed."""
_STARTING_S = 150.0
"""The same limit until its first answer, which comes when Python has started."""
_ENDING_S = 1.0
_REAPING_S = 60.0
"""A killed process that has not ended by then, as when its disk has failed, is left behind."""


class WorkerProcess:
    """A process, in a session of its own, that ends with this one, however this one ends. `run` starts another."""

    def __init__(self, log: Path, take: Callable[[Any], None]) -> None:
        """log: gets what it writes to stdout and stderr. take: called with each of its messages."""
        self.log = ChildLog(log)
        self._take = take
        self._process: asyncio.subprocess.Process | None = None
        self._pipe: Pipe | None = None
        self._fault = ""
        """The reason for its end, if it did not end by itself."""
        self._is_over = False
        """`kill` was called: no process starts any more."""

    def send(self, message: object) -> None:
        """Does nothing without a process."""
        if self._pipe is not None:
            self._pipe.send(message)

    def kill(self) -> None:
        """For ever."""
        self._is_over = True
        self._kill()

    def give_up(self, why: str) -> None:
        """Kill the process that runs, if any; `run` returns why: a phrase that goes on "and was killed"."""
        if self._process is not None:
            self._fault = f"{why} and was killed"
            self._kill()
            if self._pipe is not None:
                self._pipe.abort()  # nothing of it is waited for any more

    async def run(self, first: bytes) -> str:
        """Run the process from its start, with this as its first message, to its end; returns how it ended."""
        ours, theirs = socket.socketpair()
        beats, their_beats = socket.socketpair()
        beats.setblocking(False)
        self._fault = ""
        with ours, beats:
            try:
                with theirs, their_beats:
                    self._process = process = await self._spawn(theirs, their_beats)
            except OSError as error:  # the machine has no memory, or no process, left
                return f"could not be started ({error})"
            try:
                _, pipe = await asyncio.get_running_loop().create_connection(lambda: Pipe(self._take), sock=ours)
                self._pipe = pipe
                pipe.write(first)
                if self._is_over:
                    self._kill()
                await self._until_it_ends(process, pipe, beats)
            finally:
                self._kill()
                await outlast(process.wait, _REAPING_S)
                if self._pipe is not None:
                    self._pipe.abort()
        if process.returncode is None:
            return f"{self._fault or 'was killed'}, but has not ended {_REAPING_S:g} s later (process {process.pid})"
        return self._fault or pipe.fault or how_it_ended(process.returncode)

    async def _until_it_ends(self, process: asyncio.subprocess.Process, pipe: Pipe, beats: socket.socket) -> None:
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(self._watch(beats))
            ends = {tasks.create_task(_end_of_process(process)), tasks.create_task(_end_of_pipe(pipe))}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(ends, timeout=_ENDING_S)  # the other follows, unless something holds it up
            for task in (beating, *ends):
                task.cancel()

    async def _spawn(self, theirs: socket.socket, beats: socket.socket) -> asyncio.subprocess.Process:
        descriptors = [theirs.fileno(), beats.fileno()]
        with self.log.opened() as stream:
            return await asyncio.create_subprocess_exec(
                # The log tells people who look at the machine's processes what this one is.
                *(
                    sys.executable,
                    "-m",
                    "arl.rollout.workers.worker",
                    *map(str, (*descriptors, os.getpid(), self.log.path)),
                ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C reaches us alone; and one signal reaches all that it starts
            )

    async def _watch(self, beats: socket.socket) -> None:
        """Kill a process that gives no sign of life. Its event loop may be blocked: a thread answers."""
        loop, silences, limit_s = asyncio.get_running_loop(), 0, _STARTING_S
        while silences < 2:  # after the first, this process may itself have been stopped
            try:
                async with asyncio.timeout(limit_s):
                    await loop.sock_sendall(beats, b".")
                    await loop.sock_recv(beats, 64)
                silences, limit_s = 0, _SILENT_S
                await asyncio.sleep(_BEAT_S)
            except TimeoutError:
                silences += 1
            except OSError:
                return  # it has ended
        self.give_up(f"gave no sign of life for {2 * limit_s:g} s")

    def _kill(self) -> None:
        """End it and its children, which may outlive it. Only once: later its id may belong to another process."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


async def _end_of_process(process: asyncio.subprocess.Process) -> None:
    await process.wait()


async def _end_of_pipe(pipe: Pipe) -> None:
    await pipe.ended


async def outlast(wait: Callable[[], Awaitable[object]], limit_s: float) -> bool:
    """Wait for so long at most, however often the caller is cancelled. Returns whether the wait came to its end."""
    loop = asyncio.get_running_loop()
    until = loop.time() + limit_s
    while loop.time() < until:
        with suppress(asyncio.CancelledError, TimeoutError):
            async with asyncio.timeout_at(until):
                await wait()
                return True
    return False

"""Both ends of a running program: what it reads and what it writes. Imports nothing of arl, for the keeper."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable

_CHUNK = 1 << 16
"""Bytes read at once."""


class Output:
    """What a program writes, up to `limit` bytes of both streams together; sets `wake` when it writes more."""

    def __init__(self, limit: int, wake: asyncio.Event) -> None:
        self._room = limit
        self._wake = wake
        self.overflowed = False

    async def read(self, stream: asyncio.StreamReader | None) -> bytes:
        """Read a stream to its end, also when there is no room for more."""
        assert stream is not None
        kept = bytearray()
        while chunk := await stream.read(_CHUNK):
            kept += chunk[: self._room]
            if len(chunk) > self._room:
                self.overflowed = True
                self._wake.set()
            self._room = max(0, self._room - len(chunk))
        return bytes(kept)


async def feed(pipe: asyncio.StreamWriter | None, stdin: bytes) -> None:
    """Write all of stdin, as fast as the program reads it and as long as it does, and close it."""
    assert pipe is not None
    with contextlib.suppress(ConnectionError):
        pipe.write(stdin)
        await pipe.drain()
    pipe.close()
    with contextlib.suppress(ConnectionError):
        await pipe.wait_closed()


async def finish(
    process: asyncio.subprocess.Process,
    stdin: bytes,
    *,
    output_bytes: int,
    wall_s: float,
    kill: Callable[[bool], Awaitable[None]],
) -> tuple[str, bytes, bytes]:
    """See a process to its end: what ended it ("exit", "output" or "timeout"), stdout and stderr.

    kill: ends all that belongs to it; awaited at a limit and when this is cancelled, and, told True, when the process
    has ended by itself.
    """
    wake = asyncio.Event()
    output = Output(output_bytes, wake)
    ended = "exit"

    async def watch() -> None:
        nonlocal ended
        try:
            async with asyncio.timeout(wall_s):
                await wake.wait()
            ended = "output"
        except TimeoutError:
            ended = "timeout"
        await kill(False)

    try:
        async with asyncio.TaskGroup() as group:
            reading = [group.create_task(output.read(stream)) for stream in (process.stdout, process.stderr)]
            group.create_task(feed(process.stdin, stdin))
            watching = group.create_task(watch())
            await _end_of(process)
            if ended == "exit":
                watching.cancel()
                await kill(True)
    except BaseException:
        await kill(False)
        await process.wait()
        raise
    await process.wait()
    stdout, stderr = (task.result() for task in reading)
    return "output" if ended == "exit" and output.overflowed else ended, stdout, stderr


async def _end_of(process: asyncio.subprocess.Process) -> None:
    """Process.wait() may also wait for its pipes, which its children may hold open."""
    if sys.platform != "linux":
        await process.wait()
        return
    with contextlib.suppress(ProcessLookupError):
        file, ended = os.pidfd_open(process.pid), asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(file, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(file)
            os.close(file)

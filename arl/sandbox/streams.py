"""Bytes in and out: messages between arl and its keeper, and both ends of a running program.

Imports nothing of arl, because the keeper runs in a bare Python. A message is one line of JSON; its `blobs` are the
lengths of the byte strings that follow it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

_CHUNK = 1 << 16
"""Bytes read at once."""
_MOST_LINE = 1 << 30
"""The longest line of a message: it has the names of all files."""
_DRAIN_S = 2.0
"""How long pipes may stay open after their program has ended: processes that it left behind may hold them."""

Header = dict[str, Any]
"""The line of a message; the diagram in keeper.py names those of both sides."""


def message(header: Header, blobs: Sequence[bytes] = ()) -> bytes:
    line = json.dumps({**header, "blobs": [len(blob) for blob in blobs]})
    return b"".join([line.encode(), b"\n", *blobs])


async def received(reader: asyncio.StreamReader) -> tuple[Header, list[bytes]]:
    """The next message. Raises IncompleteReadError if the other side went away before its end."""
    header: Header = json.loads(await reader.readuntil(b"\n"))
    return header, [await reader.readexactly(length) for length in header["blobs"]]


async def connected(end: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(sock=end, limit=_MOST_LINE)


class Output:
    """A program's output, up to `limit` bytes of both streams together; sets `wake` when it writes more."""

    def __init__(self, limit: int, wake: asyncio.Event) -> None:
        self._room = limit
        self._wake = wake
        self.overflowed = False

    async def read(self, stream: asyncio.StreamReader | None) -> bytes:
        """Read a stream to its end, even without room for more."""
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
    """Write stdin as fast as the program reads it, until it stops reading. Then close it, so that it sees the end."""
    assert pipe is not None
    with contextlib.suppress(ConnectionError):
        pipe.write(stdin)
        await pipe.drain()
    pipe.close()


def drop(pipe: asyncio.WriteTransport) -> None:
    """Close a program's stdin, even if a process that the program left behind holds it open and never reads it."""
    if pipe.get_write_buffer_size():
        pipe.abort()  # close() would wait until the rest is read
    else:
        pipe.close()  # abort() fails if the pipe is closed


async def finish(
    process: asyncio.subprocess.Process,
    stdin: bytes,
    *,
    output_bytes: int,
    wall_s: float,
    kill: Callable[[bool], Awaitable[None]],
) -> tuple[str, bytes, bytes]:
    """Wait for a process to end. Returns how it ended ("exit", "output" or "timeout"), stdout and stderr.

    kill: ends all processes that belong to it; awaited at a limit, on cancellation, and, with True, after the process
    has ended by itself.
    """
    assert process.stdin is not None
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
            feeding = group.create_task(feed(process.stdin, stdin))
            watching = group.create_task(watch())
            await _end_of(process)
            if ended == "exit":
                watching.cancel()
                await kill(True)
            await asyncio.wait([*reading, feeding], timeout=_DRAIN_S)
            _let_go(process)
        await process.wait()
    except BaseException:
        with contextlib.closing(process._transport):  # pyright: ignore[reportAttributeAccessIssue]
            _let_go(process)
            await kill(False)
            await process.wait()
        raise
    stdout, stderr = (task.result() for task in reading)
    return "output" if ended == "exit" and output.overflowed else ended, stdout, stderr


def _let_go(process: asyncio.subprocess.Process) -> None:
    """Close this end of the pipes, as processes that the program left behind may hold the others open."""
    transport: asyncio.SubprocessTransport = process._transport  # pyright: ignore[reportAttributeAccessIssue]
    for file in (1, 2):
        if pipe := transport.get_pipe_transport(file):
            pipe.close()
    assert process.stdin is not None
    drop(process.stdin.transport)


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

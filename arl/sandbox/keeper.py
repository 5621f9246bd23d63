"""The process beside arl's own that starts programs, watches them and ends them.

Of arl it imports only its neighbours: see START in bubblewrap.py.

It forks from a small memory, goes on watching while arl computes, and ends everything when arl ends, however arl ends.
If root starts it, it first becomes nobody, because root's processes escape RLIMIT_NPROC.

    arl --- run: command, files, stdin, limits; stop ---> Keeper --- starts ---> bwrap --- pid 1 --- the program
        <-- how it ended, stdout, stderr ---------------  watches all of that pid namespace; kills pid 1

| wait | woken by |
|---|---|
| a program's place to run | a program that ended |
| bwrap's report of pid 1 | bwrap, at once, or its exit |
| a program's end | bwrap's exit; the watch, which kills it at a limit, or when told to stop it |
| the keeper's end | the socket to arl, closed by arl or by its death |
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
import time

from arl.sandbox.cgroup import Cgroups, RunCgroups, remove_leftovers
from arl.sandbox.namespace import Namespace
from arl.sandbox.streams import Frames, Header, Output, feed, frame

NOBODY = 65534
STAGE = "/mnt"
"""A keeper started by root finds staged directories here, in a separate mount namespace."""
WATCH_S = 0.01
"""Seconds between two checks of a running program. Between them it can exceed a limit unseen."""

_DEATH_SIGNAL, _SUBREAPER = 1, 36
_MOUNTS, _BIND, _RECURSIVE, _PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000


class BwrapRun:
    """One run of bwrap: its process, and pid 1 of the program's namespace, through which all of it is killed."""

    def __init__(self, request: Header, blobs: list[bytes], cgroups: Cgroups) -> None:
        self._request = request
        self._cgroups = cgroups
        self._limits: dict[str, float] = request["limits"]
        self._stdin, self._filter, *self._files = blobs
        self._wake = asyncio.Event()
        self._is_stopped = False
        self._ended_by = "exit"
        self._first: int | None = None

    def stop(self) -> None:
        self._is_stopped = True
        self._wake.set()

    async def run(self) -> tuple[Header, list[bytes]]:
        """Run it to its end. Once all its processes are gone, returns how it ended, stdout and stderr."""
        if self._is_stopped:
            return {"ended_by": "stopped"}, []
        async with self._cgroups.made(self._limits) as cgroups:
            header, written = await self._run(cgroups)
        return {**header, "cgroups": self._cgroups.names}, written

    async def _run(self, cgroups: RunCgroups) -> tuple[Header, list[bytes]]:
        started = time.monotonic()
        status = asyncio.StreamReader()
        process = await self._start(status, cgroups)
        output = Output(int(self._limits["output_bytes"]), self._wake)
        try:
            async with asyncio.TaskGroup() as group:
                reading = [group.create_task(output.read(stream)) for stream in (process.stdout, process.stderr)]
                group.create_task(feed(process.stdin, self._stdin))
                # No limit ends this wait: a bwrap that is killed before it reports may leave pid 1 running, unwatched.
                first = json.loads(await status.readline() or "{}").get("child-pid")  # none if bwrap failed
                self._first = first and _pidfd(first)
                watching = group.create_task(self._watch(first, output, started, cgroups))
                watching.add_done_callback(lambda _: self._kill(process))  # also one that failed
                await process.wait()
                watching.cancel()
        finally:
            self._kill(process)
            await process.wait()
            await self._bury()
        if self._ended_by == "exit":
            self._ended_by = "output" if output.overflowed else cgroups.exceeded() or "exit"
        written = [task.result() for task in reading]
        header: Header = {"ended_by": self._ended_by, "wall_s": time.monotonic() - started, "code": process.returncode}
        if self._ended_by == "exit" and b"exit-code" not in await status.read():
            header["error"] = written[1].decode(errors="replace").strip()
        return header, written

    async def _start(self, status: asyncio.StreamReader, cgroups: RunCgroups) -> asyncio.subprocess.Process:
        with contextlib.ExitStack() as inherited:
            options, passed = [], []
            if self._filter:
                passed.append(_readable(self._filter, inherited))
                options += ["--seccomp", str(passed[-1])]
            for path, content in zip(self._request["files"], self._files, strict=True):
                passed.append(_readable(content, inherited))
                options += ["--file", str(passed[-1]), path]
            reader, writer = os.pipe()
            inherited.callback(os.close, writer)
            loop = asyncio.get_running_loop()
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(status), os.fdopen(reader, "rb"))
            command = [*self._request["command"], "--json-status-fd", str(writer), *options, *self._request["program"]]
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=[*passed, writer],
                cwd="/",
                env={},  # the program can read the environment of pid 1, a process of bwrap
                preexec_fn=cgroups.enter if cgroups else None,  # before it can fork
            )

    async def _watch(self, first: int | None, output: Output, started: float, cgroups: RunCgroups) -> None:
        if first is None:
            return
        try:
            async with asyncio.timeout(started + self._limits["wall_s"] - time.monotonic()):
                self._ended_by = await self._excess(first, output, cgroups)
        except TimeoutError:
            self._ended_by = "timeout"

    def _kill(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._first is None:
                process.kill()
            else:
                signal.pidfd_send_signal(self._first, signal.SIGKILL)

    async def _excess(self, first: int, output: Output, cgroups: RunCgroups) -> str:
        """Wait until the program exceeds a limit. No event reports memory, so this checks it again and again."""
        namespace, pause_s = Namespace(first, self._limits), WATCH_S
        try:
            while not self._wake.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._wake.wait()
                began = time.monotonic()
                if excess := cgroups.exceeded() or namespace.exceeded():
                    return excess
                # If processes share much memory, a check is slow; it must not keep the keeper from other programs.
                pause_s = max(WATCH_S, 10 * (time.monotonic() - began))
            return "output" if output.overflowed else "stopped"
        finally:
            namespace.close()

    async def _bury(self) -> None:
        """Wait until pid 1 is gone. It is the last to go; bwrap ends earlier and leaves it to this process."""
        if self._first is None:
            return
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._first, gone.set)
        await gone.wait()
        loop.remove_reader(self._first)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._first, os.WEXITED)  # noqa: ASYNC222 - it has ended
        os.close(self._first)


class Keeper:
    """Runs the programs that arl sends, `places` at once, and reports each."""

    def __init__(self, places: int, cgroups: Cgroups) -> None:
        self._cgroups = cgroups
        self._places = asyncio.Semaphore(places)
        self._programs: dict[int, BwrapRun] = {}
        self._group = asyncio.TaskGroup()
        self._left = asyncio.Event()
        self._transport: asyncio.WriteTransport | None = None

    async def serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        async with self._group:
            transport, _ = await loop.create_connection(lambda: Frames(self._received, self._left.set), sock=connection)
            self._transport = transport
            loop.add_signal_handler(signal.SIGTERM, transport.close)
            await self._left.wait()
            for program in self._programs.values():
                program.stop()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # asyncio closes what its handler writes to, and then the handler

    def _received(self, header: Header, blobs: list[bytes]) -> None:
        number: int = header["id"]
        if "stop" not in header:
            self._programs[number] = BwrapRun(header, blobs, self._cgroups)
            self._group.create_task(self._run(number))
        elif number in self._programs:
            self._programs[number].stop()

    async def _run(self, number: int) -> None:
        async with self._places:
            try:
                header, blobs = await self._programs[number].run()
            except Exception as error:  # noqa: BLE001 - reported to arl, which raises it
                header, blobs = {"error": _first_cause(error)}, []
        del self._programs[number]
        if self._transport and not self._transport.is_closing():
            self._transport.write(frame({**header, "id": number}, blobs))


def _first_cause(error: Exception) -> str:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return repr(error)


def _readable(content: bytes, inherited: contextlib.ExitStack) -> int:
    file = os.memfd_create("file")
    inherited.callback(os.close, file)
    with os.fdopen(os.dup(file), "wb") as writer:
        writer.write(content)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _stage(paths: list[str]) -> None:
    """Bind each path to STAGE/0, STAGE/1 and so on, readable by all, in this process's mount namespace."""
    _checked(_libc.unshare(_MOUNTS))
    _checked(_libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None))
    opened = [os.open(path, os.O_PATH) for path in paths]
    _checked(_libc.mount(b"tmpfs", STAGE.encode(), b"tmpfs", 0, b"mode=755"))
    for number, file in enumerate(opened):
        place = f"{STAGE}/{number}"
        os.mkdir(place)
        _checked(_libc.mount(f"/proc/self/fd/{file}".encode(), place.encode(), None, _BIND | _RECURSIVE, None))
        os.close(file)


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def main() -> None:
    connection, places, parent, *staged = sys.argv[1:]
    if staged:
        _stage(staged)
    remove_leftovers()
    cgroups = Cgroups(owner=NOBODY if os.geteuid() == 0 else None)
    if os.geteuid() == 0:
        _become_nobody()
    cgroups.prove()
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # the files of programs arrive as descriptors
    _checked(_libc.prctl(_SUBREAPER, 1, 0, 0, 0))
    _checked(_libc.prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0))  # a process forked from arl may hold the socket open
    if os.getppid() == int(parent):
        asyncio.run(Keeper(int(places), cgroups).serve(socket.socket(fileno=int(connection))))

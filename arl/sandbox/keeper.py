"""The process beside arl's own that starts programs, watches them and ends them.

Of arl it imports only its neighbours: see START in bubblewrap.py.

It forks from a small memory, goes on watching while arl computes, and ends everything when arl ends, however arl ends.
If root starts it, it first becomes nobody, because root's processes escape RLIMIT_NPROC.

    arl --- a connection for each run: command, files, stdin, limits ---> Keeper --- starts ---> bwrap --- pid 1 ---
        <-- how it ended, stdout, stderr ------------------------------  watches all of that pid namespace; kills pid 1

Connections, and the entrance of a run's cgroup, arrive as descriptors over the socket to arl.

| wait | woken by |
|---|---|
| bwrap's report of pid 1 | bwrap, at once, or its exit |
| a program's end | bwrap's exit; the watch, which kills it at a limit, or when arl closes the connection |
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
from collections.abc import Mapping
from functools import partial

from arl.sandbox import cgroup
from arl.sandbox.streams import Header, Output, connected, feed, message, received

SET_UP_S = 20.0
"""How long bubblewrap may take until the keeper can see a program's namespace. It usually takes milliseconds."""

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_OWN_CPU, _CPU, _THREADS, _START, _RESIDENT = slice(11, 13), slice(11, 15), 17, 19, 21
"""Fields of /proc/PID/stat after the name (proc(5)): user and system ticks of the process; the same and the ticks of
children that it waited for; threads; start time; resident pages."""
_SOCKET_BYTES = 212_992
"""net.core.wmem_default, unless the host changed it."""


class Namespace:
    """Checks a program's limits as often as asked. pid: of the namespace's pid 1, which is bubblewrap's."""

    def __init__(self, pid: int, limits: Mapping[str, float]) -> None:
        self._pid = pid
        self._limits = limits
        self._began = time.monotonic()
        self._opened: int | None = None
        self._own_ticks: dict[tuple[str, bytes], int] = {}

    def close(self) -> None:
        if self._opened is not None:
            os.close(self._opened)

    @property
    def _root(self) -> str:
        return f"/proc/self/fd/{self._opened}"

    def exceeded(self) -> str | None:
        """The limit exceeded now, if any. Raises OSError if it cannot tell: no program goes on unwatched."""
        try:
            return self._exceeded() if self._is_set_up() else None
        except (FileNotFoundError, ProcessLookupError):
            return None

    def _exceeded(self) -> str | None:
        ticks, tasks, pages = 0, 0, 0
        for pid in self._pids():
            stat = _read(f"{self._place(pid)}/stat").rpartition(b")")[2].split()
            if not stat:
                continue
            ticks += sum(map(int, stat[_CPU]))
            self._own_ticks[pid, stat[_START]] = sum(map(int, stat[_OWN_CPU]))
            tasks += int(stat[_THREADS])
            pages += int(stat[_RESIDENT])
        # Ticks of children that nobody waited for are in no other process's count: add what was seen of each process.
        if max(ticks, sum(self._own_ticks.values())) > self._limits["cpu_s"] * _TICKS:
            return "cpu"
        if tasks > self._limits["processes"] + 1:  # pid 1
            return "processes"
        sockets, most = self._socket_memory(), self._limits["memory_bytes"]
        # Only a sum of shares counts each page once however many processes share it, unlike one of resident sets.
        if sockets + pages * _PAGE > most and sockets + sum(map(self._share, self._pids())) > most:
            return "memory"
        usage = os.statvfs(f"{self._root}/sandbox")  # works whatever rights the program left on it
        return "disk" if usage.f_files - usage.f_ffree > self._limits["files"] else None

    def _is_set_up(self) -> bool:
        """Whether pid 1 has moved from the host's root to the program's root."""
        if self._opened is None:
            with contextlib.suppress(PermissionError):  # while pid 1 is changing
                self._opened = self._opened_root()
            if self._opened is None and time.monotonic() - self._began > SET_UP_S:
                raise PermissionError(f"/proc/{self._pid}/root, a program's root, could not be opened for {SET_UP_S} s")
        return self._opened is not None

    def _opened_root(self) -> int | None:
        root, is_programs = os.open(f"/proc/{self._pid}/root", os.O_RDONLY | os.O_DIRECTORY), False
        try:
            is_hosts = os.path.samestat(os.fstat(root), os.stat("/"))
            is_programs = not is_hosts and {"proc", "usr", "sandbox"} <= set(os.listdir(root))
            return root if is_programs else None
        finally:
            if not is_programs:
                os.close(root)

    def _socket_memory(self) -> int:
        """Bytes that the program's sockets may hold: a buffer each, and what TCP has queued beyond it, with overhead.

        The kernel lets TCP's buffers grow, and counts socket memory for no process.
        """
        counts = dict(line.split(b":", 1) for line in _read(f"/proc/{self._pid}/net/sockstat").splitlines())
        used = int(counts.get(b"sockets", b"used 0").split()[1])
        if used and int(counts.get(b"TCP", b"inuse 0").split()[1]):
            return used * _SOCKET_BYTES + 2 * sum(map(self._queued, ("tcp", "tcp6")))
        return used * _SOCKET_BYTES

    def _queued(self, protocol: str) -> int:
        with contextlib.suppress(OSError), open(f"/proc/{self._pid}/net/{protocol}", "rb") as table:
            queues = (row.split()[4].split(b":") for row in table.readlines()[1:])
            return sum(int(sent, 16) + int(received, 16) for sent, received in queues)
        return 0

    def _share(self, pid: str) -> int:
        """The bytes of a process's memory."""
        place = self._place(pid)
        for line in _read(f"{place}/smaps_rollup").splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) << 10
        resident = _read(f"{place}/statm").split()
        return int(resident[1]) * _PAGE if resident else 0

    def _place(self, pid: str) -> str:
        """The directory of a process; pid 1's in the host's own /proc, because the program's hides it."""
        return f"/proc/{self._pid}" if pid == "1" else f"{self._root}/proc/{pid}"

    def _pids(self) -> list[str]:
        return [name for name in os.listdir(f"{self._root}/proc") if name.isdigit()]


def _read(path: str) -> bytes:
    """The file's text; b"" if its process has ended, or has closed its memory to others."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError), open(path, "rb", 0) as file:
        return file.read(1 << 14)
    return b""


NOBODY = 65534
STAGE = "/mnt"
"""A keeper started by root finds staged directories here, in a separate mount namespace."""
WATCH_S = 0.01
"""Seconds between two checks of a running program. Between them it can exceed a limit unseen."""

_DEATH_SIGNAL, _SUBREAPER = 1, 36
_MOUNTS, _BIND, _RECURSIVE, _PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000


class BwrapRun:
    """One run of bwrap: its process, and pid 1 of the program's namespace, through which all of it is killed."""

    def __init__(self, request: Header, blobs: list[bytes], entrance: int | None) -> None:
        """entrance: of the run's cgroup, if it has one."""
        self._request = request
        self._cgroup: str | None = request["cgroup"]
        self._entrance = entrance
        self._limits: dict[str, float] = request["limits"]
        self._stdin, self._filter, *self._files = blobs
        self._wake = asyncio.Event()
        self._ended_by = "exit"
        self._first: int | None = None

    def stop(self) -> None:
        self._wake.set()

    async def run(self) -> tuple[Header, list[bytes]]:
        """Run it to its end. Once all its processes are gone, returns how it ended, stdout and stderr."""
        started = time.monotonic()
        status = asyncio.StreamReader()
        process = await self._start(status)
        output = Output(int(self._limits["output_bytes"]), self._wake)
        try:
            async with asyncio.TaskGroup() as group:
                reading = [group.create_task(output.read(stream)) for stream in (process.stdout, process.stderr)]
                group.create_task(feed(process.stdin, self._stdin))
                # No limit ends this wait: a bwrap that is killed before it reports may leave pid 1 running, unwatched.
                first = json.loads(await status.readline() or "{}").get("child-pid")  # none if bwrap failed
                with contextlib.suppress(ProcessLookupError):
                    self._first = first and os.pidfd_open(first)
                watching = group.create_task(self._watch(first, output, started))
                watching.add_done_callback(lambda _: self._kill(process))  # also one that failed
                await process.wait()
                watching.cancel()
        finally:
            self._kill(process)
            await process.wait()
            await self._bury()
        if self._ended_by == "exit":
            self._ended_by = "output" if output.overflowed else self._excess_of_cgroup() or "exit"
        written = [task.result() for task in reading]
        header: Header = {"ended_by": self._ended_by, "wall_s": time.monotonic() - started, "code": process.returncode}
        if self._ended_by == "exit" and b"exit-code" not in await status.read():
            header["error"] = written[1].decode(errors="replace").strip()
        return header, written

    async def _start(self, status: asyncio.StreamReader) -> asyncio.subprocess.Process:
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
                preexec_fn=partial(_enter, self._entrance) if self._entrance else None,  # before it can fork
            )

    async def _watch(self, first: int | None, output: Output, started: float) -> None:
        if first is None:
            return
        try:
            async with asyncio.timeout(started + self._limits["wall_s"] - time.monotonic()):
                self._ended_by = await self._excess(first, output)
        except TimeoutError:
            self._ended_by = "timeout"

    def _kill(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._first is None:
                process.kill()
            else:
                signal.pidfd_send_signal(self._first, signal.SIGKILL)

    async def _excess(self, first: int, output: Output) -> str:
        """Wait until the program exceeds a limit. No event reports memory, so this checks it again and again."""
        namespace, pause_s = Namespace(first, self._limits), WATCH_S
        try:
            while not self._wake.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._wake.wait()
                began = time.monotonic()
                if excess := self._excess_of_cgroup() or namespace.exceeded():
                    return excess
                # If processes share much memory, a check is slow; it must not keep the keeper from other programs.
                pause_s = max(WATCH_S, 10 * (time.monotonic() - began))
            return "output" if output.overflowed else "stopped"
        finally:
            namespace.close()

    def _excess_of_cgroup(self) -> str | None:
        return cgroup.excess(self._cgroup, self._limits["cpu_s"]) if self._cgroup else None

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


async def serve(arl: socket.socket) -> None:
    """Run a program for each connection that arl sends, until arl closes the socket."""
    loop, left, running = asyncio.get_running_loop(), asyncio.Event(), set[BwrapRun]()
    async with asyncio.TaskGroup() as group:

        def accept() -> None:
            sent, descriptors, _, _ = socket.recv_fds(arl, 1, 2, socket.MSG_CMSG_CLOEXEC)
            if sent:
                group.create_task(_answer(running, *descriptors))
            else:
                left.set()

        loop.add_reader(arl, accept)
        loop.add_signal_handler(signal.SIGTERM, left.set)
        await left.wait()
        loop.remove_reader(arl)
        for program in running:
            program.stop()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # asyncio closes what its handler writes to, and then the handler


async def _answer(running: set[BwrapRun], connection: int, entrance: int | None = None) -> None:
    reader, writer = await connected(socket.socket(fileno=connection))
    try:
        program = BwrapRun(*await received(reader), entrance)
        running.add(program)

        async def until_closed() -> None:
            with contextlib.suppress(ConnectionError):
                await reader.read()

        closed = asyncio.create_task(until_closed())
        closed.add_done_callback(lambda _: program.stop())
        try:
            header, blobs = await program.run()
        except Exception as error:  # noqa: BLE001 - reported to arl, which raises it
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            header, blobs = {"error": repr(error)}, []
        running.discard(program)
        closed.cancel()
        writer.write(message(header, blobs))
        await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        return  # arl no longer waits
    finally:
        writer.close()
        if entrance is not None:
            os.close(entrance)


def _enter(entrance: int) -> None:
    """Move this process into a cgroup. arl notices if the kernel refuses it."""
    with contextlib.suppress(OSError):
        os.write(entrance, b"0")


def _readable(content: bytes, inherited: contextlib.ExitStack) -> int:
    file = os.memfd_create("file")
    inherited.callback(os.close, file)
    with os.fdopen(os.dup(file), "wb") as writer:
        writer.write(content)
    os.lseek(file, 0, os.SEEK_SET)
    return file


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


def main() -> None:
    connection, parent, *staged = sys.argv[1:]
    if staged:
        _stage(staged)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # the files of programs arrive as descriptors
    _checked(_libc.prctl(_SUBREAPER, 1, 0, 0, 0))
    _checked(_libc.prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0))  # a process forked from arl may hold the socket open
    if os.getppid() == int(parent):
        asyncio.run(serve(socket.socket(fileno=int(connection))))

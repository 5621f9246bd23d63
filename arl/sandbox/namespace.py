"""Measures what all processes of one program use together, through the /proc of its pid namespace.

The kernel's other limits are per process, and not every user may make cgroups. Imports nothing of arl, because the
keeper runs in a bare Python.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping

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
        if sockets + pages * _PAGE > most and sockets + self._memory() > most:
            return "memory"
        return "disk" if self._files() > self._limits["files"] else None

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

    def _memory(self) -> int:
        """Bytes of memory. Each page counts once however many processes share it, unlike in a sum of resident sets."""
        return sum(self._share(self._place(pid)) for pid in self._pids())

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

    def _share(self, place: str) -> int:
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

    def _files(self) -> int:
        usage = os.statvfs(f"{self._root}/sandbox")  # works whatever rights the program left on it
        return usage.f_files - usage.f_ffree


def _read(path: str) -> bytes:
    """The file's text; b"" if its process has ended, or has closed its memory to others."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError), open(path, "rb", 0) as file:
        return file.read(1 << 14)
    return b""

"""What a program and all the processes it started use, seen from outside. Imports nothing of arl, for the keeper.

The kernel's own limits are per process (RLIMIT_AS, RLIMIT_CPU); these are of all of a program together, without
cgroups, which few users may write to.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping

SET_UP_S = 20.0
"""How long bubblewrap may take until a program's namespace can be looked into. It takes milliseconds."""

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_OWN_CPU, _CPU, _THREADS, _START, _RESIDENT = slice(11, 13), slice(11, 15), 17, 19, 21
"""Fields of /proc/PID/stat after the name (proc(5)): user and system ticks, its own; and with those of the children it
waited for; threads; when it started; resident pages."""


class Namespace:
    """The processes of one program, through the /proc of its own pid namespace. pid 1 there is bubblewrap's."""

    def __init__(self, pid: int, limits: Mapping[str, float]) -> None:
        self._pid = pid
        self._limits = limits
        self._began = time.monotonic()
        self._root: int | None = None
        self._own_ticks: dict[tuple[str, bytes], int] = {}

    def close(self) -> None:
        if self._root is not None:
            os.close(self._root)

    def exceeded(self) -> str | None:
        """The limit that the program exceeds now, if any; none while it is being started, and once it has ended.

        Raises OSError where that cannot be seen: the program is not to go on unwatched.
        """
        try:
            return self._exceeded() if self._is_set_up() else None
        except (FileNotFoundError, ProcessLookupError):
            return None

    def _exceeded(self) -> str | None:
        ticks, tasks, pages = 0, 0, 0
        for pid in self._pids():
            stat = self._read(f"{self._place(pid)}/stat").rpartition(b")")[2].split()
            if not stat:
                continue
            ticks += sum(map(int, stat[_CPU]))
            self._own_ticks[pid, stat[_START]] = sum(map(int, stat[_OWN_CPU]))
            tasks += int(stat[_THREADS])
            pages += int(stat[_RESIDENT])
        # Children that nobody waited for are in no other process's time: of those, as much as was seen of each.
        if max(ticks, sum(self._own_ticks.values())) > self._limits["cpu_s"] * _TICKS:
            return "cpu"
        if tasks > self._limits["processes"] + 1:  # pid 1
            return "processes"
        if pages * _PAGE > self._limits["memory_bytes"] and self._memory() > self._limits["memory_bytes"]:
            return "memory"
        return "disk" if self._files() > self._limits["files"] else None

    def _is_set_up(self) -> bool:
        """Whether pid 1 has gone from the host's root to the program's, which alone has all that is looked at here."""
        if self._root is None:
            with contextlib.suppress(PermissionError):  # while pid 1 changes what it is
                self._root = self._opened_root()
            if self._root is None and time.monotonic() - self._began > SET_UP_S:
                raise PermissionError(f"/proc/{self._pid}/root, a program's, could not be looked into for {SET_UP_S} s")
        return self._root is not None

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
        """Bytes, each page counted once however many processes share it: a sum of resident sets counts more."""
        return sum(self._share(self._place(pid)) for pid in self._pids())

    def _share(self, place: str) -> int:
        for line in self._read(f"{place}/smaps_rollup").splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) << 10
        resident = self._read(f"{place}/statm").split()
        return int(resident[1]) * _PAGE if resident else 0

    def _place(self, pid: str) -> str:
        """Where a process is described; pid 1 in the host's own /proc, since the program's hides it."""
        return f"/proc/{self._pid}" if pid == "1" else f"proc/{pid}"

    def _pids(self) -> list[str]:
        proc = os.open("proc", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._root)
        try:
            return [name for name in os.listdir(proc) if name.isdigit()]
        finally:
            os.close(proc)

    def _read(self, path: str) -> bytes:
        """What such a file says; nothing once its process has ended, or has closed its memory to others."""
        try:
            file = os.open(path, os.O_RDONLY, dir_fd=self._root)
            try:
                return os.read(file, 1 << 14)
            finally:
                os.close(file)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return b""

    def _files(self) -> int:
        work = os.open("sandbox", os.O_PATH, dir_fd=self._root)  # whatever rights the program left to it
        try:
            usage = os.fstatvfs(work)
        finally:
            os.close(work)
        return usage.f_files - usage.f_ffree

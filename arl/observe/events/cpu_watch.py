"""CpuWatch: the CPU time of a run's processes, for the event log. Linux tells; elsewhere there are no records."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from arl.api.events import CpuUsed

_PROC = Path("/proc")
OTHERS = "others"


class CpuWatch:
    """Reads the CPU time of this process, and of those that it started. Make it on the thread of the event loop.

    Each read costs about a millisecond, on the caller's thread.
    """

    def __init__(self) -> None:
        self._loop_clock: int | None = None
        with suppress(AttributeError, OSError):  # not every system has it
            self._loop_clock = time.pthread_getcpuclockid(threading.get_ident())
        self._names: dict[int, str] = {}
        """The names of the processes that this one started, by process id."""

    def read(self) -> CpuUsed | None:
        """None where /proc says nothing."""
        if not (children := _children("self")) and not (_PROC / "self" / "task").is_dir():
            return None
        self._names = {pid: self._names.get(pid) or _name(pid) for pid in children}
        used = dict.fromkeys(self._names.values(), 0.0)
        for pid, name in self._names.items():
            used[name] += _cpu_s(pid)
        loop = 0.0
        with suppress(OSError):  # the thread has ended
            loop = time.clock_gettime(self._loop_clock) if self._loop_clock is not None else 0.0
        return CpuUsed(controller=time.process_time(), loop=loop, processes=used)


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0


def _children(pid: int | str) -> list[int]:
    """The children of each of its threads. Empty for a process that has ended, and if /proc does not list them."""
    found: list[int] = []
    for listed in (_PROC / str(pid) / "task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found += map(int, listed.read_text().split())
    return found


def _cpu_s(pid: int) -> float:
    """The CPU seconds of a process and of all processes that it started."""
    seconds = 0.0
    with suppress(OSError):  # it has ended
        seconds = time.clock_gettime(((~pid) << 3) | 2)  # as clock_getcpuclockid(3) makes a process's clock
    return seconds + sum(map(_cpu_s, _children(pid)))


def _name(pid: int) -> str:
    """The process's name, from its command line: a server has a port, and arl's other processes have a log."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return OTHERS
    if "--port" in words[:-1]:
        return f"http://127.0.0.1:{words[words.index('--port') + 1]}"
    return next((Path(word).stem for word in words if word.endswith(".log")), OTHERS)

"""Cgroups of v2 for programs: each runs in its own, in which the kernel limits its memory, processes and processors.

arl makes them beside its own cgroup, as one with processes has no children, and only with the controllers that are
passed on there: it moves no process of the user, and changes no cgroup but its own, `arl-NAMESPACE-PID-NUMBER`.
Imports nothing of arl, because the keeper, which looks into them, runs in a bare Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import signal
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

_CONTROLLERS = frozenset(("memory", "pids", "cpu"))
_KERNEL_BYTES = 16 << 20
"""Room for what the kernel counts beside a program's memory and files: page tables, stacks, inodes."""
_PERIOD_US = 100_000
_TRIES, _PAUSE_S = 100, 0.01
"""How often, and how far apart, to try to remove a cgroup: it is busy until its last process is gone."""
_NUMBERS = itertools.count()
_MADE: set[str] = set()
"""This process's own. Others with its process id are from an earlier process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroup:
    """A program's cgroup. entrance: its file that moves the process which writes to it, opened with arl's rights."""

    path: str
    entrance: int


class Cgroups:
    """The cgroups of a sandbox's programs. `names`: their controllers, or why there are none."""

    def __init__(self) -> None:
        """Blocks: removes the cgroups that processes left which are gone."""
        self._place = place()
        self.names = " ".join(sorted(self._place[1])) if self._place else "none, because no cgroup may be made here"
        if self._place:
            _remove_leftovers(self._place[0])

    @contextlib.asynccontextmanager
    async def made(self, limits: Mapping[str, float]) -> AsyncGenerator[Cgroup | None]:
        """A cgroup with these limits; None where none can be made."""
        cgroup = self._made(*self._place, limits) if self._place else None
        try:
            yield cgroup
        finally:
            if cgroup is not None:
                os.close(cgroup.entrance)
                for _ in range(_TRIES):
                    if _is_removed(cgroup.path):
                        _MADE.discard(os.path.basename(cgroup.path))
                        break
                    await asyncio.sleep(_PAUSE_S)

    def _made(self, parent: str, controllers: frozenset[str], limits: Mapping[str, float]) -> Cgroup | None:
        name = f"{_prefix()}{os.getpid()}-{next(_NUMBERS)}"
        path = f"{parent}/{name}"
        try:
            os.mkdir(path)
            _MADE.add(name)
            for name, value in _values(limits).items():
                if name.split(".")[0] in controllers and os.path.exists(f"{path}/{name}"):  # swap may be off
                    _write(f"{path}/{name}", value)
            return Cgroup(path=path, entrance=os.open(f"{path}/cgroup.procs", os.O_WRONLY))
        except OSError as error:
            _is_removed(path)
            _MADE.discard(name)
            self._give_up(str(error))
            return None

    def check(self, cgroup: Cgroup) -> None:
        """Make no more cgroups if a program has run that was to run in this one and did not."""
        if not _numbers(f"{cgroup.path}/cpu.stat").get("usage_usec", 0):
            self._give_up("the kernel refuses to move processes into them")

    def _give_up(self, why: str) -> None:
        self._place, self.names = None, f"none, because {why}"


def _values(limits: Mapping[str, float]) -> dict[str, object]:
    # As many processors as using cpu_s within wall_s takes.
    processors = min(max(1.0, limits["cpu_s"] / limits["wall_s"]), os.cpu_count() or 1)
    return {
        "memory.max": int(limits["memory_bytes"] + limits["disk_bytes"]) + _KERNEL_BYTES,  # files are memory, too
        "memory.swap.max": 0,
        "memory.oom.group": 1,
        "pids.max": int(limits["processes"]) + 3,  # bwrap, its pid 1, and one that shows the keeper the excess
        "cpu.max": f"{int(processors * _PERIOD_US)} {_PERIOD_US}",
    }


def excess(path: str, cpu_s: float) -> str | None:
    """The limit that all processes which ever ran in a cgroup exceeded together, if any."""
    if _numbers(f"{path}/memory.events").get("oom_kill", 0) > 0:
        return "memory"
    return "cpu" if _numbers(f"{path}/cpu.stat").get("usage_usec", 0) > cpu_s * 1e6 else None


def place() -> tuple[str, frozenset[str]] | None:
    """The directory beside this process's own cgroup, and the controllers of cgroups made there. None without any, if
    this process may make none, or if programs would escape a limit that somebody has set for all of arl."""
    own = next((line[3:] for line in _read("/proc/self/cgroup").splitlines() if line.startswith("0::")), "..")
    for line in _read("/proc/self/mountinfo").splitlines():
        mount, _, system = line.partition(" - ")
        root, mounted = mount.split()[3:5]
        if not system.startswith("cgroup2 ") or ".." in own or (below := os.path.relpath(own, root)).startswith(".."):
            continue  # this mount does not show it
        here = os.path.normpath(f"{mounted}/{below}")
        parent = here if below == "." else os.path.dirname(here)
        limits = () if below == "." else (_read(f"{here}/memory.max"), _read(f"{here}/cpu.max"))
        is_limited = any(limit and not limit.startswith("max") for limit in limits)
        controllers = frozenset(_read(f"{parent}/cgroup.subtree_control").split()) & _CONTROLLERS
        return None if is_limited or not controllers or not os.access(parent, os.W_OK) else (parent, controllers)
    return None


def _prefix() -> str:
    """Names the pid namespace, because process ids are only unique within one."""
    return f"arl-{os.stat('/proc/self/ns/pid').st_ino}-"


def _remove_leftovers(parent: str) -> None:
    """Remove the cgroups of processes that are gone, with whatever is still in them."""
    with os.scandir(parent) as entries:
        left = [entry.name for entry in entries if entry.name.startswith(_prefix())]
    for name in left:
        pid = name.removeprefix(_prefix()).partition("-")[0]
        state = _read(f"/proc/{pid}/stat").rpartition(") ")[2][:1]
        is_over = name not in _MADE if pid == str(os.getpid()) else state in ("", "Z", "X")  # nobody may reap a zombie
        for _ in range(_TRIES if is_over else 0):
            if _is_removed(f"{parent}/{name}"):
                break
            time.sleep(_PAUSE_S)


def _is_removed(path: str) -> bool:
    """Kill what is in the cgroup and remove it; False while something is still there."""
    for pid in map(int, _read(f"{path}/cgroup.procs").split()):
        if pid:  # 0 is one of another pid namespace
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    try:
        os.rmdir(path)
    except OSError as error:
        return error.errno not in (errno.EBUSY, errno.ENOTEMPTY)  # other errors are final
    return True


def _numbers(path: str) -> dict[str, int]:
    return {name: int(number) for name, number in map(str.split, _read(path).splitlines())}


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path) as file:
        return file.read()
    return ""


def _write(path: str, value: object) -> None:
    with open(path, "w") as file:
        file.write(str(value))

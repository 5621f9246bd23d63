"""Cgroups for programs: each runs in its own, in which the kernel limits its memory, processes and processors.

Imports nothing of arl, because the keeper runs in a bare Python. It uses only what is delegated: it moves no process of
the user, and changes no cgroup but arl's.

    v1: below arl's own cgroup of each hierarchy; v2: beside arl's own, because a cgroup with processes has no children
        arl-NAMESPACE-PID    a keeper's, named by its process id; removed when arl closes it, or the next one starts
            keeper           holds the keeper (for a move, v2 wants rights to the directory above both of its ends)
            0, 1, ...        one for each run
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import signal
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace

_CONTROLLERS = {False: frozenset(("memory", "pids")), True: frozenset(("memory", "pids", "cpu"))}
"""Of v1 and v2. With v1's cpu, all programs together would get as much of a processor as one trainer thread."""
_KERNEL_BYTES = 16 << 20
"""Room for what the kernel counts beside a program's memory and files: page tables, stacks, inodes."""
_PERIOD_US = 100_000
_TRIES, _PAUSE_S = 100, 0.01
"""How often, and how far apart, to try to remove a cgroup: it is busy until its last process is gone."""
_PROOF = {"memory_bytes": 1 << 30, "disk_bytes": 0, "processes": 100, "cpu_s": 1, "wall_s": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroup:
    """A directory of one hierarchy, and its controllers. is_unified: it belongs to v2."""

    path: str
    controllers: frozenset[str]
    is_unified: bool

    @property
    def entrance(self) -> str:
        """The file by which a process with one thread enters. In v1, `tasks` saves a wait of 10 to 20 ms."""
        return f"{self.path}/{'cgroup.procs' if self.is_unified else 'tasks'}"

    def child(self, name: str) -> Cgroup:
        return replace(self, path=f"{self.path}/{name}")

    def limit(self, limits: Mapping[str, float]) -> None:
        # The program's files are memory, too.
        memory = int(limits["memory_bytes"] + limits["disk_bytes"]) + _KERNEL_BYTES
        processes = int(limits["processes"]) + 3  # bwrap, its pid 1, and one that shows the keeper the excess
        # As many processors as using cpu_s within wall_s takes.
        processors = min(max(1.0, limits["cpu_s"] / limits["wall_s"]), os.cpu_count() or 1)
        values: dict[str, object] = {"pids.max": processes, "cpu.max": f"{int(processors * _PERIOD_US)} {_PERIOD_US}"}
        if self.is_unified:
            values |= {"memory.max": memory, "memory.swap.max": 0, "memory.oom.group": 1}
        else:
            values |= {f"memory.{kind}limit_in_bytes": memory for kind in ("", "memsw.", "kmem.tcp.")}
        for name, value in values.items():
            if name.split(".")[0] in self.controllers and os.path.exists(f"{self.path}/{name}"):
                _write(f"{self.path}/{name}", value)

    def enter(self) -> None:
        """Move this process into the cgroup."""
        _write(self.entrance, 0)

    def has_killed(self) -> bool:
        """Whether the kernel killed a process here because memory ran out."""
        name = "memory.events" if self.is_unified else "memory.oom_control"
        return "memory" in self.controllers and _numbers(f"{self.path}/{name}").get("oom_kill", 0) > 0

    def cpu_s(self) -> float:
        """Processor time of all processes that ever ran here, waited for or not; 0 in v1."""
        return _numbers(f"{self.path}/cpu.stat").get("usage_usec", 0) / 1e6

    def is_removed(self) -> bool:
        """Kill what is in the cgroup and remove it; False while something is still there."""
        for pid in map(int, _read(f"{self.path}/cgroup.procs").split()):
            if pid not in (0, os.getpid()):  # 0: of another pid namespace; this process, if its proof failed halfway
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        try:
            os.rmdir(self.path)
        except OSError as error:
            return error.errno not in (errno.EBUSY, errno.ENOTEMPTY)  # other errors are final
        return True


class RunCgroups:
    """The cgroups of one run, one in each hierarchy where arl may make them."""

    def __init__(self, cgroups: Sequence[Cgroup], limits: Mapping[str, float]) -> None:
        self._cgroups = cgroups
        self._limits = limits

    def __bool__(self) -> bool:
        return bool(self._cgroups)

    def make(self) -> None:
        for cgroup in self._cgroups:
            os.mkdir(cgroup.path)
            cgroup.limit(self._limits)

    def enter(self) -> None:
        for cgroup in self._cgroups:
            cgroup.enter()

    def exceeded(self) -> str | None:
        if any(cgroup.has_killed() for cgroup in self._cgroups):
            return "memory"
        return "cpu" if any(cgroup.cpu_s() > self._limits["cpu_s"] for cgroup in self._cgroups) else None

    def are_removed(self) -> bool:
        left = [cgroup for cgroup in self._cgroups if not cgroup.is_removed()]
        return not left


class Cgroups:
    """A keeper's cgroups, one in each hierarchy that permits it. `names`: their controllers, or why there are none."""

    def __init__(self, owner: int | None = None) -> None:
        """owner: the user that the keeper is about to become, if it is root."""
        self._numbers = itertools.count()
        self._cgroups: list[Cgroup] = []
        self.names = "none, because no cgroup may be made here"
        for place in places():
            if cgroup := _opened(place, owner):
                self._cgroups.append(cgroup)

    def prove(self) -> None:
        """Try it: move this process into a run's cgroups and back, as its present user."""
        run = self._made(_PROOF)
        back = [cgroup.child("keeper").enter for cgroup in self._cgroups]
        for enter in (run.enter, *back):
            try:
                enter()
            except OSError as error:
                self._give_up(error)
        run.are_removed()
        if self._cgroups:
            self.names = " ".join(sorted(frozenset().union(*(cgroup.controllers for cgroup in self._cgroups))))

    @contextlib.asynccontextmanager
    async def made(self, limits: Mapping[str, float]) -> AsyncGenerator[RunCgroups]:
        run = self._made(limits)
        try:
            yield run
        finally:
            for _ in range(_TRIES):
                if run.are_removed():
                    break
                await asyncio.sleep(_PAUSE_S)

    def _made(self, limits: Mapping[str, float]) -> RunCgroups:
        number = next(self._numbers)
        run = RunCgroups([cgroup.child(str(number)) for cgroup in self._cgroups], limits)
        try:
            run.make()
        except OSError as error:
            run.are_removed()
            self._give_up(error)
            return RunCgroups([], limits)
        return run

    def _give_up(self, error: OSError) -> None:
        self._cgroups, self.names = [], f"none, because {error}"


def places() -> list[Cgroup]:
    """The directories for cgroups of keepers, whether or not this process may make them there."""
    own: dict[str, str] = {}
    for line in _read("/proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        own |= dict.fromkeys(kinds.split(","), path)
    found: dict[frozenset[str], Cgroup] = {}
    for line in _read("/proc/self/mountinfo").splitlines():
        mount, _, system = line.partition(" - ")
        root, mounted = mount.split()[3:5]
        kind, _, options = system.split(" ", 2)
        names = frozenset(options.split(",")) & _CONTROLLERS[False] if kind == "cgroup" else frozenset[str]()
        path = own.get("" if kind == "cgroup2" else min(names, default="none"))
        if path is None or ".." in path or (below := os.path.relpath(path, root)).startswith(".."):
            continue  # this mount does not show it
        here = os.path.normpath(f"{mounted}/{below}")
        if kind == "cgroup2":
            here, names = _beside(here, is_root=below == ".")
        found.setdefault(names, Cgroup(path=here, controllers=names, is_unified=kind == "cgroup2"))
    return [place for names, place in found.items() if names]


def _beside(own: str, *, is_root: bool) -> tuple[str, frozenset[str]]:
    """A directory of v2 for cgroups, and the controllers that it passes on: none if programs would escape limits that
    somebody has set for all of arl."""
    parent = own if is_root else os.path.dirname(own)
    limits = () if is_root else (_read(f"{own}/memory.max"), _read(f"{own}/cpu.max"))
    if any(limit and not limit.startswith("max") for limit in limits):
        return parent, frozenset()
    return parent, frozenset(_read(f"{parent}/cgroup.subtree_control").split()) & _CONTROLLERS[True]


def _prefix() -> str:
    """Names the pid namespace, because process ids are only unique within one."""
    return f"arl-{os.stat('/proc/self/ns/pid').st_ino}-"


def _opened(place: Cgroup, owner: int | None) -> Cgroup | None:
    """Make a keeper's own cgroup and move this process into it; None where that is not allowed."""
    mine = place.child(f"{_prefix()}{os.getpid()}")
    keeper = mine.child("keeper")
    try:
        os.mkdir(mine.path)
        os.mkdir(keeper.path)
        if owner is not None:
            for path in (mine.path, mine.entrance, keeper.entrance):
                os.chown(path, owner, owner)
        if mine.is_unified:
            _write(f"{mine.path}/cgroup.subtree_control", " ".join(f"+{name}" for name in sorted(mine.controllers)))
        keeper.enter()
    except OSError:
        for made in (keeper, mine):
            with contextlib.suppress(OSError):
                os.rmdir(made.path)
        return None
    return mine


def remove_leftovers() -> None:
    """Remove the cgroups of keepers that are gone, with whatever is still in them."""
    prefix = _prefix()
    for place in places():
        for name in _directories(place.path):
            pid = name.removeprefix(prefix)
            if name.startswith(prefix) and not _lives(pid):
                _remove(place.child(name))


def _lives(pid: str) -> bool:
    """Whether this keeper still runs. A keeper whose parent died may stay a zombie for long. This process is no keeper
    yet, so its own number names an earlier one."""
    return pid != str(os.getpid()) and _read(f"/proc/{pid}/stat").rpartition(") ")[2][:1] not in ("", "Z", "X")


def _remove(cgroup: Cgroup) -> None:
    for _ in range(_TRIES):
        if all(cgroup.child(name).is_removed() for name in _directories(cgroup.path)) and cgroup.is_removed():
            return
        time.sleep(_PAUSE_S)


def _directories(path: str) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return [entry.name for entry in entries if entry.is_dir()]
    return []


def _numbers(path: str) -> dict[str, int]:
    return {name: int(number) for name, number in map(str.split, _read(path).splitlines())}


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path) as file:
        return file.read()
    return ""


def _write(path: str, value: object) -> None:
    with open(path, "w") as file:
        file.write(str(value))

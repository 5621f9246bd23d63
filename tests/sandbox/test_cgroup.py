"""Cgroups of programs: what they hold without the keeper's own checks, where they are made, and that none is left."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from sandbox.conftest import PATIENT, once_running, sleeper
from sandbox.test_bubblewrap import parent_to_kill, with_keeper

from arl.sandbox import BubblewrapSandbox, Limits, bubblewrap, cgroup
from arl.sandbox.bubblewrap import START

pytestmark = pytest.mark.asyncio(loop_scope="session")

UNIFIED = Path("/sys/fs/cgroup/unified")
"""Beside v1 there may be a v2 without controllers: cgroups are made and count there, too, and limit nothing."""
BLIND = "from arl.sandbox import keeper\nkeeper.Namespace.exceeded = lambda self: None\n"
"""Lets a keeper see nothing, so that only cgroups hold."""


@pytest.fixture
def place(bubblewrap: BubblewrapSandbox, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory where arl makes cgroups."""
    if (found := cgroup.place()) is None:
        if not os.access(UNIFIED, os.W_OK):
            pytest.skip("needs cgroup v2")
        found = str(UNIFIED), frozenset[str]()
        monkeypatch.setattr(cgroup, "place", lambda: found)
    return Path(found[0])


@pytest.fixture
async def only_cgroups(place: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BubblewrapSandbox]:
    """A sandbox without the keeper's checks and without limits for each process."""
    monkeypatch.setattr(bubblewrap, "START", START.removesuffix("main()\n") + BLIND + "main()\n")
    monkeypatch.setattr(bubblewrap, "_rlimits", lambda limits: ["/usr/bin/env"])
    async with BubblewrapSandbox(limits=replace(PATIENT, wall_s=20), concurrency=1) as sandbox:
        yield sandbox


def made(place: Path) -> list[Path]:
    return sorted(place.glob(f"{cgroup._prefix()}*"))


HOGS = {
    "memory of one": "x = bytearray(1 << 30)\n",
    "memory of many": "import os\nfor _ in range(3): os.fork()\nx = b'x' * (60 << 20)\nimport time; time.sleep(60)\n",
    "files and memory": "open('f', 'wb').write(bytes(7 << 20))\nx = [b'x' * (1 << 20) for _ in range(200)]\n",
    "sockets": """
import socket
kept = []
for _ in range(2000):
    pair = socket.socketpair()
    pair[0].setblocking(False)
    kept.append(pair)
    try:
        while True: pair[0].send(bytes(65536))
    except BlockingIOError: pass
""",
    "pipes": """
import os
for _ in range(10000):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.write(writer, bytes(65536))
""",
}


async def test_a_cgroup_alone_holds_memory_and_processes_and_drops_the_cache_of_files(
    only_cgroups: BubblewrapSandbox, pipe: Path
) -> None:
    if not {"memory", "pids"} <= (cgroup.place() or ("", frozenset[str]()))[1]:
        pytest.skip("needs cgroup v2")
    for hog in HOGS.values():
        outcome = await only_cgroups.run(hog + "print('got it all')")
        assert (outcome.ended_by, outcome.stdout) == ("memory", ""), outcome
    forks = """
import os, time
for count in range(1000):
    try: child = os.fork()
    except BlockingIOError: break
    if child == 0: time.sleep(60)
print(count)
os._exit(0)
"""
    assert (await only_cgroups.run(forks)).stdout == f"{PATIENT.processes}\n"
    large = pipe.parent / "large"
    large.touch()
    os.truncate(large, 300 << 20)
    async with with_keeper(pipe) as (sandbox, _):
        reads = f"file = open('{large}', 'rb')\nwhile file.read(1 << 20): pass\nprint(file.tell())"
        assert (await sandbox.run(reads)).stdout == f"{300 << 20}\n"


async def test_a_cgroup_counts_the_time_of_children_that_nobody_waits_for(only_cgroups: BubblewrapSandbox) -> None:
    program = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    try:
        if os.fork() == 0:
            while time.process_time() < 0.003: pass
            os._exit(0)
    except BlockingIOError: time.sleep(0.001)
"""
    assert (await only_cgroups.run(program, limits=replace(PATIENT, cpu_s=0.5))).ended_by == "cpu"


async def test_a_cgroup_lasts_as_long_as_its_run(place: Path, pipe: Path) -> None:
    async with with_keeper(pipe) as (sandbox, _):
        call = asyncio.create_task(sandbox.run(sleeper(pipe)))
        async with once_running(pipe):
            (mine,) = made(place)
            assert len((mine / "cgroup.procs").read_text().split()) >= 3  # bwrap, its pid 1, the program
            call.cancel()
        assert (await sandbox.run("print(1)")).stdout == "1\n"
        assert made(place) == []


async def test_the_next_sandbox_removes_what_processes_left_that_are_gone(place: Path, pipe: Path) -> None:
    async with parent_to_kill(pipe) as pids:
        pass
    of_others = (place / f"{cgroup._prefix()}{pid}" for pid in (f"{max(pids)}-0", f"{os.getpid()}-x"))
    living = place / f"{cgroup._prefix()}{os.getppid()}-0"
    for left in (*of_others, living):
        left.mkdir()
    async with BubblewrapSandbox():
        assert made(place) == [living]
    living.rmdir()


@pytest.mark.parametrize("when", ["at the beginning", "after some runs", "when a process is to enter"])
async def test_programs_run_without_cgroups_where_there_can_be_none_and_one_line_says_so(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pipe: Path, when: str
) -> None:
    caplog.set_level(logging.INFO)
    values = cgroup._values

    def fails_later(limits: Mapping[str, float], count: list[int] = []) -> dict[str, object]:  # noqa: B006 - counts
        count.append(1)
        if len(count) == 4:
            raise OSError(28, "no space")
        return values(limits)

    if when == "at the beginning":
        monkeypatch.setattr(cgroup, "place", lambda: None)
    elif when == "after some runs":
        monkeypatch.setattr(cgroup, "_values", fails_later)
    else:
        code = "from arl.sandbox import keeper\nkeeper._enter = lambda entrance: None\n"
        monkeypatch.setattr(bubblewrap, "START", START.removesuffix("main()\n") + code + "main()\n")
    async with with_keeper(pipe) as (sandbox, _):
        assert [(await sandbox.run("print(1)")).stdout for _ in range(4)] == ["1\n"] * 4
        assert (await sandbox.run("x = [b'x' * (1 << 20) for _ in range(1000)]")).ended_by == "memory"
    told = [record for record in caplog.records if "cgroups of their own" in record.getMessage()]
    assert "none, because" in told[-1].getMessage()
    assert [record.levelname for record in told] == ["INFO", "WARNING"][: len(told)]
    assert len(told) == 1 + (when == "after some runs")
    assert made(place) == []


@pytest.mark.parametrize(
    ("own", "control", "limit", "expected"),
    [
        ("/user/train", "cpuset io memory pids\n", "max", ("user", {"memory", "pids"})),
        ("/user/train", "", "max", None),  # nothing is passed on
        ("/user/train", "memory pids", "1073741824", None),  # beside it, programs would escape the limit of all of arl
        ("/", "memory", "", ("", {"memory"})),
        ("/../elsewhere", "memory", "max", None),
    ],
)
async def test_cgroups_are_made_beside_our_own_with_the_controllers_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, control: str, limit: str, expected: Any
) -> None:
    """Played on directories laid out like those of the kernel."""
    (tmp_path / "user/train").mkdir(parents=True)
    for directory in (tmp_path, tmp_path / "user"):
        (directory / "cgroup.subtree_control").write_text(control)
    (tmp_path / "user/train/memory.max").write_text(limit)
    mounts = f"30 23 0:26 / {tmp_path} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
    read, told = cgroup._read, {"/proc/self/cgroup": f"4:memory:/a\n0::{own}\n", "/proc/self/mountinfo": mounts}
    monkeypatch.setattr(cgroup, "_read", lambda path: told[path] if path in told else read(path))
    found = cgroup.place()
    shown = None if found is None else (found[0].removeprefix(str(tmp_path)).strip("/"), {*found[1]})
    assert shown == expected


async def test_the_limits_of_a_cgroup_and_what_exceeds_them(tmp_path: Path) -> None:
    limits = Limits(memory_bytes=100 << 20, disk_bytes=20 << 20, processes=7, cpu_s=4.0, wall_s=2.0)
    values = cgroup._values(asdict(limits))
    assert values == {
        "memory.max": 136 << 20,
        "memory.swap.max": 0,
        "memory.oom.group": 1,
        "pids.max": 10,
        "cpu.max": f"{min(2, os.cpu_count() or 1) * 100_000} 100000",
    }
    (tmp_path / "cpu.stat").write_text("usage_usec 3900000\nuser_usec 1\n")
    (tmp_path / "memory.events").write_text("low 0\nmax 9\noom 0\noom_kill 0\n")
    assert cgroup.excess(str(tmp_path), 4.0) is None
    (tmp_path / "cpu.stat").write_text("usage_usec 4100000\nuser_usec 1\n")
    assert cgroup.excess(str(tmp_path), 4.0) == "cpu"
    (tmp_path / "memory.events").write_text("oom 1\noom_kill 1\n")
    assert cgroup.excess(str(tmp_path), 4.0) == "memory"

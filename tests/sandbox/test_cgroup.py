"""Cgroups of programs: what they hold without the keeper's own checks, and that none is left.

They run where this user may make cgroups, of v1 or of v2.
"""

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from sandbox.conftest import PATIENT, once_running, sleeper
from sandbox.test_bubblewrap import descendants, of_keeper, parent_to_kill, with_keeper

from arl.sandbox import BubblewrapSandbox, ProgramOutcome, bubblewrap, cgroup
from arl.sandbox.bubblewrap import START

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLIND = "from arl.sandbox import keeper\nkeeper.Namespace.exceeded = lambda self: None\n"
"""Lets a keeper see nothing, so that only cgroups hold."""


def inside(mine: str) -> list[Path]:
    return [path for path in Path(mine).iterdir() if path.is_dir()]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
    return [line for line in lines if "cgroups of their own" in line]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def only_cgroups() -> AsyncIterator[BubblewrapSandbox]:
    """A sandbox without the keeper's checks and without limits for each process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bubblewrap, "START", START.removesuffix("main()\n") + BLIND + "main()\n")
        patch.setattr(bubblewrap, "_rlimits", lambda limits: ["/usr/bin/env"])
        before = descendants(os.getpid())
        async with BubblewrapSandbox(limits=replace(PATIENT, wall_s=20), concurrency=1) as sandbox:
            if not any(map(of_keeper, descendants(os.getpid()) - before)):
                pytest.skip("this user may make no cgroups here")
            yield sandbox


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


@pytest.mark.parametrize("hog", HOGS)
async def test_a_cgroup_alone_holds_the_memory_of_a_program(only_cgroups: BubblewrapSandbox, hog: str) -> None:
    outcome = await only_cgroups.run(HOGS[hog] + "print('got it all')")
    assert (outcome.ended_by, outcome.stdout) == ("memory", ""), outcome


async def test_a_cgroup_alone_holds_a_fork_bomb(only_cgroups: BubblewrapSandbox) -> None:
    program = """
import os, time
for count in range(1000):
    try: child = os.fork()
    except BlockingIOError: break
    if child == 0: time.sleep(60)
print(count)
os._exit(0)
"""
    outcome = await only_cgroups.run(program)
    assert (outcome.ended_by, outcome.stdout) == ("exit", f"{PATIENT.processes}\n"), outcome


async def test_the_cache_of_files_that_a_program_reads_is_not_its_memory(
    only_cgroups: BubblewrapSandbox, pipe: Path
) -> None:
    large = pipe.parent / "large"
    large.touch()
    os.truncate(large, 300 << 20)
    async with with_keeper(pipe) as (sandbox, _):
        program = f"file = open('{large}', 'rb')\nwhile file.read(1 << 20): pass\nprint(file.tell())"
        assert (await sandbox.run(program)).stdout == f"{300 << 20}\n"


async def test_cgroups_last_as_long_as_their_runs_and_one_line_tells_of_them(
    only_cgroups: BubblewrapSandbox, pipe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with with_keeper(pipe) as (sandbox, pid):
        call = asyncio.create_task(sandbox.run(sleeper(pipe)))
        async with once_running(pipe):
            for mine in of_keeper(pid):
                (run,) = (place for place in inside(mine) if place.name != "keeper")
                assert len((run / "cgroup.procs").read_text().split()) >= 3  # bwrap, its pid 1, the program
            call.cancel()
        assert (await sandbox.run("print(1)")).stdout == "1\n"
        assert [[place.name for place in inside(mine)] for mine in of_keeper(pid)] == [["keeper"]] * len(of_keeper(pid))
    assert len(told(caplog)) == 1
    assert "memory" in told(caplog)[0]


async def test_the_next_sandbox_removes_what_a_killed_arl_left(only_cgroups: BubblewrapSandbox, pipe: Path) -> None:
    async with parent_to_kill(pipe) as pids:
        assert sum(map(len, map(of_keeper, pids))) > 0
    async with BubblewrapSandbox():
        assert list(map(of_keeper, pids)) == [[]] * len(pids)


NOWHERE = "from arl.sandbox import cgroup\ncgroup.places = lambda: []\n"
LATER = """
from arl.sandbox import cgroup
def make(self, count=[], make=cgroup.RunCgroups.make):
    count.append(1)
    make(self)
    if len(count) == 4: raise OSError(28, "no space")
cgroup.RunCgroups.make = make
"""


@pytest.mark.parametrize(
    ("code", "lines"),
    [(NOWHERE, ["INFO .*none, because no cgroup may be made"]), (LATER, ["INFO .*memory", "WARNING .*none, because"])],
    ids=["from the beginning", "after some runs"],
)
async def test_programs_run_without_cgroups_where_none_may_be_made(
    only_cgroups: BubblewrapSandbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: str,
    lines: list[str], pipe: Path,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(bubblewrap, "START", START.removesuffix("main()\n") + code + "main()\n")
    async with with_keeper(pipe) as (sandbox, _):
        outcomes: list[ProgramOutcome] = [await sandbox.run("print(1)") for _ in range(4)]
        assert [outcome.stdout for outcome in outcomes] == ["1\n"] * 4
        assert (await sandbox.run("x = [b'x' * (1 << 20) for _ in range(1000)]")).ended_by == "memory"
    assert [re.match(line, said) is not None for line, said in zip(lines, told(caplog), strict=True)] == [True] * len(
        lines
    )


UNIFIED = Path("/sys/fs/cgroup/unified")
IN_UNIFIED = f"""
from arl.sandbox import cgroup
cgroup.places = lambda: [cgroup.Cgroup(path={str(UNIFIED)!r}, controllers=frozenset(), is_unified=True)]
"""


async def test_a_real_v2_counts_the_time_of_children_that_nobody_waits_for(
    bubblewrap: BubblewrapSandbox, monkeypatch: pytest.MonkeyPatch, pipe: Path
) -> None:
    """Beside v1 there may be a v2 without controllers, which counts the time all the same."""
    if not os.access(UNIFIED, os.W_OK):
        pytest.skip("no v2 here that this user may write to")
    start = START.removesuffix("main()\n") + BLIND + IN_UNIFIED + "main()\n"
    monkeypatch.setattr("arl.sandbox.bubblewrap.START", start)
    place = cgroup.Cgroup(path=str(UNIFIED), controllers=frozenset(), is_unified=True)
    monkeypatch.setattr(cgroup, "places", lambda: [place])
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
    async with with_keeper(pipe) as (sandbox, pid):
        assert of_keeper(pid) == [f"{UNIFIED}/arl-{os.stat('/proc/self/ns/pid').st_ino}-{pid}"]
        assert (await sandbox.run(program, limits=replace(PATIENT, cpu_s=0.5))).ended_by == "cpu"


async def test_a_real_v2_holds_the_memory_of_a_program(only_cgroups: BubblewrapSandbox) -> None:
    if not any(place.is_unified and "memory" in place.controllers for place in cgroup.places()):
        pytest.skip("v2 has no memory controller here")
    assert (await only_cgroups.run(HOGS["memory of many"])).ended_by == "memory"

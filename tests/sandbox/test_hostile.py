"""Every program of hostile/ is contained, its outcome says what ended it, and the next run finds nothing of it.

All are run at once, four at a time, when the first test asks for one. A program is put behind attempts.py.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sandbox.conftest import PATIENT

from arl.sandbox import BubblewrapSandbox, EndedBy, Limits, ProgramOutcome

HERE = Path(__file__).parent
PROGRAMS = {path.stem: path for path in sorted((HERE / "hostile").glob("*.py"))}
SECRET = "the-host's-own-secret"
PLAIN = """
import os, sys
print(*(sorted(os.listdir(directory)) for directory in ("/sandbox", "/tmp", "/dev/shm", "/")))
print(sorted(name for name in os.listdir("/proc") if name.isdigit()), os.listdir("/proc/self/fd"))
print(sorted(os.environ), input())
print(sum(ord(c) for c in open("/usr/bin/env", "rb").read().decode("latin-1")), file=sys.stderr)
"""
QUICK = replace(PATIENT, wall_s=0.5)
LITTLE = replace(PATIENT, cpu_s=0.2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a program gets, and what becomes of it. says: all of it is in stdout; nothing REACHED ever is."""

    ended_by: EndedBy = "exit"
    code: int | None = 0
    limits: Limits = PATIENT
    says: tuple[str, ...] = ()
    stdin: str = ""


CASES = {
    "fork_bomb": Case(ended_by="processes", code=None),
    "thread_bomb": Case(ended_by="processes", code=None),
    "zombie_flood": Case(ended_by="processes", code=None),
    "memory_bomb": Case(ended_by="memory", code=None),
    "memory_of_children": Case(ended_by="memory", code=None),
    "memory_unmapped": Case(
        says=(
            "refused: memfd:",
            "by its number",
            "shmget",
            "msgget",
            "mq_open",
            "refused: /dev/shm: OSError(2",
            "refused: shared mapping: PermissionError",
            "refused: /dev/zero",
            "refused: vmsplice: PermissionError",
        )
    ),
    "shared_by_user": Case(
        says=(
            "refused: io_setup",
            "refused: inotify_init1",
            "refused: larger pipe",
            "refused: flock",
            "refused: lease",
            "refused: dnotify",
            "refused: larger buffer",
            "few timers True",
        )
    ),
    "socket_buffers": Case(ended_by="memory", code=None),
    "memory_at_once": Case(says=("refused: a terabyte: MemoryError",)),
    "host_files": Case(says=("refused: /etc/shadow", "refused: /proc/1/root/etc/passwd", "refused: /home")),
    "environment": Case(
        says=("refused", "['HOME', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH', 'PWD', 'TMPDIR']")
    ),
    "processes": Case(says=("saw [1, 2] 1",)),
    "network_tcp": Case(
        says=("refused: ('127.0.0.1'", "refused: ('1.1.1.1'", "Network is unreachable", "refused: IPv6")
    ),
    "network_udp": Case(says=("refused: 8.8.8.8", "refused: broadcast")),
    "network_dns": Case(says=("refused: example.com",)),
    "network_unix": Case(says=("refused: '/", "refused: '\\x00", "docker.sock")),
    "network_other": Case(says=("refused: AF_VSOCK", "refused: AF_NETLINK", "refused: AF_ALG", "refused: AF_PACKET")),
    "pid_1": Case(says=("refused: its memory", "refused: its threads' memory", "refused: its pipe", "refused: where")),
    "ptrace": Case(says=("refused: attach 1", "refused: seize 1", "refused: process_vm_readv 1")),
    "proc_mem": Case(ended_by="signal", code=-5, says=("refused: pid 1",)),
    "symlinks": Case(says=("refused: by a symlink", "refused: by pid 1", "refused: upwards")),
    "hard_links": Case(says=("refused: /usr/bin/env", "refused: /proc/1/exe")),
    "writes_system": Case(says=("refused: /usr:", "refused: /:", "refused: /dev:", "core_pattern", "refused: chmod")),
    "mount": Case(says=("refused: proc", "refused: tmpfs", "refused: bind", "refused: remount", "refused: umount")),
    "unshare": Case(says=("refused: unshare 0x10000000", "refused: clone:", "refused: setns", "refused: unshare(1)")),
    "chroot": Case(says=("refused: chroot", "refused: back")),
    "setuid": Case(says=("refused: setuid", "refused: setgid", "refused: su", "refused: chown", "rights {0} 1")),
    "kills_all": Case(ended_by="signal", code=-9),
    "kills_parent": Case(says=("still here 1", "ProcessLookupError")),
    "stops_all": Case(ended_by="timeout", code=None, limits=QUICK),
    "terminal": Case(says=("refused: TIOCSTI 0", "refused: TIOCSTI 1", "refused: /dev/tty", "refused: /dev/ptmx")),
    "devices": Case(says=("refused: /dev/mem", "refused: mknod", "'full', 'null', 'random'")),
    "kernel_calls": Case(says=("refused: bpf", "refused: userfaultfd", "refused: io_uring_setup", "refused: keyctl")),
    "stdout_flood": Case(ended_by="output", code=None),
    "stderr_flood": Case(ended_by="output", code=None),
    "no_text": Case(says=("a\0b\ufffd\ufffd\ufffdc\n",)),
    "closes_output": Case(ended_by="timeout", code=None, limits=QUICK),
    "forges_reports": Case(code=3),
    "deletes_itself": Case(says=("[] True",)),
    "fills_disk": Case(says=("refused: disk: OSError(28", "files 7")),
    "many_files": Case(ended_by="disk", code=None),
    "files_unseen": Case(ended_by="disk", code=None),
    "sparse_file": Case(says=("refused: a terabyte", "File too large", "refused: its last byte")),
    "sleeps": Case(ended_by="timeout", code=None, limits=QUICK),
    "ignores_signals": Case(ended_by="timeout", code=None, limits=QUICK),
    "daemon": Case(says=("gone",)),
    "orphans": Case(says=("gone",)),
    "busy_loop": Case(ended_by="cpu", code=None, limits=LITTLE),
    "busy_children": Case(ended_by="cpu", code=None, limits=LITTLE),
    "busy_orphans": Case(ended_by="cpu", code=None, limits=LITTLE),
    "raises_limits": Case(says=tuple(f"refused: {name}" for name in ("AS", "NPROC", "FSIZE", "nice", "real time"))),
    "deep_recursion": Case(ended_by="signal", code=-11),
    "aborts": Case(ended_by="signal", code=-6),
    "crashes": Case(ended_by="signal", code=-11),
    "exits_oddly": Case(code=77),
    "descriptors": Case(says=("refused: descriptors: OSError(24", "opened True")),
    "descriptors_under_way": Case(says=("refused: sendmsg: PermissionError",)),
    "leftovers": Case(says=("/sandbox ['main.py']", "/tmp ['main.py']", "/dev/shm ['main.py']")),
    "shell": Case(ended_by="exit", code=5, says=("1000\n",)),
    "ignores_input": Case(says=("done",), stdin="x" * (4 << 20)),
}


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Of each program its outcome, and that of the plain program after it; and that of one before all of them."""

    before: ProgramOutcome
    outcomes: dict[str, tuple[ProgramOutcome, ProgramOutcome]]
    connections: int
    """Connections and datagrams that came to where the programs were told that somebody listens."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def suite(bubblewrap: BubblewrapSandbox, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    directory = tmp_path_factory.mktemp("host")
    (directory / "secret").write_text(SECRET)
    (directory / "secret").chmod(0o644)
    with Listeners(directory / "socket") as listeners, pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARL_TEST_SECRET", SECRET)
        given: dict[str, Any] = {**listeners.addresses, "secret": SECRET, "pids": [os.getpid(), 4000]}
        given["paths"] = [str(directory / "secret"), str(HERE), str(Path(sys.prefix).parent), str(Path.cwd())]
        given["paths"] += [str(Path.home() / name) for name in os.listdir(Path.home()) if name != ".pyenv"]

        async def attack(name: str) -> tuple[ProgramOutcome, ProgramOutcome]:
            program = (HERE / "attempts.py").read_text() + PROGRAMS[name].read_text()
            stdin = f"{json.dumps(given)}\n{CASES[name].stdin}"
            hostile = await bubblewrap.run(program, stdin=stdin, limits=CASES[name].limits)
            return hostile, await bubblewrap.run(PLAIN, stdin="plain")

        before = await bubblewrap.run(PLAIN, stdin="plain")
        outcomes = await asyncio.gather(*map(attack, CASES))
        yield Suite(before=before, outcomes=dict(zip(CASES, outcomes, strict=True)), connections=listeners.received())


class Listeners:
    """The host's sockets that no program should reach."""

    def __init__(self, path: Path) -> None:
        self._sockets = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)]
        self._sockets[1].bind(("127.0.0.1", 0))
        abstract = f"arl-test-{os.getpid()}"
        for address in (str(path), "\0" + abstract):
            self._sockets.append(socket.socket(socket.AF_UNIX))
            self._sockets[-1].bind(address)
            self._sockets[-1].listen()
        self.addresses = {"tcp": self._sockets[0].getsockname()[1], "udp": self._sockets[1].getsockname()[1]}
        self.addresses |= {"unix": str(path), "abstract": abstract}

    def __enter__(self) -> "Listeners":
        return self

    def __exit__(self, *exc: object) -> None:
        for each in self._sockets:
            each.close()

    def received(self) -> int:
        count = 0
        for each in self._sockets:
            each.setblocking(False)
            try:
                each.recv(10) if each.type == socket.SOCK_DGRAM else each.accept()[0].close()
                count += 1
            except BlockingIOError:
                pass
        return count


def test_every_hostile_program_has_its_case() -> None:
    assert set(CASES) == set(PROGRAMS)
    assert len(CASES) >= 30


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_program_is_contained_and_the_run_after_it_is_clean(name: str, suite: Suite) -> None:
    (outcome, after), case = suite.outcomes[name], CASES[name]
    assert (outcome.ended_by, outcome.exit_code) == (case.ended_by, case.code), outcome
    assert "REACHED" not in outcome.stdout
    assert SECRET not in outcome.stdout + outcome.stderr
    assert [said for said in case.says if said not in outcome.stdout] == [], outcome
    assert len(outcome.stdout) + len(outcome.stderr) <= case.limits.output_bytes
    assert after.succeeded
    assert (after.stdout, after.stderr) == (suite.before.stdout, suite.before.stderr)


def test_no_program_reached_the_host(suite: Suite) -> None:
    assert suite.connections == 0

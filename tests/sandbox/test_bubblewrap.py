"""Bubblewrap: what programs get, that nothing of them stays, and errors where they cannot run."""

import asyncio
import gc
import itertools
import math
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from guides import python_blocks
from sandbox.conftest import PATIENT, once_running, sleeper

from arl.api.errors import SandboxError
from arl.sandbox import BubblewrapSandbox, Limits, keeper
from arl.sandbox.bubblewrap import START
from arl.sandbox.keeper import BwrapRun

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.asyncio(loop_scope="session")


def stat_of(pid: int) -> list[str]:
    """State, parent and so on; "Z" and no parent once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["Z", "0"]


def descendants(pid: int) -> set[int]:
    """Every process below one."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    parents = {one: int(stat_of(one)[1]) for one in pids}
    found, level = set[int](), {pid}
    while level := {child for child, parent in parents.items() if parent in level} - found:
        found |= level
    return found


@asynccontextmanager
async def parent_to_kill(pipe: Path) -> AsyncIterator[set[int]]:
    """A program's processes in a sandbox of another process, which is killed at the block's end; they end, too."""
    script = f"""
import asyncio
from arl.sandbox import BubblewrapSandbox
async def main():
    async with BubblewrapSandbox(read_only=[{str(pipe.parent)!r}]) as sandbox:
        await sandbox.run({sleeper(pipe)!r})
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    async with once_running(pipe) as reader:
        pids = descendants(parent.pid)
        ends = [os.pidfd_open(pid) for pid in pids]
        yield pids
        parent.kill()
        assert await asyncio.to_thread(reader.read) == ""
    await parent.wait()
    for end in ends:
        assert await asyncio.to_thread(select.select, [end], [], [], 30) == ([end], [], [])
        os.close(end)


@asynccontextmanager
async def with_keeper(pipe: Path) -> AsyncIterator[tuple[BubblewrapSandbox, int]]:
    """A sandbox with one place, and its keeper's process id. At the end no process of it is left."""
    before = descendants(os.getpid())
    async with BubblewrapSandbox(limits=PATIENT, concurrency=1, read_only=[str(pipe.parent)]) as sandbox:
        (pid,) = descendants(os.getpid()) - before
        yield sandbox, pid
    assert descendants(os.getpid()) - before == set()


async def test_many_and_large_files_and_inputs_arrive(bubblewrap: BubblewrapSandbox) -> None:
    files = {f"{number}": "x" * 1000 for number in range(40)}
    program = "import os, sys\nprint(len(os.listdir()), len(sys.stdin.read()), os.path.getsize('0'))"
    outcome = await bubblewrap.run(program, stdin="y" * (3 << 20), files=files)
    assert outcome.stdout == f"41 {3 << 20} 1000\n"


async def test_output_beyond_the_limit_counts_if_the_program_ends_with_it(bubblewrap: BubblewrapSandbox) -> None:
    outcome = await bubblewrap.run("print('x' * 2000, end='')", limits=replace(PATIENT, output_bytes=1000))
    assert (len(outcome.stdout), outcome.ended_by) == (1000, "output")


ORDINARY = {
    "a program whose processes share memory": """
import os, time
held = b'x' * (60 << 20)
for _ in range(2): os.fork()
time.sleep(0.2)
if os.getpid() == 2: print("shared")
""",
    "a program with threads": """
from concurrent.futures import ThreadPoolExecutor
import time
with ThreadPoolExecutor(8) as pool: print(sum(pool.map(lambda x: time.sleep(0.05) or x, range(8))))
""",
    "common ways to work": """
import asyncio, multiprocessing, os, pathlib, sqlite3, subprocess, tempfile
from multiprocessing import shared_memory

async def ticks():
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    await asyncio.open_connection(*server.sockets[0].getsockname())
    return "loopback"

if __name__ == "__main__":
    print(asyncio.run(ticks()))
    with tempfile.NamedTemporaryFile() as file: print(pathlib.Path(file.name).exists())
    print(subprocess.run(["echo", "shell"], capture_output=True, text=True).stdout, end="")
    print(sqlite3.connect("x.db").execute("select 1").fetchone())
    lock = multiprocessing.Lock()
    memory = shared_memory.SharedMemory(create=True, size=100)
    memory.close(); memory.unlink()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=queue.put, args=(1,)); process.start()
    print(queue.get()); process.join()
    exit()
""",
    "a web server with its clients, databases and locks": """
import fcntl, http.server, os, shelve, signal, socket, sqlite3, threading, urllib.request, zipfile

class Long(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(bytes(1 << 22))
    def log_message(self, *told): pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Long)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = "http://127.0.0.1:%d/" % server.server_port
with urllib.request.urlopen(url) as answer: print(len(answer.read()))
server.shutdown()
with shelve.open("kept") as kept: kept["a"] = 1
with shelve.open("kept") as kept: print(kept["a"])
with sqlite3.connect("x.db") as base: base.execute("pragma journal_mode=wal"); base.execute("create table t (a)")
with open("locked", "w") as file: fcntl.lockf(file, fcntl.LOCK_EX); print(fcntl.fcntl(file, fcntl.F_GETFL) >= 0)
pair = socket.socketpair(); pair[0].send(b"pair"); print(pair[1].recv(9).decode())
signal.setitimer(signal.ITIMER_REAL, 60)
print(len(os.sched_getaffinity(0)) > 0)
""",
}


async def test_ordinary_programs_are_not_hindered(bubblewrap: BubblewrapSandbox) -> None:
    outcomes = await asyncio.gather(*map(bubblewrap.run, ORDINARY.values()))
    assert [outcome.stdout.split() for outcome in outcomes] == [
        ["shared"],
        ["28"],
        ["loopback", "True", "shell", "(1,)", "1"],
        ["4194304", "1", "True", "pair", "True"],
    ], outcomes


async def test_waiting_for_a_place_costs_a_program_none_of_its_time(bubblewrap: BubblewrapSandbox) -> None:
    """Its own clock, which is the host's, shows that one begins when the other has ended."""
    program = "import time\nprint(time.monotonic())\ntime.sleep(0.3)\nprint(time.monotonic())"

    async def run(sandbox: BubblewrapSandbox) -> tuple[float, float, float]:
        """When it began and ended, and when it began at the earliest by the time that it is said to have taken."""
        outcome = await sandbox.run(program)
        began, ended = map(float, outcome.stdout.split())
        return began, ended, time.monotonic() - outcome.wall_s

    async with BubblewrapSandbox(concurrency=1) as one_at_a_time:
        spans = sorted(await asyncio.gather(*(run(one_at_a_time) for _ in range(3))))
    assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))
    assert all(before[1] < after[2] for before, after in itertools.pairwise(spans))


async def test_cancelling_a_call_ends_its_program_and_nothing_is_left(
    bubblewrap: BubblewrapSandbox, pipe: Path
) -> None:
    async with with_keeper(pipe) as (sandbox, pid):
        gc.collect()  # what earlier tests left open
        files, kept = len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{pid}/fd"))
        calls = [asyncio.create_task(sandbox.run(sleeper(pipe))) for _ in range(3)]
        async with once_running(pipe) as reader:
            for call in calls:
                call.cancel()
            assert await asyncio.to_thread(reader.read) == ""
        await asyncio.gather(*calls, return_exceptions=True)
        assert all(call.cancelled() for call in calls)
        assert (await sandbox.run("print(1)")).stdout == "1\n"  # begins when all before it are gone
        assert descendants(pid) == set()
        assert len(os.listdir(f"/proc/{pid}/fd")) == kept
        assert len(os.listdir("/proc/self/fd")) == files


async def test_closing_ends_what_runs_and_later_calls_are_refused(bubblewrap: BubblewrapSandbox, pipe: Path) -> None:
    before = descendants(os.getpid())
    sandbox = BubblewrapSandbox(read_only=[str(pipe.parent)])
    async with sandbox:
        call = asyncio.create_task(sandbox.run(sleeper(pipe)))
        async with once_running(pipe):
            pass
    with pytest.raises(SandboxError, match="was closed"):
        await call
    with pytest.raises(SandboxError, match="not open; call it within `async with`"):
        await sandbox.run("")
    assert descendants(os.getpid()) - before == set()


async def test_a_keeper_that_dies_is_an_error_its_programs_die_with_it_and_another_takes_over(
    bubblewrap: BubblewrapSandbox, pipe: Path
) -> None:
    async with with_keeper(pipe) as (sandbox, pid):
        call = asyncio.create_task(sandbox.run(sleeper(pipe)))
        async with once_running(pipe) as reader:
            os.kill(pid, signal.SIGKILL)
            assert await asyncio.to_thread(reader.read) == ""
        with pytest.raises(SandboxError, match="keeper died"):
            await call
        assert [run.stdout for run in await asyncio.gather(*[sandbox.run("print(1)") for _ in range(3)])] == ["1\n"] * 3


BLINDFOLD = """
import signal
from arl.sandbox import keeper
told = []
signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
def exceeded(self, look=keeper.Namespace.exceeded):
    if told:
        raise PermissionError(f"cannot see because of {told.pop()}")
    return look(self)
keeper.Namespace.exceeded = exceeded
"""
"""Lets a keeper's next look fail, when it is sent a signal."""


async def test_a_program_that_cannot_be_watched_is_ended_and_its_place_is_free(
    bubblewrap: BubblewrapSandbox, pipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arl.sandbox.bubblewrap.START", START.removesuffix("main()\n") + BLINDFOLD + "main()\n")
    async with with_keeper(pipe) as (sandbox, pid):
        call = asyncio.create_task(sandbox.run(sleeper(pipe)))
        async with once_running(pipe) as reader:
            os.kill(pid, signal.SIGUSR1)
            assert await asyncio.to_thread(reader.read) == ""
        with pytest.raises(SandboxError, match=f"because of {signal.SIGUSR1.value}"):
            await call
        assert descendants(pid) == set()
        assert (await sandbox.run("print(1)")).stdout == "1\n"


async def test_a_namespace_that_is_never_set_up_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = keeper.Namespace(os.getpid(), {})  # in no namespace of its own
    assert seen.exceeded() is None
    monkeypatch.setattr(keeper, "SET_UP_S", 0.0)
    with pytest.raises(PermissionError, match=f"/proc/{os.getpid()}/root, a program's root, could not be opened"):
        seen.exceeded()


async def test_a_program_is_ended_though_its_time_is_over_before_bwrap_reports_its_first_process() -> None:
    """That process is not bound to bwrap yet, and holds the program's output open."""
    bwrap = 'sleep 30 & sleep 0.3; echo "{\\"child-pid\\": $!}" > /proc/self/fd/$1; wait'
    request = {"command": ["sh", "-c", bwrap], "program": [], "files": [], "limits": asdict(Limits(wall_s=0.1))}
    async with asyncio.timeout(20):
        header, _ = await BwrapRun({**request, "cgroup": None}, [b"", b""], None).run()
    assert header["ended_by"] == "timeout"


async def test_everything_ends_with_a_parent_that_is_killed(bubblewrap: BubblewrapSandbox, pipe: Path) -> None:
    async with parent_to_kill(pipe) as pids:
        assert len(pids) >= 4  # the keeper, bwrap, its pid 1, the program and its child


async def test_programs_import_what_is_installed_for_the_python_they_are_given(bubblewrap: BubblewrapSandbox) -> None:
    program = "import pluggy, sys\nprint(pluggy.__name__)"
    assert "No module named 'pluggy'" in (await bubblewrap.run(program)).stderr
    async with BubblewrapSandbox(python=sys.executable) as sandbox:
        assert (await sandbox.run(program)).stdout == "pluggy\n"


async def test_programs_read_directories_that_they_are_given_and_write_none(
    bubblewrap: BubblewrapSandbox, tmp_path: Path
) -> None:
    (tmp_path / "corpus").write_text("text")
    os.chmod(tmp_path, 0o755)
    async with BubblewrapSandbox(read_only=[str(tmp_path)]) as sandbox:
        outcome = await sandbox.run(f"print(open('{tmp_path}/corpus').read())\nopen('{tmp_path}/new', 'w')")
    assert outcome.stdout == "text\n"
    assert "Read-only file system" in outcome.stderr or "Permission denied" in outcome.stderr
    assert os.listdir(tmp_path) == ["corpus"]


async def test_limits_must_be_positive_and_finite() -> None:
    for name, number in itertools.product(("wall_s", "processes", "output_bytes"), (0, -1, math.inf, math.nan)):
        with pytest.raises(SandboxError, match=rf"Limits.{name} is"):
            Limits(**{name: number})


@pytest.mark.parametrize(
    ("complaint", "advice"),
    [
        ("bwrap: Unknown option --disable-userns", "bubblewrap 0.8 or newer"),
        ("bwrap: No permissions to create new namespace", "in a container, namespaces have to be allowed"),
    ],
)
async def test_a_bwrap_that_does_not_work_is_an_error_with_advice(
    monkeypatch: pytest.MonkeyPatch, complaint: str, advice: str
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        fake = Path(directory, "bwrap")
        fake.write_text(f"#!/bin/sh\necho '{complaint}' >&2\nexit 1\n")  # noqa: ASYNC240
        for place in (fake, directory):
            os.chmod(place, 0o755)
        monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
        with pytest.raises(SandboxError, match=advice) as refusal:
            await BubblewrapSandbox().__aenter__()
        assert complaint in str(refusal.value)


async def test_a_python_that_does_not_run_or_is_in_the_home_directory_is_refused(
    bubblewrap: BubblewrapSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SandboxError, match=r"the sandbox's Python, /nowhere/python, does not run"):
        await BubblewrapSandbox(python="/nowhere/python").__aenter__()
    monkeypatch.setenv("HOME", sys.base_prefix)
    with pytest.raises(SandboxError, match="holds your home directory"):
        await BubblewrapSandbox().__aenter__()


async def test_continuous_integration_does_not_go_without_a_sandbox() -> None:
    assert "export ARL_NEEDS_SANDBOX=1" in (ROOT / ".ci" / "run").read_text()


async def test_the_first_program_of_the_guide_prints_what_it_says(
    bubblewrap: BubblewrapSandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    first = next(iter(python_blocks(ROOT / "docs" / "sandbox.md")))
    await asyncio.to_thread(exec, first, {})
    assert capsys.readouterr().out == "exit 0 144\n\ncpu None\n"


POSSIBLE = ("a\nb", " ", "-", "--", "é" * 127, "d/" * 63 + "x", os.fsdecode(b"\xff"))
IMPOSSIBLE = {
    "it must be a plain relative path": (
        *("/etc/x", "../x", "a/../../x", "./x", "", "a//b", "x/", "main.py", "a\0b"),
        *("é" * 128, "d/" * 64 + "x", "x" * 3000, "\ud800"),
    ),
    "which is below the file": ("taken/x", "main.py/x"),
}


async def test_a_file_has_its_path_or_is_refused_before_anything_runs(bubblewrap: BubblewrapSandbox) -> None:
    program = "import os; print(sum(len(files) for _, _, files in os.walk(b'.')))"
    outcome = await bubblewrap.run(program, files=dict.fromkeys(POSSIBLE, "text"))
    assert outcome.stdout == f"{len(POSSIBLE) + 1}\n", outcome
    for said, path in ((said, path) for said, paths in IMPOSSIBLE.items() for path in paths):
        with pytest.raises(SandboxError, match=rf"(?s)^files has .*{said}"):
            await bubblewrap.run(program, files={"taken": "", path: ""})


async def test_files_that_do_not_fit_are_refused_before_anything_runs(bubblewrap: BubblewrapSandbox) -> None:
    with pytest.raises(SandboxError, match=r"the files take 1052672 bytes; Limits\.disk_bytes is 1048576"):
        await bubblewrap.run("", files={"big": bytes((1 << 20) + 1), "empty": ""}, limits=Limits(disk_bytes=1 << 20))

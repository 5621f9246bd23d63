"""A server's process ends with its parent and at a signal, whatever its event loop does."""

import asyncio
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from embedded_server import command

from arl.api.errors import ConfigError
from arl.web import process as module
from arl.web.process import Watch, check_address

DEADLINE_S = 60.0

SERVER = """
import asyncio, sys
from arl.web import process
process._GRACE_S = 0.2

async def main(watch):
    stop = watch.stop_event()
    print("ready", flush=True)
    if sys.argv[1] == "blocked":
        while True:
            pass
    await stop.wait()

sys.exit(process.run_server(main, int(sys.argv[2])))
"""

PARENT = """
import os, subprocess, sys
child = subprocess.Popen([*sys.argv[1:], str(os.getpid())], stdout=subprocess.PIPE)
print(child.pid, flush=True)
child.stdout.readline()
print("ready", flush=True)
sys.stdin.read()
"""


def server(state: str) -> list[str]:
    return [sys.executable, "-c", SERVER, state]


@contextmanager
def child_of_another(argv: list[str], **options: object) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has started `argv`, with its process id at the end, and a descriptor of that child."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *argv], **pipes, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    try:
        yield parent, child
    finally:
        if not has_ended(child, 0):
            signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)
        parent.kill()
        parent.communicate()


def has_ended(child: int, within_s: float = DEADLINE_S) -> bool:
    return select.select([child], [], [], within_s)[0] == [child]


@pytest.mark.parametrize("state", ["waiting", "blocked"])
def test_it_ends_with_its_parent_whatever_its_loop_does(state: str) -> None:
    with child_of_another(server(state)) as (parent, child):
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        assert not has_ended(child, 0)
        parent.kill()
        assert has_ended(child)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_blocked_loop_and_shows_what_it_did(number: signal.Signals) -> None:
    argv = [*server("blocked"), str(os.getpid())]
    blocked = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert blocked.stdout is not None
    assert blocked.stdout.readline() == "ready\n"
    blocked.send_signal(number)
    _, told = blocked.communicate(timeout=DEADLINE_S)
    assert blocked.returncode == 1
    assert re.search(r"File \"<string>\", line 1[01] in main", told)


def test_an_embedded_server_ends_with_its_parent_while_it_imports_torch(tmp_path: Path) -> None:
    began = tmp_path / "began"
    os.mkfifo(began)
    (tmp_path / "torch.py").write_text(f"open({str(began)!r}, 'w').close()\nwhile True:\n    pass\n")
    (tmp_path / "config.json").write_text("{}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with child_of_another([*command(str(tmp_path)), "--parent-pid"], env=environment) as (parent, child):
        began.read_text()  # returns when the import has begun
        parent.kill()
        assert has_ended(child)


@pytest.mark.parametrize("has_descriptors", [True, False])
async def test_a_watch_ends_with_its_block_and_leaves_the_signals_as_they_were(
    has_descriptors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    parent = await asyncio.create_subprocess_exec("sleep", "60")
    if not has_descriptors:
        monkeypatch.delattr(os, "pidfd_open")
        monkeypatch.setattr(module, "_PARENT_POLL_S", 0.01)
    with Watch(parent.pid) as watch:
        stop = watch.stop_event()
        assert not stop.is_set()
        parent.kill()
        await parent.wait()
        async with asyncio.timeout(DEADLINE_S):
            await stop.wait()
    with Watch() as watch:
        stop = watch.stop_event()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            await stop.wait()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_an_address_that_others_can_reach_needs_a_key() -> None:
    check_address("127.0.0.1", 0, None)
    check_address("0.0.0.0", 8000, "key")
    with pytest.raises(ConfigError, match=r"--host is 0\.0\.0\.0, open to other machines"):
        check_address("0.0.0.0", 0, None)
    with pytest.raises(ConfigError, match="--port is 65536"):
        check_address("127.0.0.1", 65536, None)

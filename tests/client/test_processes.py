"""Child servers: ready or an error with their log, watched while they run, and gone afterwards."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from arl.api.config import LocalEngineConfig
from arl.api.errors import ServerError
from arl.engine import processes
from arl.engine.processes import local_servers

Play = Callable[[str], None]

READY = 'print(\'{"event": "ready", "port": 4321}\', flush=True)\n'


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Play:
    """Let the children run a script in place of the server; each writes its process id to tmp_path."""

    def play(script: str) -> None:
        note = f"import os, sys, time, signal\nopen({str(tmp_path)!r} + f'/{{os.getpid()}}.pid', 'w').close()\n"
        monkeypatch.setattr(processes, "_command", lambda model, config: [sys.executable, "-c", note + script])

    return play


def pids(tmp_path: Path) -> list[int]:
    return [int(path.stem) for path in tmp_path.glob("*.pid")]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_servers_are_given_by_address_and_gone_after_the_block(play: Play, tmp_path: Path) -> None:
    play(READY + "time.sleep(60)")
    async with local_servers("m", LocalEngineConfig(num_servers=2), tmp_path) as addresses:
        assert list(addresses) == ["http://127.0.0.1:4321"] * 2
        assert all(map(is_running, pids(tmp_path)))
        assert len(pids(tmp_path)) == 2
    assert not any(map(is_running, pids(tmp_path)))


async def test_what_a_server_says_goes_to_its_log(play: Play, tmp_path: Path) -> None:
    play("print('hello', file=sys.stderr, flush=True)\n" + READY + "time.sleep(60)")
    async with local_servers("m", LocalEngineConfig(), tmp_path / "logs"):
        pass
    assert (tmp_path / "logs" / "server-0.log").read_text() == "hello\n"


async def test_threads_are_set_before_the_server_starts(play: Play, tmp_path: Path) -> None:
    play("print(os.environ['OMP_NUM_THREADS'], file=sys.stderr, flush=True)\n" + READY + "time.sleep(60)")
    async with local_servers("m", LocalEngineConfig(num_threads=3), tmp_path):
        pass
    assert (tmp_path / "server-0.log").read_text() == "3\n"


async def test_a_server_that_dies_at_the_start_is_an_error_with_the_end_of_its_log(play: Play, tmp_path: Path) -> None:
    play("print('cannot find the model', file=sys.stderr); sys.exit(3)")
    with pytest.raises(ServerError, match=r"exit code 3(.|\n)*cannot find the model"):
        async with local_servers("m", LocalEngineConfig(), tmp_path):
            pytest.fail("it started")


async def test_a_server_that_is_never_ready_is_an_error_and_is_stopped(play: Play, tmp_path: Path) -> None:
    play("time.sleep(60)")
    with pytest.raises(ServerError, match=r"not ready within 0\.5 s \(engine\.startup_timeout_s\)"):
        async with local_servers("m", LocalEngineConfig(startup_timeout_s=0.5), tmp_path):
            pytest.fail("it started")
    assert not any(map(is_running, pids(tmp_path)))


async def test_when_the_last_server_dies_the_block_ends_with_its_last_words(play: Play, tmp_path: Path) -> None:
    play(READY + "sys.stderr.write('out of memory'); sys.stderr.flush(); time.sleep(0.3); sys.exit(9)")
    with pytest.raises(ServerError, match=r"every embedded server died(.|\n)*exit code 9(.|\n)*out of memory"):
        async with local_servers("m", LocalEngineConfig(num_servers=2), tmp_path):
            await asyncio.Event().wait()


async def test_when_one_of_two_dies_the_block_goes_on_after_a_warning(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(processes.logger, "warning", lambda message, words: warned.set_result(words))
    play(READY + "time.sleep(60)")
    async with local_servers("m", LocalEngineConfig(num_servers=2), tmp_path):
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        assert "exit code -9" in await warned
    assert not any(map(is_running, pids(tmp_path)))


async def test_a_server_that_ignores_the_polite_signal_is_killed(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_STOP_TIMEOUT_S", 0.2)
    play("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "time.sleep(60)")
    async with local_servers("m", LocalEngineConfig(), tmp_path):
        pass
    assert not any(map(is_running, pids(tmp_path)))


async def test_errors_and_cancellation_of_the_block_stop_the_servers_and_pass(play: Play, tmp_path: Path) -> None:
    play(READY + "time.sleep(60)")

    async def run(error: BaseException) -> None:
        async with local_servers("m", LocalEngineConfig(), tmp_path):
            raise error

    for error in (ZeroDivisionError(), ExceptionGroup("two", [ValueError()]), asyncio.CancelledError()):
        with pytest.raises(type(error)):
            await run(error)
    assert len(pids(tmp_path)) == 3
    assert not any(map(is_running, pids(tmp_path)))


def test_an_interrupted_run_leaves_no_server_behind(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
from pathlib import Path
from arl.api.config import LocalEngineConfig
from arl.engine import processes
event = '{{\\"event\\": \\"ready\\", \\"port\\": %d}}'
child = f"import os, time; print('{{event}}' % os.getpid(), flush=True); time.sleep(60)"
processes._command = lambda model, config: [sys.executable, "-c", child]
async def main():
    async with processes.local_servers("m", LocalEngineConfig(), Path({str(tmp_path)!r})) as addresses:
        print(addresses[0].rpartition(":")[2], flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with run:
        assert run.stdout is not None
        child = int(run.stdout.readline())
        assert is_running(child)
        run.send_signal(signal.SIGINT)
    assert not is_running(child)


async def test_a_missing_model_is_told_in_the_servers_words(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="not a directory"):
        async with local_servers(str(tmp_path / "none"), LocalEngineConfig(), tmp_path):
            pytest.fail("it started")

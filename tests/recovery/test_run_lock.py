"""One run at a time in a directory: the lock names its holder, and dies with it however it ends."""

import asyncio
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from one_turn import OneTurn
from scripted_launch import small, use_fakes

import arl.run.launch
import arl.run.servers
from arl.api.errors import RunFileError
from arl.api.fakes import ScriptedEngine
from arl.run.experiment import Experiment, ExperimentConfig, Setup
from arl.training.run_dir import RunLock

ROOT = Path(__file__).parents[2]
HOLDER = """
import os, sys, time
from pathlib import Path
from arl.training.run_dir import RunLock

lock = RunLock(Path(sys.argv[1]))
lock.take()
if not os.fork():
    print(os.getpid(), flush=True)
time.sleep(600)
"""
"""Holds a directory, and forks a process that lives on and says so."""

EXAMPLES = [{"number": n} for n in range(40)]


@asynccontextmanager
async def launched(run_dir: Path, steps: int) -> AsyncIterator[Any]:
    async with arl.run.launch.launch(small(run_dir, steps=steps), workflow=OneTurn(), dataset=EXAMPLES) as trainer:
        yield trainer


async def trained(run_dir: Path, steps: int) -> list[int]:
    """The versions that a run in `run_dir` trains."""
    async with launched(run_dir, steps) as trainer:
        return [step.version async for step in trainer]


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch, lambda: ScriptedEngine(lambda request: (7, 8, 9)))


def test_a_second_run_is_refused_until_the_first_was_killed_even_if_its_child_lives_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            named = rf"another run trains in {tmp_path}: process {holder.pid} on {socket.gethostname()}, since 20.* UTC"
            with pytest.raises(RunFileError, match=named):
                asyncio.run(trained(tmp_path, 1))
            assert os.listdir(tmp_path) == ["run.lock"], "the refused run touched something"
            holder.kill()
            holder.wait()
            assert asyncio.run(trained(tmp_path, 1)) == [1]
        finally:
            os.kill(child, signal.SIGKILL)


async def test_two_runs_of_one_process_exclude_each_other_and_the_next_follows_the_first(tmp_path: Path) -> None:
    async with launched(tmp_path, 2) as trainer:
        await anext(trainer)
        with pytest.raises(RunFileError, match=f"process {os.getpid()} .*, which is this one"):
            await trained(tmp_path, 2)
        async with arl.run.servers.serve(small(tmp_path)):
            pass  # serving goes on beside a run
    assert await trained(tmp_path, 2) == [2]
    assert (tmp_path / "run.lock").read_bytes() == b""


async def test_an_experiment_prepares_and_writes_its_results_in_a_directory_of_its_own(tmp_path: Path) -> None:
    def prepare(config: ExperimentConfig) -> Setup:
        with pytest.raises(RunFileError, match="which is this one"):
            RunLock(config.run_dir).take()
        return Setup(model="none", workflow=OneTurn(), dataset=EXAMPLES)

    settings = {**small(tmp_path).model_dump(exclude_unset=True), "model": "none"}
    await Experiment(config=ExperimentConfig, prepare=prepare).train(ExperimentConfig(**settings))
    after = RunLock(tmp_path)
    after.take()
    after.release()


@pytest.mark.parametrize("left", [{}, {"host": "node-7", "pid": 12, "since": "2026-01-01 00:00:00 UTC"}])
async def test_where_the_file_system_cannot_lock_the_run_goes_on_and_says_who_may_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, left: dict[str, object]
) -> None:
    flock = fcntl.flock

    def unsupported(file: Any, operation: int) -> None:
        if str(getattr(file, "name", "")).startswith(str(tmp_path)):
            raise OSError(errno.ENOLCK, "No locks available")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", unsupported)
    (tmp_path / "run.lock").write_text(json.dumps(left) if left else "")
    assert await trained(tmp_path, 1) == [1]
    assert "cannot be locked: No locks available" in caplog.text
    assert ("process 12 on node-7, since 2026-01-01 00:00:00 UTC" in caplog.text) == bool(left)

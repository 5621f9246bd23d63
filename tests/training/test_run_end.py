"""END.json: how, why, and what to do next, whatever ended a run; and what its absence means."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from one_turn import OneTurn
from training.trainer_run import run, running

from arl.api.errors import CheckpointError, FailureBudgetError, RunFileError, ServerError, TransportError
from arl.api.fakes import ScriptedTrainEngine
from arl.api.settings.run import Config
from arl.training import run_result
from arl.training.metrics_log import RunLog
from arl.training.run_dir import RunLock, is_locked
from arl.training.run_result import OpenRun, RunEnd, disk_use, how_it_ended


def end_of(run_dir: Path) -> RunEnd:
    end = how_it_ended(run_dir)
    assert end is not None
    return end


async def test_a_run_that_is_done_says_so_with_its_numbers_and_the_same_call_that_nothing_was_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path, evaluate=True, evaluation={"every": 1}, log={"console": True}) as trainer:
        assert end_of(tmp_path).how == "running"
        assert not (tmp_path / "END.json").exists()
        async for _ in trainer:
            pass
    end = end_of(tmp_path)
    assert (end.how, end.why, end.version, end.steps) == ("finished", "all 4 steps are trained", 4, 4)
    assert end.what_next == "set steps above 4 to train further"
    assert end.totals["episodes_trained"] == 16
    assert end.evaluations["last"]["version"] == 4
    grown = {name: end.disk[name] for name in ("files", "logs")}  # END.json, and the line in console.log
    assert end.disk == {name: size for name, size in disk_use(tmp_path).items() if name in end.disk} | grown
    assert json.loads((tmp_path / "END.json").read_text())["checkpoint"] == end.checkpoint
    assert end.checkpoint == str(tmp_path / "checkpoints" / "version-00000004")
    said = capsys.readouterr().out
    assert "the run finished: 4 of 4 steps are trained, " in said
    assert f"{tmp_path} uses " in said
    await run(tmp_path)
    assert end_of(tmp_path).why == "there was nothing left to train: steps is 4, and 4 are trained"


async def test_a_finished_run_stays_one_if_a_later_start_is_refused(tmp_path: Path) -> None:
    await run(tmp_path)
    with pytest.raises(CheckpointError):
        await run(tmp_path, seed=5)
    end = end_of(tmp_path)
    assert (end.how, end.error, end.version) == ("finished", None, 4)
    assert end.process.startswith(f"process {os.getpid()}")
    with pytest.raises(CheckpointError):
        await run(tmp_path, seed=5, steps=5)
    assert end_of(tmp_path).how == "failed", "a step is missing"


async def test_an_error_of_arl_is_named_with_the_log_to_read_and_a_bug_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "server-0.log").write_text("a server's log")

    def fails(kind: type[Exception]) -> ScriptedTrainEngine:
        def train(_: object) -> None:
            raise kind("the sentence")

        return ScriptedTrainEngine(on_train=train)

    for kind, logs in ((ServerError, (str(tmp_path / "logs" / "server-0.log"),)), (ZeroDivisionError, ())):
        with pytest.raises(kind):
            await run(tmp_path, fails(kind))
        end = end_of(tmp_path)
        assert (end.how, end.error, end.why, end.logs) == ("failed", kind.__name__, "the sentence", logs)
        assert end.what_next.startswith("read " if logs else "once the cause is fixed, the same call starts over")
        assert ("raise kind" in end.traceback) == (kind is ZeroDivisionError)


async def test_a_users_error_behind_arls_is_there_with_its_traceback(tmp_path: Path) -> None:
    def always(_: int) -> dict[str, Any]:
        raise LookupError("the user's own")

    with pytest.raises(FailureBudgetError):
        await run(tmp_path, workflow=OneTurn(always), rollout={"episode_retries": 0})
    end = end_of(tmp_path)
    assert end.error == "FailureBudgetError"
    assert end.traceback.rstrip().endswith("LookupError: the user's own")
    assert end.logs == (str(tmp_path / "logs" / "episodes.log"),)


async def test_a_cancelled_task_was_interrupted(tmp_path: Path) -> None:
    task = asyncio.create_task(run(tmp_path, ScriptedTrainEngine(on_train=lambda _: task.cancel() and None)))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (end_of(tmp_path).how, end_of(tmp_path).why) == ("interrupted", "its task was cancelled")


async def test_a_full_disk_hides_no_error_and_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = Path.write_text

    def full(path: Path, text: str, *args: Any, **kwargs: Any) -> int:
        if not path.name.startswith("END"):
            return write(path, text, *args, **kwargs)
        write(path, text[:9])
        raise OSError(28, "No space left on device")

    def step(*_: object) -> None:
        raise RunFileError("metrics.jsonl cannot be written")

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(RunLog, "step", step)
    with pytest.raises(RunFileError, match=r"metrics\.jsonl cannot be written"):
        await run(tmp_path)
    assert "END.json, which says how the run ended, cannot be written: No space left on device" in caplog.text
    assert [name for name in os.listdir(tmp_path) if name.startswith("END")] == []


async def test_an_error_in_telling_the_end_does_not_hide_the_runs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arl.training.trainer.Trainer.summary", lambda _: {}["nothing"])
    with pytest.raises(TransportError, match="the sentence"):
        async with running(tmp_path):
            raise TransportError("the sentence")


def test_only_a_lock_that_was_not_released_tells_of_a_kill(tmp_path: Path) -> None:
    assert how_it_ended(tmp_path) is None
    lock = RunLock(tmp_path)
    lock.take()
    assert end_of(tmp_path).how == "running"
    lock.close()  # as the kernel does at a kill
    assert end_of(tmp_path).how == "killed"
    (tmp_path / "END.json").write_text('{"how": "finished", "why": "", "process": "an earlier one"}')
    assert end_of(tmp_path).how == "killed"
    (tmp_path / "END.json").write_text('{"how": "fini')
    lock.take()
    lock.release()
    assert how_it_ended(tmp_path) is None
    (tmp_path / "END.json").write_text('{"how": "finished", "why": "", "of_another_arl": 1}')
    assert end_of(tmp_path).how == "finished"


def test_a_disk_that_hangs_does_not_keep_a_process_that_must_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_free = threading.Event()
    monkeypatch.setattr(run_result, "_HARD_END_S", 0.01)
    monkeypatch.setattr(run_result, "newest_checkpoint", lambda _: is_free.wait())
    OpenRun(Config(model="none", run_dir=tmp_path)).stalled_now("nothing moved")
    assert how_it_ended(tmp_path) is None
    is_free.set()


def test_one_who_asks_how_it_ended_keeps_no_run_from_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks with a lock of its own, for a moment in which a run may try."""
    import fcntl

    tries, flock = count(), fcntl.flock

    def asked_just_now(file: Any, operation: int) -> None:
        if operation & fcntl.LOCK_EX and next(tries) == 0:
            raise BlockingIOError
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", asked_just_now)
    lock = RunLock(tmp_path)
    lock.take()
    assert is_locked(tmp_path / "run.lock")
    lock.release()


SCRIPT = """
import asyncio
from arl.api.settings.run import Config
from arl.run.script import run_script
from arl.training.run_result import OpenRun

class OwnConfig(Config):
    hub_token: str = ""

async def main(config):
    async with OpenRun(config):
        try:
            print("ready", flush=True)
            await asyncio.Event().wait()
        finally:
            print("saving", flush=True)
            await asyncio.sleep(config.seed)

run_script(main, OwnConfig)
"""


@pytest.mark.parametrize(
    ("signals", "flags", "code", "why"),
    [
        ([signal.SIGTERM], ["--seed", "0"], 143, "SIGTERM asked it to end"),
        ([signal.SIGUSR1], ["--seed", "60", "--checkpoint.notice_s", "0.1"], 138, "checkpoint.notice_s=0.1 of a sig"),
        ([signal.SIGTERM, signal.SIGINT], ["--seed", "60"], 130, "Ctrl-C ended it before it had saved"),
    ],
)
def test_a_signal_is_named_even_if_the_process_ends_before_it_has_saved(
    tmp_path: Path, signals: list[signal.Signals], flags: list[str], code: int, why: str
) -> None:
    script = tmp_path / "agent.py"
    script.write_text(SCRIPT)
    run_dir = tmp_path / "run"
    command = [sys.executable, str(script), "--model", "none", "--run_dir", str(run_dir), "--hub_token=secret", *flags]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path) as process:
        assert process.stdout is not None
        for number, line in zip(signals, ("ready\n", "saving\n"), strict=False):
            assert process.stdout.readline() == line
            process.send_signal(number)
        process.communicate(timeout=60)
    end = end_of(run_dir)
    assert process.returncode == code
    assert (end.how, end.signal, why in end.why) == ("interrupted", signals[0].name, True)
    assert f"agent.py --model none --run_dir {run_dir} --hub_token=... --seed" in end.what_next
    assert f"` in {tmp_path} starts over: there is no checkpoint" in end.what_next


async def test_a_script_that_leaves_its_loop_early_has_finished_and_can_be_continued(tmp_path: Path) -> None:
    async with running(tmp_path, steps=9) as trainer:
        await anext(trainer)
    end = end_of(tmp_path)
    assert (end.how, end.why) == ("finished", "its script ended it after 1 of 9 steps")
    assert end.what_next == f"the same call continues from {tmp_path}/checkpoints/version-00000001"

"""Saving runs beside training: a step does not wait for it, the end of a run does, and a failure ends the run."""

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from one_turn import OneTurn
from recovery.invariants import with_outcomes
from scripted_launch import small, use_fakes

import arl.run.launch
from arl.api.engine import Sampler
from arl.api.errors import CheckpointError, RunFileError, ServerError
from arl.api.fakes import ScriptedEngine, ScriptedTrainEngine
from arl.api.types import Example, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.training.checkpoints import Checkpoints
from arl.training.metrics_log import read_jsonl


@dataclass
class Written:
    """Written when the test's `act` on its version has returned."""

    call: Future[None]

    def wait(self) -> None:
        self.call.result()


class Engine(ScriptedTrainEngine):
    """Writes from the moment that it is saved, on a thread of its own."""

    def __init__(self, act: Callable[[int], Any], on_train: Callable[..., None] | None) -> None:
        super().__init__(on_train)
        self._act = act
        self._thread = ThreadPoolExecutor(1)

    def save(self, directory: Path) -> Written:
        return Written(self._thread.submit(self._write, directory, self.version))

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, directory: Path, version: int) -> None:
        self._act(version)
        directory.mkdir()
        (directory / "engine.json").write_text(json.dumps({"version": version}))


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """launch(act, steps=..., every=...): a run over fakes whose checkpoints are written by `act(version)`."""

    def start(
        act: Callable[[int], Any],
        *,
        steps: int = 6,
        shuffle: bool = True,
        workflow: RolloutWorkflow | None = None,
        on_train: Callable[..., None] | None = None,
        **when: Any,
    ) -> Any:
        use_fakes(monkeypatch, ScriptedEngine(lambda request: (7, 8, 9)), Engine(act, on_train))
        due = {"every": 1, **when}
        config = small(tmp_path / "run", steps=steps, checkpoint=due, rollout={"shuffle": shuffle})
        return arl.run.launch.launch(config, workflow=workflow or OneTurn(), dataset=[{"number": n} for n in range(40)])

    return start


def newest(tmp_path: Path) -> int | None:
    return Checkpoints(tmp_path / "run" / "checkpoints", 2, {}).newest_version()


async def test_save_returns_and_the_run_ends_when_their_checkpoint_is_on_the_disk(
    launch: Callable[..., Any], tmp_path: Path
):
    loop, is_writing, may_write = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def write(_: int) -> None:
        loop.call_soon_threadsafe(is_writing.set)
        may_write.wait(10)

    async with launch(write, steps=3, every=2) as trainer:
        await anext(trainer)
        saving = asyncio.create_task(trainer.save())
        await is_writing.wait()
        assert not saving.done()
        may_write.set()
        await saving
        assert newest(tmp_path) == 1
        _ = [step async for step in trainer]
    assert newest(tmp_path) == 3


async def test_a_checkpoint_that_fails_while_the_run_ends_is_what_the_run_ends_with(
    launch: Callable[..., Any], tmp_path: Path
):
    is_writing, may_fail = threading.Event(), threading.Event()

    def fail_when_told(version: int) -> None:
        if version == 2:
            is_writing.set()
            may_fail.wait(60)
        raise OSError(28, "No space left on device")

    async def run() -> None:
        async with launch(fail_when_told, steps=100, every=2) as trainer:
            async for _ in trainer:
                if is_writing.is_set():
                    task.cancel()
                    asyncio.get_running_loop().call_soon(may_fail.set)

    task = asyncio.create_task(run())
    with pytest.raises(CheckpointError, match="No space left"):
        await task
    assert newest(tmp_path) is None


async def test_an_error_that_ends_the_run_is_not_hidden_by_a_checkpoint_that_fails_then(
    launch: Callable[..., Any], caplog: pytest.LogCaptureFixture
):
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    async def run() -> None:
        async with launch(full, every=100) as trainer:
            await anext(trainer)
            raise ServerError("every server is gone")

    with pytest.raises(ServerError, match="every server is gone") as ended:
        await run()
    assert "No space left" in ended.value.__notes__[0]
    assert "No space left" in caplog.text


@pytest.mark.parametrize("is_room_again", [True, False])
async def test_no_checkpoint_is_written_without_the_rows_of_its_last_step(
    launch: Callable[..., Any], tmp_path: Path, is_room_again: bool
):
    path = tmp_path / "run" / "metrics.jsonl"

    async def run() -> None:
        async with launch(lambda _: None) as trainer:
            await anext(trainer)
            kept = path.rename(tmp_path / "kept")
            path.mkdir()
            try:
                await anext(trainer)
            finally:
                if is_room_again:
                    path.rmdir()
                    kept.rename(path)

    with pytest.raises(RunFileError, match=r"metrics\.jsonl cannot be written"):
        await run()
    assert newest(tmp_path) == 1 + is_room_again
    rows = read_jsonl(path) if is_room_again else read_jsonl(tmp_path / "kept")
    assert sorted({row["version"] for row in rows}) == [1, 2][: 1 + is_room_again]


async def test_a_step_whose_row_was_not_written_when_it_was_cancelled_has_one_in_the_end(
    launch: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with launch(lambda _: None, every=100, steps=3) as trainer:
        publish = trainer._publish

        async def cancelled() -> None:
            monkeypatch.setattr(trainer, "_publish", publish)
            await publish()
            raise asyncio.CancelledError

        monkeypatch.setattr(trainer, "_publish", cancelled)
        with pytest.raises(asyncio.CancelledError):
            await anext(trainer)
        assert [step.version async for step in trainer] == [2, 3]
    assert [row["version"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


async def test_a_step_does_not_wait_for_the_checkpoint_before_and_does_not_change_it(
    launch: Callable[..., Any], tmp_path: Path
):
    may_write = threading.Event()

    async with launch(lambda version: version != 2 or may_write.wait(60), every=2, steps=4) as trainer:
        while (await anext(trainer)).version < 3:  # 4 would wait for the checkpoint of 2
            pass
        assert newest(tmp_path) is None
        may_write.set()
    state = json.loads((tmp_path / "run/checkpoints/version-00000002/state.json").read_text())
    assert state["version"] == 2
    assert sum(marks.count("t") for marks in with_outcomes(state["rollout"]["ledger"])["outcomes"]) == 4


async def test_a_save_amid_training_is_of_the_batch_that_is_trained_and_the_run_goes_on(
    launch: Callable[..., Any], tmp_path: Path
):
    is_training, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def train_slowly(_: object) -> None:
        loop.call_soon_threadsafe(is_training.set)
        may_end.wait(10)

    async with launch(lambda _: None, every=100, steps=3, on_train=train_slowly) as trainer:
        step = asyncio.create_task(anext(trainer))
        await is_training.wait()
        saves = [asyncio.create_task(trainer.save()) for _ in range(2)]
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.gather(*saves)
        assert newest(tmp_path) == 1
        assert (await step).version == 1
        assert [step.version async for step in trainer] == [2, 3]


async def test_a_step_that_is_cancelled_while_its_checkpoint_is_begun_leaves_it_to_the_end(
    launch: Callable[..., Any], tmp_path: Path
):
    is_copying, may_copy = asyncio.Event(), threading.Event()
    loop, written = asyncio.get_running_loop(), list[int]()

    async with launch(written.append, every=2, steps=3) as trainer:
        begin = trainer.checkpoints.begin

        def begin_slowly(*state: Any) -> Any:
            loop.call_soon_threadsafe(is_copying.set)
            may_copy.wait(10)
            return begin(*state)

        trainer.checkpoints.begin = begin_slowly
        await anext(trainer)
        step = asyncio.create_task(anext(trainer))
        await is_copying.wait()
        step.cancel()
        may_copy.set()
        with pytest.raises(asyncio.CancelledError):
            await step
    assert (newest(tmp_path), written) == (2, [2])


@pytest.mark.parametrize("fails", [False, True])
async def test_the_end_of_a_run_saves_before_it_waits_for_episodes_that_do_not_heed_their_cancellation(
    launch: Callable[..., Any], tmp_path: Path, *, fails: bool
):
    may_end, has_saved = asyncio.Event(), asyncio.Event()

    class Deaf(OneTurn):
        async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
            while data["number"] >= 2 and not may_end.is_set():
                with suppress(asyncio.CancelledError):
                    await may_end.wait()
            return await super().arun_episode(engine, data)

    async def run() -> None:
        async with launch(lambda _: None, every=100, shuffle=False, workflow=Deaf(), steps=1) as trainer:
            save = trainer.save

            async def noted() -> None:
                await save()
                has_saved.set()

            trainer.save = noted
            async for _ in trainer:
                if fails:
                    raise ServerError("every server is gone")

    task = asyncio.create_task(run())
    try:
        await asyncio.wait_for(has_saved.wait(), 30)
        assert (newest(tmp_path), task.done()) == (1, False)
    finally:
        may_end.set()
        with pytest.raises(ServerError, match="every server is gone") if fails else nullcontext():
            await task


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("cancelled", ["copies", "writes"])
async def test_a_run_that_is_cancelled_while_its_end_saves_ends_once_it_has_saved(
    launch: Callable[..., Any], tmp_path: Path, cancelled: str, times: int
):
    """Cancelled by a signal, and by a task that fails after it."""
    reached, may_go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def wait_if(now: str) -> None:
        if now == cancelled:
            loop.call_soon_threadsafe(reached.set)
            may_go_on.wait(10)

    async def run() -> None:
        async with launch(lambda _: wait_if("writes"), every=100) as trainer:
            begin = trainer.checkpoints.begin
            trainer.checkpoints.begin = lambda *state: (wait_if("copies"), begin(*state))[1]
            await anext(trainer)

    task = asyncio.create_task(run())
    await reached.wait()
    for _ in range(times):
        task.cancel()
        for _ in range(9):  # it takes effect, and the run goes on saving
            await asyncio.sleep(0)
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert newest(tmp_path) == 1


async def test_a_run_with_a_full_default_executor_trains_saves_and_publishes_to_its_end(
    launch: Callable[..., Any], tmp_path: Path
):
    loop, may_end = asyncio.get_running_loop(), threading.Event()
    executor = ThreadPoolExecutor(1)
    loop.set_default_executor(executor)
    hung = [loop.run_in_executor(None, may_end.wait) for _ in range(2)]
    try:
        async with asyncio.timeout(60), launch(lambda _: None) as trainer:
            assert [step.version async for step in trainer] == [1, 2, 3, 4, 5, 6]
        assert (newest(tmp_path), trainer.inference_engine.version) == (6, 6)
    finally:
        may_end.set()
        await asyncio.gather(*hung)


async def test_checkpoints_come_by_time_unless_one_is_being_written(launch: Callable[..., Any]):
    is_writing, may_write, written = threading.Event(), threading.Event(), list[int]()

    def write(version: int) -> None:
        is_writing.set()
        may_write.wait(10)
        written.append(version)

    async with launch(write, every=None, every_s=1e-9, steps=5) as trainer:
        await anext(trainer)
        assert await asyncio.to_thread(is_writing.wait, 10)
        assert [(await anext(trainer)).version for _ in range(2)] == [2, 3]
        may_write.set()
        await trainer.save()
        _ = [step async for step in trainer]
    assert written[:2] == [1, 3]


async def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_the_one_before(
    launch: Callable[..., Any], tmp_path: Path
):
    def full_from_the_third_on(version: int) -> None:
        if version >= 3:
            raise OSError(28, "No space left on device")

    async def run() -> None:
        async with launch(full_from_the_third_on, steps=100) as trainer:
            _ = [step async for step in trainer]

    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint of version 3 .*No space left"):
        await run()
    assert newest(tmp_path) == 2
    async with launch(lambda _: None, steps=4) as trainer:
        assert trainer.version == 2
        assert [step.version async for step in trainer] == [3, 4]

"""Saving runs beside training: a step does not wait for it, the end of a run does, and a failure ends the run."""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from one_turn import OneTurn
from scripted_launch import small, use_fakes

import arl.assembly
from arl.api.errors import CheckpointError, ServerError
from arl.api.scripted import ScriptedEngine, ScriptedTrainEngine
from arl.training.checkpoint import Checkpoints


@dataclass
class Written:
    """Written when the test's `act` on its version has returned."""

    directory: Path
    version: int
    act: Callable[[int], Any]

    def wait(self) -> None:
        self.act(self.version)
        self.directory.mkdir()
        (self.directory / "engine.json").write_text(json.dumps({"version": self.version}))


class Engine(ScriptedTrainEngine):
    def __init__(self, act: Callable[[int], Any]) -> None:
        super().__init__()
        self._act = act

    def save(self, directory: Path) -> Written:
        return Written(directory, self.version, self._act)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """launch(act, steps=..., every=...): a run over fakes whose checkpoints are written by `act(version)`."""

    def start(act: Callable[[int], Any], *, steps: int = 6, every: int = 1) -> Any:
        use_fakes(monkeypatch, ScriptedEngine(lambda request: (7, 8, 9)), Engine(act))
        config = small(tmp_path / "run", steps=steps, checkpoint={"every": every})
        return arl.assembly.launch(config, workflow=OneTurn(), dataset=[{"number": n} for n in range(40)])

    return start


def newest(tmp_path: Path) -> int | None:
    return Checkpoints(tmp_path / "run" / "checkpoints", 2, {}).newest_version()


async def test_the_next_checkpoint_waits_for_the_one_before(launch: Callable[..., Any]):
    under_way, most = [0], [0]

    def count(_: int) -> None:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        threading.Event().wait(0.01)
        under_way[0] -= 1

    async with launch(count) as trainer:
        _ = [step async for step in trainer]
    assert most == [1]


async def test_save_returns_and_the_run_ends_when_their_checkpoint_is_on_the_disk(
    launch: Callable[..., Any], tmp_path: Path
):
    async with launch(lambda version: threading.Event().wait(0.05), steps=3, every=2) as trainer:
        await anext(trainer)
        await trainer.save()
        assert newest(tmp_path) == 1
        _ = [step async for step in trainer]
    assert newest(tmp_path) == 3


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
                    asyncio.get_running_loop().call_later(0.05, may_fail.set)

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
    assert sum(marks.count("t") for marks in state["rollout"]["ledger"]["outcomes"]) == 4

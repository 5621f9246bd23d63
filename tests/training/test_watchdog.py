"""The watchdog names what waits when nothing moves, and ends the run, or its process, where it is told to."""

import ast
import asyncio
import itertools
import logging
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from one_turn import OneTurn
from sources import trees
from training.trainer_run import running

from arl.api.engine import Sampler
from arl.api.errors import StalledError
from arl.api.fakes import ScriptedTrainEngine
from arl.api.types import Example, Trajectory
from arl.training import watchdog as watchdog_module
from arl.training.checkpoints import Checkpoints
from arl.training.run_result import how_it_ended
from arl.training.watchdog import _AT_REST, WAITS, Watchdog, waits


class Stuck(OneTurn):
    """Its later examples wait for what never comes."""

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        if data["number"] >= 8:
            await asyncio.Event().wait()
        return await super().arun_episode(engine, data)


async def test_a_run_in_which_nothing_moves_says_who_waits_for_what_and_ends_with_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time passes once all that can be trained is."""
    began, is_stuck = time.monotonic(), False
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() if is_stuck else began)
    monkeypatch.setattr(watchdog_module, "time", clock)
    monkeypatch.setattr("arl.training.watchdog._end_process", lambda still_s: None)  # a slow machine may need longer
    monkeypatch.setattr("arl.training.watchdog.WARN_AFTER_S", 0.2)
    settings = {"rollout": {"shuffle": False}, "stall_timeout_s": 0.5}

    async def run_of_nine_steps() -> None:
        nonlocal is_stuck
        async with running(tmp_path, workflow=Stuck(), steps=9, **settings) as trainer:
            async for step in trainer:
                is_stuck = step.version == 4

    with pytest.raises(StalledError, match=r"stall_timeout_s is 0\.5") as ended:
        await run_of_nine_steps()
    for said in (str(ended.value), caplog.text):
        assert "1 x a batch that may be taken; woken by a group that finishes or is released" in said
        assert "Stuck.arun_episode" in said
        assert "test_watchdog.py" in said
    assert Checkpoints(tmp_path / "checkpoints", 2, {}).newest_version() == 4
    end = how_it_ended(tmp_path)
    assert end is not None
    assert (end.how, end.error, end.version, end.why) == ("stalled", "StalledError", 4, str(ended.value))


async def test_a_run_whose_script_takes_its_time_between_two_steps_has_not_stalled(tmp_path: Path) -> None:
    during: list[object] = []
    engine = ScriptedTrainEngine(on_train=lambda _: during.append(trainer._progress()))
    async with running(tmp_path, engine, steps=2) as trainer:
        between = [trainer._progress() async for _ in trainer]
    assert between == [None, None]
    assert None not in during


async def test_a_save_between_two_steps_is_watched(tmp_path: Path) -> None:
    during: list[object] = []
    async with running(tmp_path, steps=1) as trainer:
        save = trainer.learner.save
        trainer.learner.save = lambda directory: (during.append(trainer._progress()), save(directory))[1]
        await anext(trainer)
        assert trainer._progress() is None
        await trainer.save()
    assert len(during) == 1
    assert during[0] is not None


async def test_a_save_and_an_export_during_a_step_wait_for_it_by_name(tmp_path: Path) -> None:
    async with running(tmp_path, steps=1) as trainer:
        async with trainer._training:
            asking = [asyncio.create_task(trainer.save()), asyncio.create_task(trainer.export(tmp_path / "model"))]
            await asyncio.sleep(0)
            said = waits(asking)
        await asyncio.gather(*asking)
    assert len(said) == 2
    assert all("the step in training" in line for line in said)


@pytest.mark.parametrize(("progress", "times"), [(None, 0), (1, 1)])
async def test_a_run_ends_once_and_only_while_it_is_asked_to_move(progress: object, times: int) -> None:
    ended: list[StalledError] = []
    watchdog = Watchdog(1e-9, lambda: progress, ended.append, str)
    for second in range(3):
        watchdog._now = float(second)
        watchdog._beat()
        await asyncio.sleep(0)
    assert len(ended) == times


async def test_a_blocked_loop_is_named_by_the_line_that_blocks_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog_module, "WARN_AFTER_S", 0.01)
    until = time.monotonic() + 20
    with Watchdog(None, lambda: None, lambda error: None, str).watching(), caplog.at_level(logging.ERROR):
        while not caplog.messages and time.monotonic() < until:
            time.sleep(0.001)  # noqa: ASYNC251 - it is what blocks
    assert "the event loop has been blocked for" in caplog.text
    assert "time.sleep(0.001)" in caplog.text


def test_a_process_that_cannot_end_its_run_is_ended_and_end_json_says_so(tmp_path: Path) -> None:
    script = """
import asyncio, sys, time
from arl.api.settings.run import Config
from arl.training.run_result import OpenRun
from arl.training.watchdog import Watchdog
async def main():
    async with OpenRun(Config(model="none", run_dir=sys.argv[1])) as held:
        with Watchdog(0.1, lambda: 1, lambda error: None, str, held.stalled_now).watching():
            time.sleep(60)
asyncio.run(main())
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 1
    assert "its process ends now" in ended.stderr
    end = how_it_ended(tmp_path)
    assert end is not None
    assert end.how == "stalled"
    assert end.why.endswith("the run could not end itself")
    assert end.what_next == "the same call starts over: there is no checkpoint"


async def test_a_process_that_was_stopped_for_long_has_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on meanwhile, by an hour between two looks here."""
    ended, looks, enough = list[StalledError](), list[None](), asyncio.Event()

    def progress() -> str:
        looks.append(None)
        if len(looks) == 9:
            enough.set()
        return "still"

    clock = SimpleNamespace(monotonic=partial(next, itertools.count(0.0, 3600.0)))
    monkeypatch.setattr(watchdog_module, "time", clock)
    monkeypatch.setattr(watchdog_module, "_TICKS", 60_000)
    with Watchdog(60.0, progress, ended.append, str).watching():
        await enough.wait()
    assert ended == []


def test_each_wait_is_of_a_coroutine_that_exists() -> None:
    bodies = [tree.body for tree in trees().values()]
    functions = {node.name for body in bodies for node in body if isinstance(node, ast.AsyncFunctionDef)}
    classes = [node for body in bodies for node in body if isinstance(node, ast.ClassDef)]
    methods = {f"{c.name}.{m.name}" for c in classes for m in c.body if isinstance(m, ast.AsyncFunctionDef)}
    assert (WAITS.keys() | _AT_REST) - functions - methods == set()

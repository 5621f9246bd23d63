"""A life of a small training, for a nursery to fork. Only the two engines are fakes."""

import asyncio
import faulthandler
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub._snapshot_download  # noqa: F401 (lives that are forked find it loaded)
import pytest
from one_turn import OneTurn
from scripted_launch import small, use_fakes

import arl.run.launch
from arl.api.engine import Sampler
from arl.api.fakes import ScriptedEngine, ScriptedTrainEngine
from arl.api.images import Image, PlacedImage
from arl.api.settings.run import Config
from arl.api.train_engine import TrainSequence
from arl.api.types import Example, ModelRequest, Trajectory
from arl.api.workflow import Task

NUM_EXAMPLES, GROUP_SIZE, BATCH_SIZE = 17, 2, 2


class Remembering(ScriptedTrainEngine):
    """Its weights are the numbers of the new groups of each batch it was trained on. It saves during training."""

    def __init__(self) -> None:
        super().__init__(on_train=self._remember)
        self._seen: list[list[int]] = []

    def _remember(self, minibatches: Sequence[Sequence[TrainSequence]]) -> None:
        time.sleep(0.003)
        numbers = [int(s.token_ids[1]) for minibatch in minibatches for s in minibatch][: GROUP_SIZE * BATCH_SIZE]
        self._seen.append(sorted(numbers)[::GROUP_SIZE])

    def save(self, directory: Path) -> "Writing":
        return Writing(directory, json.dumps({"version": self.version, "seen": self._seen}))

    def load(self, directory: Path) -> None:
        super().load(directory)
        self._seen = json.loads((directory / "engine.json").read_text())["seen"]


class Writing:
    """Writes in two halves, on a thread of its own, which starts at once."""

    def __init__(self, directory: Path, content: str) -> None:
        self._done: Future[None] = Future()
        threading.Thread(target=self._write, args=(directory, content)).start()

    def _write(self, directory: Path, content: str) -> None:
        try:
            directory.mkdir()
            with (directory / "engine.json").open("w") as file:
                file.write(content[:20])
                file.flush()
                time.sleep(0.005)
                file.write(content[20:])
            self._done.set_result(None)
        except OSError as error:
            self._done.set_exception(error)

    def wait(self) -> None:
        self._done.result()


IMAGES = [Image.kept(b"\x89PNG" + bytes([number]) * 100, 4, 2) for number in range(2)]


def seen_of(number: int) -> tuple[PlacedImage, ...]:
    """What an episode of the example of this number sees."""
    return (PlacedImage(image=IMAGES[number % 2], start=0, stop=1),)


class Moody(OneTurn):
    """Shows one of two images. Rejects example 5 and fails on example 3."""

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory | None:
        trajectory = await super().arun_episode(engine, data)
        if data["number"] == 3:
            raise RuntimeError("always fails")
        return None if data["number"] == 5 else replace(trajectory, images=seen_of(data["number"]))


def slow_engine() -> ScriptedEngine:
    latency = random.Random()

    async def answer(_: ModelRequest) -> Sequence[int]:
        await asyncio.sleep(latency.expovariate(200))
        return 7, 8, 9

    return ScriptedEngine(answer)


def config(run_dir: Path, steps: int) -> Config:
    rollout = {
        "batch_size": BATCH_SIZE,
        "group_size": GROUP_SIZE,
        "max_staleness": 4,
        "max_concurrent_episodes": 4,
        "episode_retries": 0,
        "max_failure_rate": 1.0,
        "replay_groups": 2,
    }
    others = {"checkpoint": {"every": 2}}
    return small(run_dir, steps=steps, rollout=rollout, weights={"directory": run_dir.parent / "weights"}, **others)


SIZES = {"long": 17, "short": 5}
WEIGHTS = {"long": 2.0, "short": 1.0}
FIRST_NUMBER = {"long": 0, "short": 100}
"""In a run of two tasks, the numbers of a task's examples begin here."""


async def live(run_dir: Path, steps: int, *, has_tasks: bool) -> None:
    use_fakes(pytest.MonkeyPatch(), slow_engine(), Remembering())
    workflow = Moody()

    def rows(first: int, size: int) -> list[Example]:
        return [{"number": first + n} for n in range(size)]

    given: dict[str, Any] = {"workflow": workflow, "dataset": rows(0, NUM_EXAMPLES)}
    if has_tasks:
        given = {
            "tasks": [
                Task(name=name, workflow=workflow, dataset=rows(FIRST_NUMBER[name], size), weight=WEIGHTS[name])
                for name, size in SIZES.items()
            ]
        }
    async with arl.run.launch.launch(config(run_dir, steps), **given) as trainer:
        async for _ in trainer:
            pass


def killing_at(operation: int, run_dir: str) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that kills the process just before its operation number `operation` on a file of the run."""
    changes = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")
    counted = iter(range(operation))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in changes and str(arguments[0]).startswith(run_dir) and next(counted, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def main(run_dir: str, steps: int, killed_at: int | None, *, has_tasks: bool = False) -> None:
    """killed_at: the file operation before which the life ends."""
    faulthandler.enable()
    logging.disable(logging.ERROR)  # of episodes that fail on purpose
    if killed_at is not None:
        sys.addaudithook(killing_at(killed_at, run_dir))
    asyncio.run(live(Path(run_dir), steps, has_tasks=has_tasks))

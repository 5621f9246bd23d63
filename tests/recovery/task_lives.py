"""A life of a small training of two tasks, for a nursery to fork: as in lives.py."""

import asyncio
import logging
import sys
from pathlib import Path

import pytest
from recovery.lives import Moody, Remembering, config, killing_at, slow_engine
from scripted_launch import use_fakes

import arl.run.launch
from arl.api.workflow import Task

SIZES = {"long": 17, "short": 5}
WEIGHTS = {"long": 2.0, "short": 1.0}
FIRST_NUMBER = {"long": 0, "short": 100}
"""The numbers of a task's examples begin here."""


def tasks() -> list[Task]:
    examples = {name: [{"number": FIRST_NUMBER[name] + n} for n in range(size)] for name, size in SIZES.items()}
    workflow = Moody()
    return [Task(name=name, workflow=workflow, dataset=examples[name], weight=WEIGHTS[name]) for name in SIZES]


async def live(run_dir: Path, steps: int) -> None:
    use_fakes(pytest.MonkeyPatch(), slow_engine(), Remembering())
    async with arl.run.launch.launch(config(run_dir, steps), tasks=tasks()) as trainer:
        async for _ in trainer:
            pass


def main(run_dir: str, steps: int, killed_at: int | None) -> None:
    """killed_at: the file operation before which the life ends."""
    logging.disable(logging.ERROR)  # of episodes that fail on purpose
    if killed_at is not None:
        sys.addaudithook(killing_at(killed_at, run_dir))
    asyncio.run(live(Path(run_dir), steps))

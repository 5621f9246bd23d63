"""Runs one after another in a process: finished, interrupted and failed ones leave nothing behind."""

import asyncio
import gc
import logging
import os
import re
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from scripted_launch import use_fakes
from transformers import AttentionInterface

import arl
from arl.api.fakes import ScriptedEngine
from arl.engine.tiny import tiny_tokenizer, write_tiny_model
from arl.training.trainer import Trainer


class Agent(arl.RolloutWorkflow):
    """Answers, or ends its run in the 12th episode."""

    def __init__(self, how: str) -> None:
        self.tokenizer = tiny_tokenizer()
        self.how = how
        self.num_episodes = 0
        self.task: asyncio.Task[Any] | None = None

    async def arun_episode(self, engine: arl.Sampler, data: arl.Example) -> list[arl.Trajectory]:
        self.num_episodes += 1
        if self.how == "failed" and self.num_episodes >= 12:
            raise ZeroDivisionError
        if self.how == "interrupted" and self.num_episodes == 12:
            assert self.task is not None
            self.task.cancel()
        chat = arl.Conversation(self.tokenizer, [{"role": "user", "content": "Say a number"}])
        await chat.agenerate(engine, arl.SamplingParams(max_new_tokens=4))
        return chat.trajectories(self.num_episodes % 2)


async def train(how: str, model: Path, run_dir: Path) -> None:
    steps = 2 if how == "finished" else 1000
    agent, sizes = Agent(how), {"steps": steps, "batch_size": 2, "group_size": 2}
    config = arl.Config(model=str(model), log={"console": False})
    agent.task = asyncio.create_task(
        arl.atrain(workflow=agent, dataset=[{}] * 20, eval_dataset=[{}], run_dir=run_dir, config=config, **sizes)
    )
    error = {"failed": arl.ArlError, "interrupted": asyncio.CancelledError}.get(how)
    if error is None:
        await agent.task
        return
    with pytest.raises(error):
        await agent.task


def processes() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


def trainers() -> set[object]:
    return {one for one in gc.get_objects() if type(one) is Trainer}


@pytest.fixture
def others_are_frozen() -> None:
    """What the garbage collector need not look at each time."""
    gc.collect()
    gc.freeze()


def what_is_there(before: set[object]) -> dict[str, object]:
    """Of what a run opens, starts, registers or holds in this process. before: what is of other tests."""
    files = (os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    return {
        "threads": Counter(thread.name for thread in threading.enumerate() if thread not in before),
        "processes": [process for process in processes() if process not in before],
        # matplotlib itself keeps up to 64 fonts open.
        "files": Counter(re.sub(r"\d+", "N", file) for file in files if not file.endswith(".ttf")),
        "tasks": len(asyncio.all_tasks()),
        "handlers of logs": sum(len(getattr(logger, "handlers", ())) for logger in loggers),
        "handlers of signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "trainers": len(trainers()),
        "attention functions": sorted(AttentionInterface().valid_keys()),
        "a process group": dist.is_initialized(),
        "shared memory": [name for name in os.listdir("/dev/shm") if f"-{os.getpid()}-" in name],
    }


async def what_stays(before: set[object]) -> dict[str, object]:
    """What is there once it no longer changes: the event loop closes async generators, which hold more, one by one."""
    earlier = list[dict[str, object]]()
    while len(earlier) < 3 or earlier[-3:] != [earlier[-1]] * 3:
        gc.collect()
        await asyncio.sleep(0.02)
        earlier.append(what_is_there(before))
    return earlier[-1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("are_real", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["fakes", "processes"])
async def test_the_fourth_run_leaves_what_the_second_left(
    others_are_frozen: None, are_real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's keep records, with their frames
    model = write_tiny_model(tmp_path / "model")
    if not are_real:
        use_fakes(monkeypatch, lambda: ScriptedEngine(lambda request: tiny_tokenizer().encode("1234")))
    before = {*threading.enumerate(), *processes()}
    found = list[dict[str, object]]()
    for number, how in enumerate(["finished", "interrupted", "failed", "finished"]):
        await train(how, model, tmp_path / f"{number}")
        found.append(await what_stays(before))
    assert found[3] == found[1]
    assert found[1]["trainers"] == 0
    assert found[1]["processes"] == found[1]["shared memory"] == []

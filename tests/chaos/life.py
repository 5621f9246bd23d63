"""One life of a small but real training, for the campaign to start again and again; and one of its servers."""

import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import arl.engine.client.server_processes
import arl.engine.fsdp.train_engine
import arl.engine.local.__main__
import arl.engine.local.app
import arl.engine.local.model_thread
import arl.run.engines
import arl.run.launch
import arl.training.watchdog
from arl.api.engine import Sampler
from arl.api.settings.run import Config
from arl.api.train_engine import Saving, TokenLoss, TrainSequence
from arl.api.types import Example, ModelRequest, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.rewards import RewardPool
from arl.run.learner import host_learner
from arl.run.script import run_script
from arl.sandbox import BubblewrapSandbox
from arl.training.learner_process import LearnerHost

NUM_EXAMPLES = 23
SEEN = "seen.json"


def remembering(*args: Any, **kwargs: Any) -> LearnerHost:
    """In the trainer's process: host_learner's learner, which remembers."""
    arl.engine.fsdp.train_engine.FSDPTrainEngine = Remembering
    return host_learner(*args, **kwargs)


class Remembering(FSDPTrainEngine):
    """Its checkpoints say which examples its weights were trained on, batch by batch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._seen: list[list[int]] = []

    def train_batch(self, minibatches: Sequence[Sequence[TrainSequence]], loss: TokenLoss) -> dict[str, float]:
        metrics = super().train_batch(minibatches, loss)
        self._seen.append(sorted({int(s.token_ids[1]) for minibatch in minibatches for s in minibatch}))
        return metrics

    def save(self, directory: Path) -> "Saving":  # type: ignore[override]
        return _WithMemory(super().save(directory), directory / SEEN, json.dumps(self._seen))

    def load(self, directory: Path) -> None:
        super().load(directory)
        self._seen = json.loads((directory / SEEN).read_text())


@dataclass(frozen=True)
class _WithMemory:
    saving: Saving
    file: Path
    seen: str

    def wait(self) -> None:
        self.saving.wait()
        self.file.write_text(self.seen)


class TwoTurns(RolloutWorkflow):
    """Asks twice. A worker process computes the reward, and some episodes run a program in the sandbox."""

    def __init__(self, *, has_workers: bool) -> None:
        self._reward = RewardPool(statistics.fmean, workers=1, timeout_s=5) if has_workers else None
        self._sandbox = BubblewrapSandbox() if has_workers else None
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> "TwoTurns":
        for shared in (self._reward, self._sandbox):
            if shared is not None:
                await self._opened.enter_async_context(shared)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._opened.aclose()

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        ids, mask, logprobs, versions = [1, data["number"]], [0, 0], [0.0, 0.0], [-1, -1]
        for separator in (7, 8):
            ids, mask, logprobs, versions = [*ids, separator], [*mask, 0], [*logprobs, 0.0], [*versions, -1]
            sampling = SamplingParams(max_new_tokens=5, temperature=1.0, ignore_eos=True)
            answer = await engine.agenerate(ModelRequest(input_ids=tuple(ids), sampling=sampling))
            ids += answer.output_ids
            mask += [1] * len(answer.output_ids)
            logprobs += answer.output_logprobs
            versions += answer.output_versions
        return Trajectory(
            token_ids=tuple(ids),
            loss_mask=tuple(mask),
            behavior_logprobs=tuple(logprobs),
            versions=tuple(versions),
            reward=await self._score([float(token % 2) for token in ids]),
        )

    async def _score(self, numbers: Sequence[float]) -> float:
        if self._sandbox is not None and numbers[-1]:
            outcome = await self._sandbox.run("print(1)")
            assert outcome.stdout == "1\n", outcome
        return await self._reward(numbers) if self._reward is not None else statistics.fmean(numbers)


def train(config: str, *, has_workers: bool, weather: str | None, seed: str) -> None:
    """A script's last line. weather: jumping_clock, slow_files, or none."""

    async def main(settings: Config) -> None:
        workflow = TwoTurns(has_workers=has_workers)
        examples = [{"number": n} for n in range(NUM_EXAMPLES)]
        async with arl.run.launch.launch(settings, workflow=workflow, dataset=examples) as trainer:
            async for step in trainer:
                sys.stdout.write(f"trained {step.version}\n")
                sys.stdout.flush()

    arl.run.engines.host_learner = remembering
    arl.engine.client.server_processes._MAX_RESTARTS = 10
    arl.training.watchdog.WARN_AFTER_S = 45.0
    if weather is not None:
        {"jumping_clock": jumping_clock, "slow_files": slow_files}[weather](random.Random(seed))
    run_script(main, Config, ["--config", config])


def jumping_clock(rng: random.Random) -> None:
    """The wall clock jumps by up to a day, back or forth, about every fourth time that it is read."""
    read, offset = time.time, 0.0

    def jumping() -> float:
        nonlocal offset
        if rng.random() < 0.25:
            offset = rng.uniform(-86_400, 86_400)
        return read() + offset

    time.time = jumping
    time.time_ns = lambda: int(1e9 * jumping())


def slow_files(rng: random.Random) -> None:
    """Operations on files take some 10 ms, and some of them a second."""
    changes, sync = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"), os.fsync

    def delay() -> None:
        time.sleep(1.0 if rng.random() < 0.01 else rng.expovariate(100))

    def slow_sync(descriptor: int) -> None:
        delay()
        sync(descriptor)

    os.fsync = slow_sync
    run_dir = f"{os.sep}run{os.sep}"
    sys.addaudithook(lambda event, arguments: delay() if event in changes and run_dir in str(arguments[0]) else None)


def serve(flags: Sequence[str]) -> None:
    """An embedded server, as its own program is."""
    status = arl.engine.local.__main__.main(list(flags))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def relay(**arguments: Any) -> None:
    from faulty_proxy import FaultyProxy

    asyncio.run(FaultyProxy(**arguments).run())

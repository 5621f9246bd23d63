"""The control plane alone: thousands of scripted episodes on one event loop, without a model.

    python benchmarks/control_plane.py --episodes 2000 --turns 4
    python benchmarks/control_plane.py --episodes 10000 --turn-s 2 --trainer process
    python benchmarks/control_plane.py --episodes 512 --turn-s 0.05 --work-ms 2 --workers 2
    python benchmarks/control_plane.py --episodes 4000 --turn-s 0.5 --servers 100

Runs the real controller, buffer, ledger and trajectories; only the engine is played: each call sleeps for a while and
answers with `--tokens` tokens. Prints the event loop's lag, which every request and every episode would feel, and how
many calls were answered, after the time that two episodes take.
--workers runs the workflow in processes (rollout.num_workers), and --work-ms lets it compute after each answer, as
templates, tools and rewards do. With --servers the engine is arl's own: it asks so many servers of benchmarks/fleet.py
over HTTP, which answer after --turn-s. The last column is the CPU time of this process for a call.
With --trainer, a tiny model trains on 128 short sequences again and again meanwhile, in a process of its own or on a
thread of this one. Episodes are idle with a --turn-s longer than the run.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from fleet import fakes
from rich.console import Console
from rich.table import Table

from arl.api.engine import InferenceEngine, Sampler
from arl.api.settings.engines import ClientConfig
from arl.api.settings.run import Config, RolloutConfig
from arl.api.types import Example, Group, ModelRequest, ModelResponse, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.rollout.buffer import ReplayBuffer
from arl.rollout.controller import RolloutController
from arl.rollout.episode import EpisodeRunner
from arl.rollout.monitors import LagMonitor
from arl.rollout.workers.pool import EpisodeWorkers
from arl.run.learner import host_learner, load_learner
from arl.runtime.http.server import allow_many_connections
from arl.runtime.threads import TrainThread
from arl.training.learner_process import RemoteLearner

GROUP_SIZE, BATCH_SIZE = 8, 32


@dataclass(frozen=True)
class Load:
    """episodes: at once. turn_s: the mean time of a turn, exponentially distributed. tokens: of each turn. examples: of
    the dataset. trainer: process, thread or none. workers: rollout.num_workers. work_ms: CPU of the workflow for a
    turn."""

    episodes: int
    turns: int
    tokens: int
    turn_s: float
    seconds: float
    examples: int
    trainer: str
    workers: int
    work_ms: float
    servers: int = 0
    """Ask these, in the place of a played engine."""


class Conversation(RolloutWorkflow):
    """Asks `turns` times, appending to one transcript."""

    def __init__(self, turns: int, tokens: int, work_s: float) -> None:
        self._turns = turns
        self._work_s = work_s
        self._sampling = SamplingParams(max_new_tokens=tokens)

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        ids, mask, logprobs, versions = [1] * 32, [0] * 32, [0.0] * 32, [-1] * 32
        for _ in range(self._turns):
            answer = await engine.agenerate(ModelRequest(input_ids=tuple(ids), sampling=self._sampling))
            ids += answer.output_ids
            mask += [1] * len(answer.output_ids)
            logprobs += answer.output_logprobs
            versions += answer.output_versions
            until = time.thread_time() + self._work_s
            while time.thread_time() < until:
                pass
        return Trajectory(
            token_ids=tuple(ids),
            loss_mask=tuple(mask),
            behavior_logprobs=tuple(logprobs),
            versions=tuple(versions),
            reward=random.random(),
        )


class PlayedEngine:
    """Answers each call after a while, with the version of its beginning."""

    def __init__(self, load: Load) -> None:
        self.version = self.num_calls = 0
        self._rate = 1 / load.turn_s
        self._tokens = load.tokens

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        version, tokens = self.version, self._tokens
        await asyncio.sleep(random.expovariate(self._rate))
        self.num_calls += 1
        return ModelResponse(
            output_ids=(5,) * tokens,
            output_logprobs=(-0.5,) * tokens,
            output_versions=(version,) * tokens,
            stop_reason="length",
        )


class CountingEngine:
    """Counts the calls of an engine, and gives its answers a version that counts batches, as if each were published."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.version = self.num_calls = 0
        self._engine = engine

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        version = self.version
        answer = await self._engine.agenerate(request)
        self.num_calls += 1
        return replace(answer, output_versions=(version,) * len(answer.output_ids))


@asynccontextmanager
async def engine_of(load: Load) -> AsyncGenerator[PlayedEngine | CountingEngine]:
    if not load.servers:
        yield PlayedEngine(load)
        return
    allow_many_connections()
    with fakes(load.servers, load.turn_s) as addresses:
        async with RemoteInferenceEngine(addresses, ClientConfig()) as engine:
            yield CountingEngine(engine)


def training_groups() -> list[Group]:
    """128 sequences of 20 tokens."""
    rng = random.Random(0)
    ids = [[rng.randrange(3, 250) for _ in range(20)] for _ in range(128)]
    told = {"loss_mask": (0,) * 12 + (1,) * 8, "behavior_logprobs": (0.0,) * 12 + (-5.0,) * 8}
    made = [
        Trajectory(token_ids=tuple(row), versions=(-1,) * 12 + (0,) * 8, reward=rng.random(), **told) for row in ids
    ]
    return [
        Group(group_id=i, example_id=(0, i), stamp=0, trajectories=tuple(made[16 * i : 16 * i + 16]),
              episode_indices=tuple(range(16)))
        for i in range(8)
    ]  # fmt: skip


@asynccontextmanager
async def training(kind: str) -> AsyncGenerator[list[float]]:
    """Train steps within the block; gives the seconds that each took."""
    took: list[float] = []
    if kind == "none":
        yield took
        return
    with tempfile.TemporaryDirectory() as directory:
        shape = TinyShape(hidden_size=64, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16)
        model = write_tiny_model(Path(directory) / "model", [], shape)
        settings = {"model": str(model), "run_dir": directory, "algorithm": {"minibatches": 1}}
        config = Config.model_validate(settings)
        is_apart = kind == "process"
        log = Path(directory) / "trainer.log"
        learner = RemoteLearner(partial(host_learner, config), log, 1) if is_apart else load_learner(config)
        thread, groups = TrainThread(), training_groups()

        def step() -> float:
            began = time.monotonic()
            learner.train(learner.prepare(groups))  # pyright: ignore[reportArgumentType] (its own batch)
            return time.monotonic() - began

        async def train() -> None:
            while True:
                took.append(await thread(step))

        await thread(step)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(train())
            try:
                yield took
            finally:
                task.cancel()
        learner.close()
        thread.close()


@dataclass
class Figures:
    """calls: answered. trained: episodes taken. cpu_s: of this process. lags: sorted. steps: the seconds of training
    steps."""

    calls: int
    trained: int
    seconds: float
    cpu_s: float
    lags: list[float]
    steps: list[float]


async def run_episodes(load: Load, engine: PlayedEngine | CountingEngine) -> Figures:
    """Take batches for `load.seconds`, once as much time has passed as two episodes take."""
    staleness = 4 * -(-load.episodes // (GROUP_SIZE * BATCH_SIZE))  # room enough: the cap on episodes is what binds
    config = RolloutConfig(
        batch_size=BATCH_SIZE,
        group_size=GROUP_SIZE,
        max_staleness=staleness,
        max_concurrent_episodes=max(load.episodes, 1),
    )
    buffer = ReplayBuffer(BATCH_SIZE, staleness)
    dataset: list[Example] = [{"question": i} for i in range(load.examples)]
    workflow: RolloutWorkflow = Conversation(load.turns, load.tokens, load.work_ms / 1000)
    if load.workers:
        workflow = EpisodeWorkers(workflow, load.workers, Path(tempfile.gettempdir()) / "control-plane")
    runner = EpisodeRunner(workflow=workflow, timeout_s=config.episode_timeout_s, retries=config.episode_retries)
    controller = RolloutController(engine, runner, dataset, config, buffer)
    controller.ledger.prepare()
    lag = LagMonitor("the benchmark", period_s=0.005, keep=1_000_000)
    trained = 0

    async def take_batches() -> None:
        nonlocal trained
        while True:
            batch = await buffer.take_batch(engine.version)
            controller.trained(batch)
            trained += sum(group.num_episodes for group in batch)
            engine.version += 1
            await buffer.published(engine.version)

    async with workflow, training(load.trainer) as took, asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(lag.run())]
        if load.episodes:
            background.append(tasks.create_task(controller.run()))
        background.append(tasks.create_task(take_batches()))
        await asyncio.sleep(min(load.seconds, 1 + 2 * load.turns * load.turn_s))
        lag.recent_s.clear()
        took.clear()
        began, cpu_began, calls_began, trained_began = time.monotonic(), time.process_time(), engine.num_calls, trained
        await asyncio.sleep(load.seconds)
        seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu_began
        calls, trained = engine.num_calls - calls_began, trained - trained_began
        for task in background:
            task.cancel()
    return Figures(calls, trained, seconds, cpu_s, sorted(lag.recent_s), took)


async def figures_of(load: Load) -> Figures:
    async with engine_of(load) as engine:
        return await run_episodes(load, engine)


def main() -> None:
    parser = argparse.ArgumentParser(description="Event-loop lag and throughput of arl's control plane.")
    parser.add_argument("--episodes", type=int, default=2000, help="episodes running at once")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="sampled in each turn")
    parser.add_argument("--turn-s", type=float, default=0.5, help="mean seconds of a turn")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long to run")
    parser.add_argument("--examples", type=int, default=10_000, help="in the dataset")
    parser.add_argument("--trainer", choices=("none", "thread", "process"), default="none")
    parser.add_argument("--workers", type=int, default=0, help="rollout.num_workers")
    parser.add_argument("--work-ms", type=float, default=0.0, help="CPU of the workflow's own code for a turn")
    parser.add_argument("--servers", type=int, default=0, help="servers that are asked over HTTP; 0: a played engine")
    load = Load(**vars(parser.parse_args()))
    found = asyncio.run(figures_of(load))
    trained, seconds, lags = found.trained, found.seconds, found.lags
    table = Table(title=f"{load.episodes} concurrent episodes of {load.turns} turns, {load.tokens} tokens each")
    for column in (
        "episodes/s",
        "calls/s",
        "lag p50 (ms)",
        "lag p99 (ms)",
        "lag max (ms)",
        "training step (ms)",
        "CPU/call (µs)",
    ):
        table.add_column(column, justify="right")
    table.add_row(
        f"{trained / seconds:,.0f}",
        f"{found.calls / seconds:,.0f}",
        *(f"{1000 * lag:.1f}" for lag in (lags[len(lags) // 2], lags[int(len(lags) * 0.99)], lags[-1])),
        f"{1000 * median(found.steps):.1f}" if found.steps else "",
        f"{1e6 * found.cpu_s / max(1, found.calls):,.0f}",
    )
    Console().print(table)


if __name__ == "__main__":
    main()

"""The control plane alone: thousands of scripted episodes on one event loop, without a model.

    python benchmarks/control_plane.py --episodes 2000 --turns 4

Runs the real controller, buffer, ledger and trajectories; only the engine is scripted: each turn sleeps for a while and
answers with `--tokens` tokens. Prints the event loop's lag, which every request and every episode would feel.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from arl.api.config import RolloutConfig
from arl.api.engine import DiskWeights, Sampler
from arl.api.scripted import ScriptedEngine
from arl.api.types import Example, ModelRequest, ModelResponse, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.rollout.buffer import ReplayBuffer
from arl.rollout.controller import RolloutController
from arl.rollout.episode import EpisodeRunner
from arl.rollout.watches import LagMonitor

GROUP_SIZE, BATCH_SIZE = 8, 32


@dataclass(frozen=True)
class Load:
    """episodes: at once. turn_s: the mean time of a turn, exponentially distributed. tokens: of each turn. examples: of
    the dataset."""

    episodes: int
    turns: int
    tokens: int
    turn_s: float
    seconds: float
    examples: int


class Conversation(RolloutWorkflow):
    """Asks `turns` times, appending to one transcript."""

    def __init__(self, turns: int, tokens: int) -> None:
        self._turns = turns
        self._sampling = SamplingParams(max_new_tokens=tokens)

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        ids, mask, logprobs, versions = [1] * 32, [0] * 32, [0.0] * 32, [-1] * 32
        for _ in range(self._turns):
            answer = await engine.agenerate(ModelRequest(input_ids=tuple(ids), sampling=self._sampling))
            ids += answer.output_ids
            mask += [1] * len(answer.output_ids)
            logprobs += answer.output_logprobs
            versions += answer.output_versions
        return Trajectory(
            token_ids=tuple(ids),
            loss_mask=tuple(mask),
            behavior_logprobs=tuple(logprobs),
            versions=tuple(versions),
            reward=random.random(),
        )


def scripted_engine(load: Load) -> ScriptedEngine:
    async def script(request: ModelRequest) -> ModelResponse:
        version = engine.version
        await asyncio.sleep(random.expovariate(1 / load.turn_s))
        return ModelResponse(
            output_ids=(5,) * load.tokens,
            output_logprobs=(-0.5,) * load.tokens,
            output_versions=(version,) * load.tokens,
            stop_reason="length",
        )

    engine = ScriptedEngine(script)
    return engine


async def run_episodes(load: Load) -> tuple[int, float, list[float]]:
    """Train for `load.seconds` on a trainer that only takes. Returns episodes trained, seconds, and lags."""
    engine = scripted_engine(load)
    staleness = 2 * -(-load.episodes // (GROUP_SIZE * BATCH_SIZE))  # room enough: the cap on episodes is what binds
    config = RolloutConfig(
        batch_size=BATCH_SIZE,
        group_size=GROUP_SIZE,
        max_staleness=staleness,
        max_concurrent_episodes=load.episodes,
    )
    buffer = ReplayBuffer(BATCH_SIZE, staleness)
    dataset: list[Example] = [{"question": i} for i in range(load.examples)]
    workflow = Conversation(load.turns, load.tokens)
    runner = EpisodeRunner(workflow=workflow, timeout_s=config.episode_timeout_s, retries=config.episode_retries)
    controller = RolloutController(engine, runner, dataset, config, buffer)
    controller.ledger.prepare()
    lag = LagMonitor("the benchmark", period_s=0.005, keep=1_000_000)
    began, trained, version = time.monotonic(), 0, 0
    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(controller.run()), tasks.create_task(lag.run())]
        while time.monotonic() - began < load.seconds:
            batch = await buffer.take_batch(version)
            controller.trained(batch)
            version += 1
            trained += sum(group.num_episodes for group in batch)
            await engine.update_weights(DiskWeights(version=version, directory=Path("/nowhere")))
            await buffer.published(version)
        seconds = time.monotonic() - began
        for task in background:
            task.cancel()
    return trained, seconds, sorted(lag.recent_s)


def main() -> None:
    parser = argparse.ArgumentParser(description="Event-loop lag and throughput of arl's control plane.")
    parser.add_argument("--episodes", type=int, default=2000, help="episodes running at once")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="sampled in each turn")
    parser.add_argument("--turn-s", type=float, default=0.5, help="mean seconds of a turn")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long to run")
    parser.add_argument("--examples", type=int, default=10_000, help="in the dataset")
    load = Load(**vars(parser.parse_args()))
    trained, seconds, lags = asyncio.run(run_episodes(load))
    table = Table(title=f"{load.episodes} concurrent episodes of {load.turns} turns, {load.tokens} tokens each")
    for column in ("episodes/s", "turns/s", "lag p50 (ms)", "lag p99 (ms)", "lag max (ms)"):
        table.add_column(column, justify="right")
    table.add_row(
        f"{trained / seconds:,.0f}",
        f"{load.turns * trained / seconds:,.0f}",
        *(f"{1000 * lag:.1f}" for lag in (lags[len(lags) // 2], lags[int(len(lags) * 0.99)], lags[-1])),
    )
    Console().print(table)


if __name__ == "__main__":
    main()

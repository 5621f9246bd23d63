"""A trainer over the official fakes, built on a run directory as `launch` would build it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from one_turn import OneTurn

from arl.api.config import Config
from arl.api.engine import DiskWeights, InferenceEngine, TrainEngine, UpdateStats, WeightUpdate
from arl.api.scripted import ScriptedEngine, ScriptedTrainEngine
from arl.api.types import StepStats
from arl.rollout.buffer import Replay, ReplayBuffer
from arl.rollout.controller import RolloutController
from arl.rollout.episode import EpisodeRunner
from arl.training.checkpoint import Checkpoints
from arl.training.learner import Learner, TrainThread
from arl.training.metrics import Evaluator, RunTotals
from arl.training.run_files import RunLog
from arl.training.trainer import Trainer

EXAMPLES = [{"number": n} for n in range(64)]


class DirectTransport:
    """Hands versions over without weights.

    held: the version whose delivery waits for `may_deliver`. before_delivery: awaited before each, to wait or fail.
    """

    def __init__(
        self, before_delivery: Callable[[WeightUpdate], Awaitable[None]] | None = None, *, held: int | None = None
    ) -> None:
        self._before_delivery = before_delivery
        self._held = held
        self.is_held, self.may_deliver = asyncio.Event(), asyncio.Event()
        self.delivered: list[int] = []
        self.discarded: list[int] = []

    def snapshot(self, engine: TrainEngine) -> WeightUpdate:
        return DiskWeights(version=engine.version, directory=Path("/none"))

    async def deliver(self, update: WeightUpdate, engine: InferenceEngine) -> UpdateStats:
        if self._before_delivery:
            await self._before_delivery(update)
        if update.version == self._held:
            self.is_held.set()
            await self.may_deliver.wait()
        self.delivered.append(update.version)
        return await engine.update_weights(update)

    def discard(self, update: WeightUpdate) -> None:
        self.discarded.append(update.version)

    def close(self) -> None: ...


@asynccontextmanager
async def running(
    run_dir: Path,
    train_engine: ScriptedTrainEngine | None = None,
    transport: DirectTransport | None = None,
    *,
    evaluate: bool = False,
    engine: ScriptedEngine | None = None,
    **settings: Any,
) -> AsyncGenerator[Trainer]:
    """A trainer over fakes on `run_dir`, resumed from there, as `launch` would build it."""
    rollout_settings = {"batch_size": 2, "group_size": 2, "max_staleness": 2, **settings.pop("rollout", {})}
    config = Config.model_validate(
        {"model": "none", "steps": 4, "rollout": rollout_settings, "log": {"console": False}, **settings}
    )
    engine = engine or ScriptedEngine(lambda request: (7, 8, 9))
    train_engine = train_engine or ScriptedTrainEngine()
    checkpoints = Checkpoints(run_dir / "checkpoints", config.checkpoint.keep, {})
    state = checkpoints.load_newest(train_engine.load)
    buffer = ReplayBuffer(config.rollout.batch_size, config.rollout.max_staleness, version=train_engine.version)
    runner = EpisodeRunner(workflow=OneTurn(), timeout_s=10.0, retries=config.rollout.episode_retries)
    rollout = RolloutController(engine, runner, EXAMPLES, config.rollout, buffer)
    if state:
        rollout.load_state_dict(state.values["rollout"], state.groups)
    log, thread = RunLog(run_dir, config.log), TrainThread()
    log.resume(train_engine.version)
    evaluator = Evaluator(engine, runner, EXAMPLES[:4], config.evaluation)
    wanted = config.rollout
    replay = Replay(wanted.replay_groups, min_reward=wanted.replay_min_reward, max_staleness=wanted.max_staleness)
    if state:
        replay.add(state.replay, train_engine.version)
    trainer = Trainer(
        config=config,
        learner=Learner(train_engine, config.algorithm),
        inference_engine=engine,
        transport=transport or DirectTransport(),
        buffer=buffer,
        rollout=rollout,
        evaluator=evaluator if evaluate else None,
        checkpoints=checkpoints,
        log=log,
        thread=thread,
        replay=replay,
        totals=RunTotals(**state.values["totals"]) if state else RunTotals(),
    )
    try:
        async with trainer.running():
            yield trainer
    finally:
        thread.close()


def trained_examples(engine: ScriptedTrainEngine) -> list[list[int]]:
    """The example of each sequence, batch by batch."""
    return [[int(s.token_ids[1]) for minibatch in batch for s in minibatch] for batch in engine.batches]


async def run(run_dir: Path, *arguments: Any, **settings: Any) -> list[StepStats]:
    """The steps of a whole run of such a trainer."""
    async with running(run_dir, *arguments, **settings) as trainer:
        return [step async for step in trainer]

"""`launch` over the official fakes, with a transport that tests can hold up."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from one_turn import OneTurn
from scripted_launch import small, use_fakes

import arl.run.launch
from arl.api.engine import DiskWeights, InferenceEngine, UpdateStats, WeightUpdate
from arl.api.fakes import ScriptedEngine, ScriptedTrainEngine
from arl.api.tracking import Tracker
from arl.api.train_engine import WeightSource
from arl.api.types import StepStats
from arl.api.workflow import Curriculum, RolloutWorkflow
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

    def snapshot(self, engine: WeightSource) -> WeightUpdate:
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
    workflow: RolloutWorkflow | None = None,
    curriculum: Curriculum | None = None,
    trackers: Sequence[Tracker] = (),
    load: Callable[..., ScriptedTrainEngine] | None = None,
    **settings: Any,
) -> AsyncGenerator[Trainer]:
    """What `launch` gives on `run_dir`, over fakes. A reward says which example it was.

    load: makes a train engine whenever a trainer's process would start.
    """
    config = small(run_dir, **{"steps": 4, **settings})
    with pytest.MonkeyPatch.context() as patch:
        use_fakes(patch, engine or ScriptedEngine(lambda request: (7, 8, 9)), train_engine, load)
        patch.setattr(arl.run.launch, "weight_transport", lambda *_: transport or DirectTransport())
        patch.setattr(arl.run.launch, "decoder", lambda model: None)
        given = {"dataset": EXAMPLES, "eval_dataset": EXAMPLES[:4] if evaluate else None, "curriculum": curriculum}
        async with arl.run.launch.launch(config, workflow=workflow or OneTurn(), trackers=trackers, **given) as trainer:
            yield trainer


def trained_examples(engine: ScriptedTrainEngine) -> list[list[int]]:
    """The example of each sequence, batch by batch."""
    return [[int(s.token_ids[1]) for minibatch in batch for s in minibatch] for batch in engine.batches]


async def run(run_dir: Path, *arguments: Any, **settings: Any) -> list[StepStats]:
    """The steps of a whole run of such a trainer."""
    async with running(run_dir, *arguments, **settings) as trainer:
        return [step async for step in trainer]

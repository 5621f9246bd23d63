"""Killed at any moment and run again: what was trained is trained once, what was not is run again."""

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from players import TwoTurns, engine_with_latency, examples, serve
from virtual_time import run_in_virtual_time

from arl.api import Example, InferenceEngine, Trajectory
from arl.api.config import RolloutConfig
from arl.buffer import ReplayBuffer
from arl.ledger import ExampleId, Outcome
from arl.rollout import RolloutController

CONFIG = RolloutConfig(
    batch_size=2, group_size=2, max_staleness=2, max_failure_rate=1.0, episode_retries=0, drop_stragglers_after_s=8.0
)
NUM_EXAMPLES, VERSIONS = 11, 25


class Mixed(TwoTurns):
    """Some examples are rejected, some fail, some take long."""

    async def arun_episode(self, engine: InferenceEngine, data: Example) -> Trajectory | None:
        trajectory = await super().arun_episode(engine, data)
        if data["number"] == 3:
            raise RuntimeError("always fails")
        if data["number"] == 4:
            await asyncio.sleep(50)
        return None if data["number"] == 5 else trajectory


@dataclass
class Disk:
    """What outlives the process: the newest checkpoint, with the examples its weights were trained on."""

    version: int = 0
    rollout: dict[str, Any] | None = None
    weights: list[ExampleId] = field(default_factory=list)


async def live(disk: Disk, seed: int, killed_at_s: float) -> RolloutController:
    """Train from the newest checkpoint, saving every third version, until done or killed."""
    engine = engine_with_latency(seed)
    await serve(engine, disk.version)
    buffer = ReplayBuffer(CONFIG.batch_size, CONFIG.max_staleness, version=disk.version)
    controller = RolloutController(engine, Mixed(), examples(NUM_EXAMPLES), CONFIG, buffer, seed=7)
    if disk.rollout:
        controller.load_state_dict(json.loads(json.dumps(disk.rollout)))
    weights = list(disk.weights)
    try:
        async with asyncio.timeout(killed_at_s), asyncio.TaskGroup() as tasks:
            rollout = tasks.create_task(controller.run())
            for version in range(disk.version, VERSIONS):
                batch = await buffer.take_batch(version)
                await asyncio.sleep(1)
                weights += [group.example_id for group in batch]
                controller.trained(batch)
                if version % 3 == 2 or version == VERSIONS - 1:
                    saved = (version + 1, controller.state_dict(), list(weights))
                    await asyncio.sleep(1)
                    disk.version, disk.rollout, disk.weights = saved
                await serve(engine, version + 1)
                await buffer.published(version + 1)
            rollout.cancel()
    except TimeoutError:
        pass
    return controller


@given(st.integers(0, 2**32), st.lists(st.floats(0.5, 40), max_size=6))
@settings(max_examples=25, deadline=None)
def test_every_example_ends_exactly_once_however_often_the_run_is_killed(seed: int, kills: list[float]) -> None:
    disk, seeds = Disk(), random.Random(seed)
    for killed_at_s in [*kills, 10**6]:
        controller = run_in_virtual_time(live(disk, seeds.randrange(2**32), killed_at_s))
    assert disk.version == VERSIONS
    assert len(disk.weights) == len(set(disk.weights)) == VERSIONS * CONFIG.batch_size
    ledger = controller.ledger
    for epoch in range(ledger.epoch):
        outcomes = ledger.outcomes(epoch)
        pending = [index for e, index in ledger.pending if e == epoch]
        assert sorted(pending + [i for ended in outcomes.values() for i in ended]) == list(range(NUM_EXAMPLES))
        assert outcomes[Outcome.TRAINED] == sorted(i for e, i in disk.weights if e == epoch)
        assert set(outcomes[Outcome.REJECTED]) <= {5}

"""Killed at any moment and run again: what was trained is trained once, what was not is run again."""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from players import Scripted, TwoTurns, as_json, controlled, engine_with_latency, examples, runner_of, serve, train
from records import trajectory
from virtual_time import run_in_virtual_time

from arl.api.engine import Sampler
from arl.api.events import Fate, TokensCounted
from arl.api.settings.run import RolloutConfig
from arl.api.types import Example, Group, Trajectory
from arl.rollout.buffer import Replay, ReplayBuffer
from arl.rollout.controller import RolloutController
from arl.rollout.ledger import ExampleId, GroupOutcome

CONFIG = RolloutConfig(
    batch_size=2, group_size=2, max_staleness=2, max_failure_rate=1.0, episode_retries=0, drop_stragglers_after_s=8.0
)
NUM_EXAMPLES, VERSIONS = 11, 25
lives = st.tuples(st.floats(0.5, 40), st.integers(1, 3), st.integers(0, 3))
"""Seconds until the kill, and batch_size and max_staleness until then."""


class Mixed(TwoTurns):
    """Some examples are rejected, some fail, some take long."""

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory | None:
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
    groups: list[Group] = field(default_factory=list)
    weights: list[ExampleId] = field(default_factory=list)
    replay: tuple[Group, ...] = ()
    received: int = 0
    """Tokens, by all lives."""


async def live(disk: Disk, seed: int, killed_at_s: float, config: RolloutConfig) -> RolloutController:
    """Train from the newest checkpoint, saving every third version, until done or killed."""
    engine = engine_with_latency(seed)
    await serve(engine, disk.version)
    buffer = ReplayBuffer(config.batch_size, config.max_staleness, version=disk.version)
    controller = RolloutController(engine, runner_of(Mixed(), config), examples(NUM_EXAMPLES), config, buffer, seed=7)
    if disk.rollout:
        controller.load_state_dict(as_json(disk.rollout), disk.groups)
    tokens = controller.tokens
    tokens.note_undone(TokensCounted(received=disk.received))
    weights = list(disk.weights)
    replay = Replay(config.replay_groups, min_reward=-1.0, max_staleness=config.max_staleness)
    replay.add(disk.replay, disk.version)
    try:
        async with asyncio.timeout(killed_at_s), asyncio.TaskGroup() as tasks:
            rollout = tasks.create_task(controller.run())
            for version in range(disk.version, VERSIONS):
                batch = await buffer.take_batch(version)
                for group in [*batch, *replay.take(version)]:
                    assert version - group.oldest_version <= config.max_staleness
                    assert group.example_id in weights or group in batch
                await asyncio.sleep(1)
                weights += [group.example_id for group in batch]
                controller.trained(batch)
                replay.add(batch, version + 1)
                if version % 3 == 2 or version == VERSIONS - 1:
                    saved = (
                        version + 1,
                        controller.state_dict(),
                        buffer.untrained(version + 1),
                        list(weights),
                        replay.groups,
                    )
                    tasks.create_task(write(disk, *saved))
                await serve(engine, version + 1)
                await buffer.published(version + 1)
            rollout.cancel()
    except TimeoutError:
        pass
    assert tokens.received == disk.received + engine.num_sampled, "each answer is counted, once"
    settled = sum(tally.tokens for tally in tokens.counted().fates.values())
    assert tokens.received == tokens.num_open + tokens.num_waiting + settled
    disk.received = tokens.received
    return controller


async def write(disk: Disk, *saved: Any) -> None:
    """Beside the next steps, which change nothing of it."""
    await asyncio.sleep(1.5)
    disk.version, disk.rollout, disk.groups, disk.weights, disk.replay = saved


@pytest.mark.parametrize("sizes_change", [False, True])
@given(
    seed=st.integers(0, 2**32),
    kills=st.lists(lives, max_size=5),
    extra_episodes=st.sampled_from([0, 2]),
    replay_groups=st.sampled_from([0, 2]),
)
@settings(max_examples=20, deadline=None)
def test_every_example_ends_exactly_once_however_often_the_run_is_killed(
    sizes_change: bool, seed: int, kills: list[tuple[float, int, int]], extra_episodes: int, replay_groups: int
) -> None:
    """The weights were trained on what the ledger says, and each example of an epoch has one outcome or is pending."""
    disk, seeds = Disk(), random.Random(seed)
    for killed_at_s, batch_size, max_staleness in [*kills, (10**6, 2, 1 if replay_groups else 0)]:
        sizes = {"batch_size": batch_size, "max_staleness": max_staleness} if sizes_change else {}
        config = CONFIG.model_copy(update={"extra_episodes": extra_episodes, "replay_groups": replay_groups, **sizes})
        controller = run_in_virtual_time(live(disk, seeds.randrange(2**32), killed_at_s, config))
        assert sizes_change or controller.counters()["groups_returned"] == 0
    assert disk.version == VERSIONS
    assert sizes_change or len(disk.weights) == VERSIONS * CONFIG.batch_size
    assert len(disk.weights) == len(set(disk.weights))
    assert controller.tokens.counted().fates[Fate.TRAINED].tokens == 2 * 3 * controller.counters()["episodes_trained"]
    ledger = controller.ledger
    for epoch in range(ledger.epoch):
        outcomes = ledger.outcomes(epoch)
        pending = [index for e, index, *_ in ledger.state_dict()["pending"] if e == epoch]
        assert sorted(pending + [i for ended in outcomes.values() for i in ended]) == list(range(NUM_EXAMPLES))
        assert outcomes[GroupOutcome.TRAINED] == sorted(i for e, i in disk.weights if e == epoch)
        assert set(outcomes[GroupOutcome.REJECTED]) <= {5}


def test_examples_run_again_whose_finished_groups_are_too_old_under_changed_settings() -> None:
    async def first() -> tuple[dict[str, Any], list[Group]]:
        controller, buffer, _ = controlled(Scripted(lambda _: trajectory((0,))), 40, batch_size=2, max_staleness=2)
        rollout = asyncio.create_task(controller.run())
        await asyncio.sleep(1000)
        controller.trained(await buffer.take_batch(0))
        saved = controller.state_dict(), buffer.untrained(1)
        rollout.cancel()
        return saved

    state, waiting = run_in_virtual_time(first())
    config = RolloutConfig(batch_size=2, group_size=2, max_staleness=0)
    buffer = ReplayBuffer(2, 0, version=1)
    controller = RolloutController(engine_with_latency(), runner_of(TwoTurns(), config), examples(40), config, buffer)
    controller.load_state_dict(as_json(state), waiting)
    assert controller.counters()["groups_returned"] == len(waiting) == 4
    assert [controller.ledger.issue().example_id for _ in waiting] == [group.example_id for group in waiting]


def test_groups_that_waited_in_a_checkpoint_are_trained_and_do_not_run_again() -> None:
    settings = {"batch_size": 2, "max_staleness": 2}
    before, after = set[int](), set[int]()

    def noting(ran: set[int]) -> Scripted:
        return Scripted(lambda number: ran.add(number) or trajectory((999,)))

    async def first() -> tuple[dict[str, Any], list[Group]]:
        """Until six groups have finished, of which one batch is trained, and one taken and not trained."""
        controller, buffer, _ = controlled(noting(before), 40, **settings)
        rollout = asyncio.create_task(controller.run())
        await asyncio.sleep(1000)
        controller.trained(await buffer.take_batch(0))
        taken = await buffer.take_batch(1)
        saved = controller.state_dict(), buffer.untrained(1)
        assert saved[1][:2] == taken
        rollout.cancel()
        return saved

    async def second(state: dict[str, Any], groups: list[Group]) -> list[list[Group]]:
        engine, buffer = engine_with_latency(), ReplayBuffer(**settings, version=1)
        await serve(engine, 1)
        config = RolloutConfig(group_size=2, **settings)
        controller = RolloutController(engine, runner_of(noting(after), config), examples(40), config, buffer)
        controller.load_state_dict(as_json(state), groups)
        return await train(controller, buffer, engine, range(1, 4))

    state, waiting = run_in_virtual_time(first())
    batches = run_in_virtual_time(second(state, waiting))
    assert len(waiting) == 4
    assert batches[0] + batches[1] == waiting
    assert after
    assert not before & after

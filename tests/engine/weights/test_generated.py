"""What servers say that they generated lies between what responses brought and what was asked for."""

import asyncio
import random

import pytest
from embedded_server import ServerProcess
from published import client, request

from arl.api.engine import Sampler
from arl.api.events import Fate
from arl.api.settings.engines import PauseMode
from arl.api.settings.run import RolloutConfig
from arl.api.types import Example, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.rollout.buffer import ReplayBuffer
from arl.rollout.controller import RolloutController
from arl.rollout.episode import EpisodeRunner


async def told(engine: RemoteInferenceEngine) -> float:
    """What servers say, since the first call. One that a busy machine has put out of service says nothing."""
    while not engine.counters()["servers/serving"]:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.05)
    await engine.pause()
    await engine.resume()
    return engine.counters()["servers/generated_tokens"]


class Talk(RolloutWorkflow):
    """Says 5 to 100 tokens; about every fifth example, 700."""

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        asked = request(data["tokens"] + random.randrange(30))
        answer = await engine.agenerate(asked)
        blank = [0] * len(asked.input_ids)
        return Trajectory(
            token_ids=[*asked.input_ids, *answer.output_ids],
            loss_mask=[*blank, *[1] * len(answer.output_ids)],
            behavior_logprobs=[*blank, *answer.output_logprobs],
            versions=[-1 for _ in blank] + [*answer.output_versions],
            reward=random.random(),
        )


@pytest.mark.parametrize("mode", ["abort", "in_place"])
async def test_servers_generate_what_a_run_received_and_at_most_what_it_asked_for(
    first: ServerProcess, mode: PauseMode
):
    """Over-sampled episodes are cut while their requests run."""
    config = RolloutConfig(
        batch_size=2, group_size=2, extra_episodes=2, max_staleness=7, max_concurrent_episodes=12, shuffle=False
    )
    examples = [{"tokens": 700 if n % 5 == 4 else 5 + 7 * n % 90} for n in range(64)]
    async with asyncio.timeout(60), client(first, pause_mode=mode) as engine:
        await told(engine)
        buffer, runner = ReplayBuffer(2, 7), EpisodeRunner(workflow=Talk(), timeout_s=60)
        controller = RolloutController(engine, runner, examples, config, buffer)
        rollout = asyncio.create_task(controller.run())
        for version in range(4):
            controller.trained(await buffer.take_batch(version))
            await told(engine)
        rollout.cancel()
        await asyncio.wait([rollout])
        generated, counted = await told(engine), runner.tokens.counted()
    assert counted.received == counted.open + counted.waiting + sum(tally.tokens for tally in counted.fates.values())
    assert counted.fates.keys() >= {Fate.OVERTAKEN, Fate.TRAINED}
    assert counted.unanswered > 0
    assert counted.received <= generated <= counted.asked == counted.received + counted.unreceived

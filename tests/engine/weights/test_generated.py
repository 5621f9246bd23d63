"""What servers say that they generated is what responses brought, and what the client counts as unreceived."""

import asyncio
import random

import pytest
from embedded_server import ServerProcess
from published import client, request

from arl.api.config import RolloutConfig
from arl.api.engine import Sampler
from arl.api.engine_config import PauseMode
from arl.api.token_records import Fate
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


@pytest.mark.parametrize("takes_frames", [True, False])
async def test_every_token_is_counted_however_its_request_ends(first: ServerProcess, takes_frames: bool):
    """Requests are cancelled, also between two parts of their responses, and run out of time."""
    chance = random.Random(1)
    async with client(first, pause_mode="abort", request_timeout_s=1.0) as engine:
        for server in engine._pool.servers:
            server.client.takes_frames = takes_frames
        assert await told(engine) == 0
        calls = [
            asyncio.create_task(engine.agenerate(request(chance.choice((5, 50, 600)), seed))) for seed in range(40)
        ]
        for call in calls[::2]:
            await asyncio.sleep(0.03 * chance.random())
            call.cancel()
            if chance.random() < 0.2:
                await told(engine)
        ended = await asyncio.gather(*calls, return_exceptions=True)
        await engine.unreceived.settled(20.0)
        answered = sum(len(one.output_ids) for one in ended if not isinstance(one, BaseException))
        assert await told(engine) == answered + engine.unreceived.tokens.total()
        assert engine.unreceived.tokens["cancelled"] > 0
        assert (engine.unreceived.num_in_flight, engine.unreceived.lost_requests) == (0, 0)


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
async def test_the_ledger_of_a_run_has_all_that_servers_generated_also_if_one_is_killed(
    second: ServerProcess, mode: PauseMode
):
    """But for what running requests of the killed one had: they are counted, and their tokens are not known."""
    config = RolloutConfig(
        batch_size=2, group_size=2, extra_episodes=2, max_staleness=7, max_concurrent_episodes=12, shuffle=False
    )
    examples = [{"tokens": 700 if n % 5 == 4 else 5 + 7 * n % 90} for n in range(64)]
    async with asyncio.timeout(60), client(second, pause_mode=mode, max_retries=20) as engine:
        await told(engine)
        buffer, runner = ReplayBuffer(2, 7), EpisodeRunner(workflow=Talk(), timeout_s=60)
        tokens, engine.unreceived = runner.tokens, runner.tokens.unreceived
        controller = RolloutController(engine, runner, examples, config, buffer)
        rollout = asyncio.create_task(controller.run())
        for version in range(4):
            controller.trained(await buffer.take_batch(version))
            if version == 1:
                await engine.pause()
                await asyncio.to_thread(second.kill)
                await asyncio.to_thread(second.start)
                await engine.resume()
                await told(engine)
        rollout.cancel()
        await asyncio.wait([rollout])
        await tokens.unreceived.settled(20.0)
        unknown, counted = await told(engine) - tokens.generated, tokens.counted()
        fences = engine.counters()["servers/fences"]
    assert counted.generated == counted.received + sum(counted.unreceived.values())
    assert counted.received == counted.open + counted.waiting + sum(tally.tokens for tally in counted.fates.values())
    assert counted.unreceived["cancelled"] > 0
    assert counted.fates.keys() >= {Fate.OVERTAKEN, Fate.TRAINED}
    assert 0 <= unknown <= 730 * counted.lost_requests
    # Mode abort has no requests under way at the kill. Each fence, also one that only a busy machine causes, loses what
    # ran there.
    assert counted.lost_requests <= 12 * fences

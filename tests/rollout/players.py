"""Who plays in the flow's tests: deterministic engines, small workflows, and a trainer that trains nothing."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from virtual_time import run_in_virtual_time

from arl.api.engine import DiskWeights, Sampler
from arl.api.fakes import ScriptedEngine
from arl.api.grammar import Grammar
from arl.api.images import Image, PlacedImage
from arl.api.settings.run import RolloutConfig
from arl.api.types import Example, Group, ModelRequest, ModelResponse, SamplingParams, Trajectory
from arl.api.workflow import Curriculum, RolloutWorkflow
from arl.rollout.buffer import ReplayBuffer
from arl.rollout.controller import RolloutController
from arl.rollout.episode import EpisodeRunner
from arl.rollout.group import GroupRules
from arl.rollout.ledger import ExampleLedger


def examples(n: int) -> list[Example]:
    return [{"number": i} for i in range(n)]


def as_json(state: Any) -> Any:
    """What a checkpoint's file makes of a state."""
    return json.loads(json.dumps(state, default=lambda value: value()))


class CountingEngine(ScriptedEngine):
    """Knows how many tokens it has said."""

    num_sampled = 0

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        response = await super().agenerate(request)
        self.num_sampled += len(response.output_ids)
        return response


def engine_with_latency(seed: int = 0, mean_s: float = 1.0) -> CountingEngine:
    """Its tokens depend on the prompt and the version alone; its latency is random."""
    latency = random.Random(seed)

    async def script(request: ModelRequest) -> ModelResponse:
        version = engine.version
        await asyncio.sleep(latency.expovariate(1 / mean_s))
        output_ids = tuple((7 * sum(request.input_ids) + 3 * version + i) % 101 for i in range(3))
        return ModelResponse(
            output_ids=output_ids,
            output_logprobs=tuple(-0.01 * token for token in output_ids),
            output_versions=(version,) * 3,
            stop_reason="stop",
        )

    engine = CountingEngine(script)
    return engine


class TwoTurns(RolloutWorkflow):
    """Asks twice and is rewarded by what came back."""

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory | None:
        prompt = (data["number"] + 1, 5)
        ids, mask, logprobs, versions = prompt, (0, 0), (0.0, 0.0), (-1, -1)
        for _ in range(2):
            answer = await engine.agenerate(ModelRequest(input_ids=ids, sampling=SamplingParams(max_new_tokens=3)))
            n = len(answer.output_ids)
            ids, mask = ids + answer.output_ids, mask + (1,) * n
            logprobs, versions = logprobs + answer.output_logprobs, versions + answer.output_versions
        return Trajectory(
            token_ids=ids, loss_mask=mask, behavior_logprobs=logprobs, versions=versions, reward=float(sum(ids) % 5)
        )


class InLetters(RolloutWorkflow):
    """Asks once, under a grammar."""

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        prompt = (data["number"] + 1, 5)
        sampling = SamplingParams(max_new_tokens=3, grammar=Grammar(kind="regex", text="[a-z]+"))
        answer = await engine.agenerate(ModelRequest(input_ids=prompt, sampling=sampling, routes_from=1, role="writer"))
        assert answer.kept_ids is not None
        return Trajectory(
            token_ids=(*prompt, *answer.output_ids),
            loss_mask=(0, 0, 1, 1, 1),
            behavior_logprobs=(0.0, 0.0, *answer.output_logprobs),
            versions=(-1, -1, *answer.output_versions),
            reward=float(sum(answer.output_ids) % 5),
            kept_ids=answer.kept_ids.joined([2, answer.kept_ids]),
            routes=answer.routes,
        )


class Sees(RolloutWorkflow):
    """Sees a new image before each of two turns; the file of the example's first image is long."""

    def __init__(self, num_bytes: int = 1000) -> None:
        self._num_bytes = num_bytes

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        tokens, mask, logprobs, versions = [data["number"] + 1], [0], [0.0], [-1]
        images = list[PlacedImage]()
        for turn, size in enumerate((self._num_bytes, 10)):
            image = Image.kept(bytes([data["number"], turn]) * size, 4, 2)
            images.append(PlacedImage(image=image, start=len(tokens), stop=len(tokens) + 2))
            request = ModelRequest(
                input_ids=(*tokens, 98, 98), images=tuple(images), sampling=SamplingParams(max_new_tokens=3)
            )
            answer = await engine.agenerate(request)
            n = len(answer.output_ids)
            tokens += [98, 98, *answer.output_ids]
            mask += [0, 0] + [1] * n
            logprobs += [0.0, 0.0, *answer.output_logprobs]
            versions += [-1, -1, *answer.output_versions]
        return Trajectory(
            token_ids=tokens, loss_mask=mask, behavior_logprobs=logprobs, versions=versions, images=tuple(images),
            reward=float(sum(tokens) % 5),
        )  # fmt: skip


class Moody(TwoTurns):
    """Fails or rejects some episodes, by what the model said alone."""

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory | None:
        trajectory = await super().arun_episode(engine, data)
        if trajectory is None or trajectory.reward == 1:
            return None
        if trajectory.reward == 2:
            raise RuntimeError("stumbled")
        return trajectory


class Scripted(RolloutWorkflow):
    """Does what the example's `number` tells it to, by a function of it; see each test."""

    def __init__(self, act: object) -> None:
        self._act = act

    async def arun_episode(self, engine: Sampler, data: Example) -> object:
        result = self._act(data["number"])
        return await result if asyncio.iscoroutine(result) else result


async def serve(engine: ScriptedEngine, version: int) -> None:
    await engine.update_weights(DiskWeights(version=version, directory=Path("/nowhere")))


async def train(
    controller: RolloutController,
    buffer: ReplayBuffer,
    engine: ScriptedEngine,
    versions: Sequence[int],
    train_s: float = 0.0,
) -> list[list[Group]]:
    """Run the controller and a trainer that takes a batch for each version, until it has them all."""
    batches: list[list[Group]] = []
    async with asyncio.TaskGroup() as tasks:
        rollout = tasks.create_task(controller.run())
        for version in versions:
            batch = await buffer.take_batch(version)
            await asyncio.sleep(train_s)
            controller.trained(batch)
            batches.append(batch)
            await serve(engine, version + 1)
            await buffer.published(version + 1)
        rollout.cancel()
    return batches


def runner_of(workflow: RolloutWorkflow, config: RolloutConfig) -> EpisodeRunner:
    return EpisodeRunner(workflow=workflow, timeout_s=config.episode_timeout_s, retries=config.episode_retries)


def controlled(
    workflow: RolloutWorkflow,
    num_examples: int,
    engine: ScriptedEngine | None = None,
    *,
    seed: int = 0,
    keep: Callable[[Group], bool] | None = None,
    drop_equal_rewards: bool = False,
    has_baseline: bool = False,
    curriculum: Curriculum | None = None,
    **settings: object,
) -> tuple[RolloutController, ReplayBuffer, ScriptedEngine]:
    config = RolloutConfig(**{"group_size": 2, "batch_size": 2, "max_staleness": 1, **settings})
    engine = engine or engine_with_latency()
    buffer = ReplayBuffer(config.batch_size, config.max_staleness)
    controller = RolloutController(
        engine,
        runner_of(workflow, config),
        examples(num_examples),
        config,
        buffer,
        seed=seed,
        rules=GroupRules(keep=keep, drop_equal_rewards=drop_equal_rewards, has_baseline=has_baseline),
        ledger=ExampleLedger(num_examples, shuffle=config.shuffle, seed=seed, curriculum=curriculum),
    )
    return controller, buffer, engine


def trained(
    workflow: RolloutWorkflow, num_versions: int = 1, num_examples: int = 50, **settings: object
) -> tuple[list[Group], RolloutController]:
    """The groups of so many batches, of one group each and synchronous if not set otherwise, and who ran them."""

    async def main() -> tuple[list[Group], RolloutController]:
        controller, buffer, engine = controlled(
            workflow, num_examples, **{"batch_size": 1, "max_staleness": 0, "episode_retries": 0, **settings}
        )
        batches = await train(controller, buffer, engine, range(num_versions))
        return [group for batch in batches for group in batch], controller

    return run_in_virtual_time(main())

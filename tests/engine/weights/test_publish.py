"""From a snapshot of the trainer to embedded servers that are generating: what tokens are of, also if it breaks off."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import aiohttp
import pytest
import torch
from embedded_server import ServerProcess
from loaders import mirror_here
from published import HookedEngine, Trainee, client, request

from arl.api.engine import Sampler, WeightTransport
from arl.api.errors import ServerError, TransportError
from arl.api.events import Fate
from arl.api.settings.engines import DeltaWeightsConfig, DiskWeightsConfig, DistributedWeightsConfig, PauseMode
from arl.api.settings.run import RolloutConfig
from arl.api.types import Example, ModelResponse, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.engine.client import remote_engine
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.client.sglang_client import SGLangClient
from arl.engine.fsdp.snapshot import ShardGatherer
from arl.engine.weights.delta import DeltaTransport
from arl.engine.weights.disk import DiskTransport
from arl.engine.weights.distributed import DistributedTransport
from arl.rollout.buffer import ReplayBuffer
from arl.rollout.controller import RolloutController
from arl.rollout.episode import EpisodeRunner
from arl.runtime.http.client import Connections


@pytest.fixture
async def transport(
    request: pytest.FixtureRequest, tmp_path: Path, first: ServerProcess
) -> AsyncIterator[DiskTransport | DistributedTransport]:
    """By the name of its kind."""
    directory = tmp_path / "weights"
    async with mirror_here(tmp_path / "mirror") as mirror:
        match request.param:
            case "disk":
                transport = DiskTransport(DiskWeightsConfig(directory=directory), tmp_path)
            case "delta":
                config = DeltaWeightsConfig(mirrors={first.address: mirror.address}, directory=directory)
                transport = DeltaTransport(config, tmp_path)
            case _:
                transport = DistributedTransport(DistributedWeightsConfig(), bucket_bytes=20_000)
        yield transport
        transport.close()


async def hold(address: str) -> None:
    """Pause the server once it has sampled some more tokens, so that its requests live until the next update."""
    sampled = list[float]()
    async with aiohttp.ClientSession(address) as session, asyncio.timeout(30):
        while True:
            async with session.post("/pause_generation", json={"mode": "in_place"}) as answer:
                iterations = (await answer.json())["work"]["iterations"]
            sampled.append(sum(decoded + begun for _, _, decoded, _, _, begun, _ in iterations))
            if sampled[-1] >= sampled[0] + 30:
                return
            async with session.post("/continue_generation", json={}):
                pass


@pytest.mark.parametrize(
    ("transport", "mode"),
    [
        ("disk", "abort"),
        ("delta", "in_place"),
        ("distributed", "in_place"),
        ("distributed", "retract"),
        ("distributed", "abort"),
    ],
    indirect=["transport"],
)
async def test_every_token_is_of_the_weights_that_its_version_names(
    trainer: Trainee, transport: WeightTransport, first: ServerProcess, mode: PauseMode
):
    updates = [transport.snapshot(trainer.engine)]
    for _ in range(3):
        trainer.train()
        updates.append(transport.snapshot(trainer.engine))
    async with client(first, pause_mode=mode) as engine, asyncio.TaskGroup() as group:
        await transport.deliver(updates[0], engine)
        calls = [group.create_task(engine.agenerate(request(600, seed))) for seed in range(3)]
        for update in updates[1:]:
            await hold(first.address)
            await transport.deliver(update, engine)
    responses: list[ModelResponse] = [call.result() for call in calls]
    assert any(len(set(response.output_versions)) > 2 for response in responses)
    for seed, response in enumerate(responses):
        assert len(response.output_ids) == 600
        assert list(response.output_versions) == sorted(response.output_versions)
        # What comes after an update in place rests on keys and values of old weights, and is of no version alone.
        upto = response.output_versions.count(response.output_versions[0]) if mode == "in_place" else None
        trainer.assert_of_its_versions(response, seed, upto)


@pytest.mark.parametrize("transport", ["disk", "delta", "distributed"], indirect=True)
async def test_weights_that_cannot_be_put_together_leave_the_servers_as_they_were_and_the_next_are_published(
    trainer: Trainee, transport: WeightTransport, first: ServerProcess, monkeypatch: pytest.MonkeyPatch
):
    def fail(*args: object) -> torch.Tensor:
        raise MemoryError("no memory")

    async with client(first) as engine:
        await transport.deliver(transport.snapshot(trainer.engine), engine)
        trainer.train()
        with monkeypatch.context() as patch:
            patch.setattr(ShardGatherer, "_whole", fail)
            with pytest.raises(TransportError, match="no memory"):
                await transport.deliver(transport.snapshot(trainer.engine), engine)
        assert (engine.version, engine.counters()["servers/serving"]) == (0, 1)
        trainer.assert_of_its_versions(await engine.agenerate(request(20)))
        await transport.deliver(transport.snapshot(trainer.engine), engine)
        assert engine.version == 1


@asynccontextmanager
async def patient(*servers: ServerProcess, version: int = 0, **settings: float) -> AsyncIterator[RemoteInferenceEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_engine, "_MAX_RETRIES", 20)
        given = {"pause_mode": "abort", **settings}
        async with asyncio.timeout(90), client(*servers, version=version, **given) as engine:
            yield engine


@asynccontextmanager
async def busy(engine: RemoteInferenceEngine, trainer: Trainee) -> AsyncIterator[None]:
    """Requests on all servers while the block runs; afterwards each token is checked against the version it bears."""
    is_over = asyncio.Event()

    async def ask(seed: int) -> None:
        while not is_over.is_set():
            response = await engine.agenerate(request(60, seed))
            trainer.assert_of_its_versions(response, seed)

    async with asyncio.TaskGroup() as group:
        for seed in range(4):
            group.create_task(ask(seed))
        yield
        is_over.set()


async def until_served(server: ServerProcess, version: int) -> ModelResponse:
    """An answer of this server by itself, once it calls its weights this version: newer ones are refused to others."""
    async with Connections() as connections, asyncio.timeout(90):
        while await label_of(SGLangClient(connections, server.address)) != str(version):  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.1)
    async with patient(server, version=version) as alone:
        response = await alone.agenerate(request(20, 9))
        assert set(response.output_versions) == {version}
        return response


async def label_of(server: SGLangClient) -> str:
    try:
        async with asyncio.timeout(1):
            return await server.weight_label()
    except (ServerError, TimeoutError):
        return ""  # it is being started, or stopped


@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_server_that_dies_or_stalls_between_two_buckets_costs_the_others_nothing_and_comes_back_whole(
    trainer: Trainee, first: ServerProcess, second: ServerProcess, is_killed: bool
):
    def break_off_at_the_second_bucket(address: str, start: int) -> None:
        if start and address == second.address:
            second.process.send_signal(signal.SIGKILL if is_killed else signal.SIGSTOP)

    hooked = HookedEngine(trainer)
    with closing(DistributedTransport(DistributedWeightsConfig(), bucket_bytes=20_000)) as transport:
        async with patient(first, second, update_timeout_s=30.0 if is_killed else 3.0) as engine:
            await transport.deliver(transport.snapshot(hooked), engine)
            trainer.train()
            hooked.before_send = break_off_at_the_second_bucket
            async with busy(engine, trainer):
                try:
                    await transport.deliver(transport.snapshot(hooked), engine)
                    hooked.before_send = lambda address, start: None
                    assert engine.version == 1
                    for seed in range(8):
                        await engine.agenerate(request(20, seed))
                finally:
                    if is_killed:
                        await asyncio.to_thread(second.kill)
                        await asyncio.to_thread(second.start)
                    else:
                        second.process.send_signal(signal.SIGCONT)
                trainer.assert_of_its_versions(await until_served(second, 1), 9)


# What servers say that they generated lies between what responses brought and what was asked for.


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

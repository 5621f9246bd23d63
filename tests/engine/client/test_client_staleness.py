"""The staleness bound over several servers of unequal speed, some of which fail: what training sees of them."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from protocol_server import ProtocolServer

import arl.assembly
from arl.api.config import Config
from arl.api.engine import Sampler
from arl.api.scripted import ScriptedTrainEngine
from arl.api.types import Example, Group, ModelRequest, SamplingParams, Trajectory, new_id
from arl.api.workflow import RolloutWorkflow

STEPS = 10


class TwoTurns(RolloutWorkflow):
    """Two turns of one session; how long they are differs from example to example."""

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory:
        ids, versions, session = (1, 2), (-1, -1), new_id()
        for num_tokens in (1 + data["number"] % 7, 1 + data["number"] % 3):
            sampling = SamplingParams(max_new_tokens=num_tokens)
            answer = await engine.agenerate(ModelRequest(input_ids=ids, sampling=sampling, session_id=session))
            ids, versions = ids + answer.output_ids, versions + answer.output_versions
        mask = tuple(int(version >= 0) for version in versions)
        return Trajectory(
            token_ids=ids, loss_mask=mask, behavior_logprobs=(0.0,) * len(ids), versions=versions, reward=0.5
        )


@asynccontextmanager
async def unequal_servers() -> AsyncIterator[list[ProtocolServer]]:
    """Three servers: one samples and loads slowly, one samples fast and loads slowly, one the other way round."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(ProtocolServer()) for _ in range(3)]
        for server, token_s, load_s in zip(servers, (0.01, 0.001, 0.003), (0.04, 0.04, 0.0), strict=True):
            server.token_s, server.load_s = token_s, load_s
        yield servers


async def make_trouble(servers: list[ProtocolServer], seed: int) -> None:
    """Failed requests and failed loads, again and again, at one server or another."""
    chance = random.Random(seed)
    while True:
        server = chance.choice(servers[1:])
        server.load_works = False
        if not server.faults:
            server.faults.append(chance.choice([500, "reset"]))
        await asyncio.sleep(chance.uniform(0.05, 0.2))
        server.load_works = True


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The staleness of each trained token, the finished groups, and how many episodes had to be run again."""

    stale: list[int]
    groups: list[Group]
    num_retried: float


async def train(servers: list[ProtocolServer], run_dir: Path, order: str, eta: int) -> Outcome:
    groups: list[Group] = []
    engine = {"kind": "sglang", "addresses": [s.address for s in servers], "update_order": order, "max_retries": 50}
    rollout = {"batch_size": 3, "group_size": 4, "max_staleness": eta}
    log = {"console": False, "trajectories": 0}
    config = Config.model_validate(
        {"model": "none", "run_dir": run_dir, "steps": STEPS, "engine": engine, "rollout": rollout, "log": log}
    )
    trained = ScriptedTrainEngine(on_train=lambda _: time.sleep(0.01))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arl.assembly, "FSDPTrainEngine", lambda *args: trained)
        patch.setattr(arl.assembly, "end_token_ids", lambda model: frozenset())
        dataset = [{"number": n} for n in range(200)]
        keep = lambda group: groups.append(group) is None  # noqa: E731
        async with arl.assembly.launch(config, workflow=TwoTurns(), dataset=dataset, keep=keep) as trainer:
            async for _ in trainer:
                pass
            num_retried = trainer.rollout.counters()["episodes_retried"]
    stale = [
        version - int(token_version)
        for version, batch in enumerate(trained.batches)
        for minibatch in batch
        for sequence in minibatch
        for token_version in sequence.versions[sequence.loss_mask]
    ]
    return Outcome(stale=stale, groups=groups, num_retried=num_retried)


@pytest.mark.parametrize("has_trouble", [False, True], ids=["well", "failing"])
@pytest.mark.parametrize("eta", [0, 2])
@pytest.mark.parametrize("order", ["all", "rolling"])
async def test_no_token_is_older_than_its_group_or_trained_beyond_the_bound(
    tmp_path: Path, order: str, eta: int, has_trouble: bool
) -> None:
    async with unequal_servers() as servers:
        trouble = asyncio.create_task(make_trouble(servers, seed=eta)) if has_trouble else None
        outcome = await train(servers, tmp_path, order, eta)
        if trouble:
            trouble.cancel()
    assert min(outcome.stale) >= 0
    assert max(outcome.stale) <= eta
    assert max(outcome.stale) > 0 or eta == 0, "everything was fresh: this run shows nothing"
    assert outcome.num_retried == 0, "an episode was refused, for a token older than its group's admission"
    for group in outcome.groups:
        assert group.oldest_version >= group.stamp
    assert sum(bool(server.requests) for server in servers) > 1

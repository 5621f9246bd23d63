"""A run in virtual time: the real controller, buffer, ledger and delivery, with simulated servers and training.

    RolloutController --> ReplayBuffer --> _train (arl/training/trainer.py: take_batch, train, publish) --> Delivery
          |  ^                                                                                                 |
    _Episodes (a workflow)  <---------------------- SimulatedEngine <------------------------------------------+

`_train` mirrors Trainer._step and Trainer._train: it takes a batch, trains it, settles its examples, has its weights
delivered beside the next step, and with max_staleness 0 waits for the delivery. That of several snapshots only the
newest is delivered is Delivery's own doing. Not simulated: evaluations, checkpoints, and failures of machines.

A trajectory has one token for each version that sampled some of its tokens; the token's id is how many it stands for.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import numpy as np

from arl.api.config import RolloutConfig
from arl.api.engine import InferenceEngine, Sampler, UpdateStats, WeightServer, WeightSource, WeightUpdate
from arl.api.errors import first_error
from arl.api.types import Example, Group, ModelRequest, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.plan.costs import Costs, Deployment
from arl.plan.machines import Machine, MachineWithCores, OwnCores, Processor, SharingProcessor
from arl.plan.simulated_engine import SimulatedEngine, SimulatedPrompt
from arl.plan.virtual_time import run_in_virtual_time, virtual_loop
from arl.plan.workload import MeasuredEpisode, Workload
from arl.rollout.buffer import Replay, ReplayBuffer, Slot
from arl.rollout.controller import RolloutController
from arl.rollout.episode import EpisodeRunner
from arl.rollout.failure_log import FailureLog
from arl.rollout.group import GroupRules
from arl.training.delivery import Delivery

_NEVER_S = 1e9
"""Episodes have no time limit here: those that timed out when measured fail after the time that they took."""


class SimulatedFailureError(Exception):
    """A measured episode had failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step. Times are seconds since the run began; those of servers are summed over them."""

    version: int
    """The version that the batch was taken for."""
    began: float
    taken: float
    """When the batch had been taken; below: trained, its weights copied, and the step ended."""
    trained: float
    copied: float
    ended: float
    num_episodes: int
    num_tokens: int
    """Sampled tokens of the batch."""
    forwarded: int
    """Tokens that the trainer forwarded."""
    staleness: dict[int, int]
    """Versions behind -> sampled tokens."""
    # All below: up to the step's end.
    servers_busy_s: float
    servers_stood_still_s: float
    servers_iterations: int
    servers_decoded: int
    in_flight_s: float
    """Integral of the number of requests."""
    episodes_s: float
    """Integral of the number of episodes that run."""
    num_answered: int
    request_s: float
    queued_s: float
    controller_s: float
    full_s: float
    """How long the rollout loop had waited for room in the buffer."""


@dataclass(kw_only=True)
class SimulatedRun:
    """The results of a simulated run."""

    deployment: Deployment
    steps: list[SimulatedStep] = field(default_factory=list[SimulatedStep])
    counters: dict[str, float] = field(default_factory=dict[str, float])
    """The rollout controller's."""
    most_running: int = 0
    """Requests that one server ran at once."""
    most_context: int = 0
    """Tokens of the requests that one server ran at once."""


def simulate(costs: Costs, deployment: Deployment, num_steps: int, *, seed: int = 0) -> SimulatedRun:
    """Train so many steps. The same seed gives the same run. Raises StarvedError where no group can be trained."""
    with _advice_unheard():
        return run_in_virtual_time(_Simulation(costs, deployment, seed).run(num_steps))


@contextmanager
def _advice_unheard() -> Iterator[None]:
    """The rollout controller's warnings are for runs that train."""
    logger = logging.getLogger("arl.rollout")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Simulation:
    def __init__(self, costs: Costs, deployment: Deployment, seed: int) -> None:
        self._costs = costs
        self._deployment = deployment
        self._seed = seed
        self._version = 0

    async def run(self, num_steps: int) -> SimulatedRun:
        costs, deployment, shared = self._costs, self._deployment, self._costs.shared
        own: Machine = OwnCores()
        machine: Machine = MachineWithCores(shared.cores) if shared else own
        controller, ranks, server = (shared.controller, shared.rank, shared.server) if shared else (0, 0, 0)
        self._controller = SharingProcessor(machine, controller) if controller else Processor()
        self._trainer = SharingProcessor(machine, ranks * deployment.num_ranks) if ranks else Processor()
        self._engine = SimulatedEngine(costs, deployment, machine if server else own, self._controller)
        self._buffer = _WatchedBuffer(deployment.batch_size, deployment.max_staleness)
        self._rollout = self._make_rollout()
        self._clock = asyncio.get_running_loop().time
        self._done = SimulatedRun(deployment=deployment)
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._train(num_steps, tasks)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        servers = self._engine.servers
        self._done.counters = self._rollout.counters()
        self._done.most_running = max(server.most_running for server in servers)
        self._done.most_context = max(server.most_context for server in servers)
        return self._done

    def _make_rollout(self) -> RolloutController:
        deployment, engine = self._deployment, self._engine
        config = RolloutConfig(
            batch_size=deployment.batch_size,
            group_size=deployment.group_size,
            max_staleness=deployment.max_staleness,
            max_concurrent_episodes=deployment.max_concurrent_episodes,
            episode_timeout_s=_NEVER_S,
            episode_retries=deployment.episode_retries,
            min_group_size=min(deployment.min_group_size, deployment.group_size),
            max_failure_rate=1.0,
            drop_stragglers_after_s=deployment.drop_stragglers_after_s,
            extra_episodes=deployment.extra_episodes,
        )
        workflow = self._workflow = _Episodes(self._costs, deployment.tool_factor, self._controller)
        runner = EpisodeRunner(
            workflow=workflow,
            timeout_s=_NEVER_S,
            retries=deployment.episode_retries,
            failures=_NoLog(),
            newest_version=lambda: engine.newest_sent,
        )
        rules = GroupRules(drop_equal_rewards=deployment.drop_equal_rewards)
        dataset = _Examples(self._costs.workload, self._seed)
        return RolloutController(engine, runner, dataset, config, self._buffer, self._seed, rules)

    async def _train(self, num_steps: int, tasks: asyncio.TaskGroup) -> None:
        deployment = self._deployment
        eta, trainer = deployment.max_staleness, self._costs.trainer
        transport = _Transport(self._costs, deployment)
        thread = cast(Any, _TrainThread(self._trainer, trainer.snapshot_s))
        delivery = Delivery(
            transport=transport, inference_engine=self._engine, buffer=self._buffer, thread=thread, tasks=tasks
        )
        replay = Replay(deployment.replay_groups if eta else 0, max_staleness=eta)
        source = cast(WeightSource, None)
        transport.version = 0
        await delivery.begin(source)
        await delivery.finished()
        rollout = tasks.create_task(self._rollout.run())
        for version in range(num_steps):
            began = self._clock()
            groups = await self._buffer.take_batch(version)
            taken = self._clock()
            batch = [*groups, *replay.take(version)]
            num_episodes = sum(group.num_episodes for group in batch)
            forwarded = sum(map(_forwarded, batch))
            await self._trainer.work(trainer.step_s(forwarded, num_episodes, deployment.num_ranks))
            transport.version = version + 1
            self._rollout.trained(groups)
            replay.add(groups, version + 1)
            trained = self._clock()
            await delivery.begin(source)
            copied = self._clock()
            if eta == 0:
                await delivery.finished()
            self._note(version, (began, taken, trained, copied), batch, forwarded)
        rollout.cancel()

    def _note(self, version: int, times: Sequence[float], batch: Sequence[Group], forwarded: int) -> None:
        engine, servers = self._engine, self._engine.servers
        staleness = _staleness(batch, version)
        began, taken, trained, copied = times
        self._done.steps.append(
            SimulatedStep(
                version=version,
                began=began,
                taken=taken,
                trained=trained,
                copied=copied,
                ended=self._clock(),
                num_episodes=sum(group.num_episodes for group in batch),
                num_tokens=staleness.total(),
                forwarded=forwarded,
                staleness=dict(staleness),
                servers_busy_s=engine.busy_s(),
                servers_stood_still_s=engine.stood_still_s(),
                servers_iterations=sum(server.num_iterations for server in servers),
                servers_decoded=sum(server.tokens_decoded for server in servers),
                in_flight_s=engine.in_flight_s(),
                episodes_s=self._workflow.running_s(),
                num_answered=engine.num_answered,
                request_s=engine.request_s,
                queued_s=engine.queued_s,
                controller_s=self._controller.busy_s(),
                full_s=self._buffer.full_s(),
            )
        )


def _forwarded(group: Group) -> int:
    """A prompt that the episodes of a group share is forwarded once."""
    tokens = [trajectory.metrics["tokens"] for trajectory in group.trajectories]
    shared = min(trajectory.metrics["shared"] for trajectory in group.trajectories)
    return int(sum(tokens) - (len(tokens) - 1) * shared)


def _staleness(batch: Sequence[Group], version: int) -> Counter[int]:
    counts: Counter[int] = Counter()
    for group in batch:
        for trajectory in group.trajectories:
            tokens, versions = trajectory.token_ids.tolist()[1:], trajectory.versions.tolist()[1:]
            for number, sampled_by in zip(tokens, versions, strict=True):
                counts[version - sampled_by] += number
    return counts


class _Examples:
    """A dataset. Each row stands for one measured group; reading it gives its episodes, in a random order."""

    def __init__(self, workload: Workload, seed: int) -> None:
        groups: dict[int, list[MeasuredEpisode]] = {}
        for episode in workload.episodes:
            groups.setdefault(episode.group, []).append(episode)
        self._groups = [groups[number] for number in sorted(groups)]
        self._num_examples = workload.num_examples
        self._random = random.Random(f"{seed}-episodes")

    def __len__(self) -> int:
        return self._num_examples

    def __getitem__(self, row: int) -> Example:
        return {"episodes": self._drawn(self._groups[row % len(self._groups)])}

    def _drawn(self, episodes: list[MeasuredEpisode]) -> Iterator[MeasuredEpisode]:
        """All of them, and all of them again, each time in another order."""
        while True:
            yield from self._random.sample(episodes, len(episodes))


class _Episodes(RolloutWorkflow):
    """Plays measured episodes."""

    def __init__(self, costs: Costs, tool_factor: float, controller: Processor) -> None:
        self._per_episode_s = costs.controller.per_episode_s
        self._tool_factor = tool_factor
        self._controller = controller
        self._sampling: dict[int, SamplingParams] = {}
        self._numbers = 0
        self._loop = virtual_loop()
        self._num_running, self._running_s, self._changed_at = 0, 0.0, self._loop.time()

    def running_s(self) -> float:
        """The integral of the number of episodes that run."""
        self._note_running(0)
        return self._running_s

    def _note_running(self, change: int) -> None:
        now = self._loop.time()
        self._running_s += self._num_running * (now - self._changed_at)
        self._num_running, self._changed_at = self._num_running + change, now

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory | None:
        self._note_running(1)
        try:
            return await self._play(engine, next(data["episodes"]))
        finally:
            self._note_running(-1)

    async def _play(self, engine: Sampler, episode: MeasuredEpisode) -> Trajectory | None:
        self._numbers += 1
        session = str(self._numbers)
        await self._controller.work(self._per_episode_s)
        await self._pass(episode.before_s)
        common = episode.turns[0].cached_tokens if episode.turns else 0
        counts: dict[int, int] = {}
        for turn in episode.turns:
            request = ModelRequest(
                input_ids=SimulatedPrompt(turn.prompt_tokens, turn.cached_tokens, common),
                sampling=self._sampling_of(turn.new_tokens),
                rid=session,
                session_id=session,
            )
            response = await engine.agenerate(request)
            for version, number in zip(response.output_versions, response.output_ids, strict=True):
                counts[version] = counts.get(version, 0) + number
            await self._pass(turn.tool_s)
        if episode.how == "failed":
            raise SimulatedFailureError("the measured episode had failed")
        return None if episode.how == "rejected" or not counts else _trajectory(episode, counts)

    async def _pass(self, seconds: float) -> None:
        if seconds:
            await self._loop.until(self._loop.time() + seconds * self._tool_factor)

    def _sampling_of(self, new_tokens: int) -> SamplingParams:
        if new_tokens not in self._sampling:
            self._sampling[new_tokens] = SamplingParams(max_new_tokens=new_tokens)
        return self._sampling[new_tokens]


def _trajectory(episode: MeasuredEpisode, counts: dict[int, int]) -> Trajectory:
    loss_mask, logprobs, versions = _columns(tuple(counts))
    return Trajectory(
        token_ids=[0, *counts.values()],
        loss_mask=loss_mask,
        behavior_logprobs=logprobs,
        versions=versions,
        reward=episode.reward,
        metrics={"tokens": episode.tokens, "shared": episode.shared_tokens},
    )


@lru_cache(maxsize=10_000)
def _columns(versions: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """loss_mask, behavior_logprobs and versions of trajectories, which may share them, as nobody may change them."""
    n = len(versions)
    columns = np.arange(n + 1) > 0, np.zeros(n + 1, np.float32), np.array([-1, *versions], np.int32)
    for column in columns:
        column.flags.writeable = False
    return columns


class _NoLog(FailureLog):
    """Failures are measured ones: nobody need read of them."""

    def note(self, error: Exception, which: str, what_next: str) -> None:
        pass


class _WatchedBuffer(ReplayBuffer):
    """Measures how long the rollout loop waits for room."""

    def __init__(self, batch_size: int, max_staleness: int) -> None:
        super().__init__(batch_size, max_staleness)
        self._clock = asyncio.get_running_loop().time
        self._full_s = 0.0
        self._asked: float | None = None

    async def admit(self) -> Slot:
        self._asked = self._clock()
        slot = await super().admit()
        self._full_s += self._clock() - self._asked
        self._asked = None
        return slot

    def full_s(self) -> float:
        return self._full_s + (0.0 if self._asked is None else self._clock() - self._asked)


class _TrainThread:
    """Stands for arl.offload.TrainThread, whose only call here is a snapshot."""

    def __init__(self, trainer: Processor, snapshot_s: float) -> None:
        self._trainer = trainer
        self._snapshot_s = snapshot_s

    async def __call__(self, function: Any, *args: Any) -> Any:
        await self._trainer.work(self._snapshot_s)
        return function(*args)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """A WeightUpdate without weights."""

    version: int
    adapter: str | None = None
    num_bytes: int = 0

    async def prepare(self, server: WeightServer) -> None:
        pass

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None:
        pass


class _Transport:
    """A WeightTransport that takes time. version: the trainer's."""

    def __init__(self, costs: Costs, deployment: Deployment) -> None:
        self.version = 0
        self._transfer_s = costs.publish.transfer_s + costs.publish.per_server_s * deployment.num_servers

    def snapshot(self, engine: WeightSource) -> WeightUpdate:
        return _Update(version=self.version)

    async def deliver(self, update: WeightUpdate, engine: InferenceEngine) -> UpdateStats:
        if self._transfer_s:
            await asyncio.sleep(self._transfer_s)
        return await engine.update_weights(update)

    def discard(self, update: WeightUpdate) -> None:
        pass

    def close(self) -> None:
        pass

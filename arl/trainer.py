"""The decoupled PPO loop, as an async iterator over its steps.

                       finished groups                    snapshot of version t+1
    RolloutController ----------------> ReplayBuffer ----> Trainer ----> WeightTransport ----> InferenceEngine
            ^                                |                                                       |
            +---------- room in the buffer --+<------------------ published(t+1) --------------------+

| task      | consumes           | produces            | waits for                | woken by                       |
|-----------|--------------------|---------------------|--------------------------|--------------------------------|
| rollout   | examples           | finished groups     | room in the buffer       | `published`, a group rejected  |
| step      | a batch of groups  | weights, StepStats  | a batch that may be taken| a group finished or dropped    |
| delivery  | a weight snapshot  | published version   | the servers              | their answers, update_timeout_s|
| evaluation| held-out examples  | Evaluation          | a version that is due    | the step                       |

`step` runs in whoever iterates the trainer; the others are tasks of the run's TaskGroup. Blocking work (training,
snapshots, checkpoints, file writes) crosses to threads in `TrainThread` and `asyncio.to_thread`, here and nowhere else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, TypeVar, TypeVarTuple

from arl.algorithm.advantages import grpo_advantages, to_sequences
from arl.algorithm.aggregation import weigh_tokens
from arl.algorithm.losses import PPOLoss
from arl.api.config import Config
from arl.api.engine import InferenceEngine, PublishStats, TrainEngine, WeightTransport, WeightUpdate
from arl.api.errors import ConfigError, first_error
from arl.api.types import Group, StepStats, TrainSequence
from arl.buffer import ReplayBuffer
from arl.checkpoint import Checkpoints
from arl.evaluation import Evaluator
from arl.metrics import Evaluation, RunLog
from arl.rollout import RolloutController
from arl.stats import RunTotals, batch_metrics, episode_rewards

ResultT = TypeVar("ResultT")
ArgsT = TypeVarTuple("ArgsT")


class TrainThread:
    """The one thread on which the train engine lives. A cancelled caller still waits until its call is done."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="arl-train")

    def submit(self, function: Callable[[*ArgsT], ResultT], *args: *ArgsT) -> asyncio.Future[ResultT]:
        """Begin a call without waiting for it."""
        return asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    async def __call__(self, function: Callable[[*ArgsT], ResultT], *args: *ArgsT) -> ResultT:
        call = self.submit(function, *args)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait([call])
            raise

    def close(self) -> None:
        self._executor.shutdown()


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Trains `config.steps` batches, one for each iteration. Built by `launch`, which also closes its parts."""

    config: Config
    train_engine: TrainEngine
    inference_engine: InferenceEngine
    transport: WeightTransport
    buffer: ReplayBuffer
    rollout: RolloutController
    evaluator: Evaluator | None
    checkpoints: Checkpoints
    log: RunLog
    thread: TrainThread
    totals: RunTotals = field(default_factory=RunTotals)

    def __post_init__(self) -> None:
        self.version = self.train_engine.version
        self._tasks = asyncio.TaskGroup()
        self._loss = PPOLoss.of(self.config.ppo)
        self._background: list[asyncio.Task[None]] = []
        self._delivery: asyncio.Task[None] | None = None
        self._published: PublishStats | None = None
        self._evaluation_due = asyncio.Event()
        self._in_training: Sequence[Group] = ()
        self._resumed_at: float | None = None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Self]:
        """Serve and train inside the block, which ends with a checkpoint and raises the first error of any task."""
        try:
            async with self._tasks:
                await self._publish()
                await self._delivered()
                yield self
                await self.stop()
        except BaseExceptionGroup as errors:
            error = first_error(errors)
            raise error from error.__cause__
        finally:
            await self.save()

    # The loop ---------------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StepStats:
        if self.version >= self.config.steps:
            await self.stop()
            raise StopAsyncIteration
        self._start()
        return await self._step()

    async def _step(self) -> StepStats:
        """take_batch -> advantages -> proximal logprobs -> train_batch -> publish."""
        began = time.monotonic()
        groups = await self.buffer.take_batch(self.version)
        taken = time.monotonic()
        advantages = grpo_advantages(groups, scale_by_std=self.config.ppo.scale_by_std)
        sequences = await self._with_proximal_logprobs(to_sequences(groups, advantages))
        metrics = await self._train(groups, sequences)
        trained = time.monotonic()
        await self._publish()
        stats = self._stats(groups, metrics, began=began, taken=taken, trained=trained)
        await asyncio.to_thread(self.log.step, stats, groups)
        await self._beside_training()
        return stats

    async def _with_proximal_logprobs(self, sequences: list[list[TrainSequence]]) -> list[list[TrainSequence]]:
        """Logprobs under the weights that the batch is taken with, before any update on it. Lists are groups."""
        if self._loss.proximal != "recomputed":
            return sequences
        flat = [sequence for group in sequences for sequence in group]
        proximal = iter(await self.thread(self.train_engine.forward, flat))
        return [[replace(sequence, proximal_logprobs=next(proximal)) for sequence in group] for group in sequences]

    async def _train(self, groups: Sequence[Group], sequences: list[list[TrainSequence]]) -> dict[str, float]:
        """One optimizer step for each minibatch of equally many whole groups, in the batch's order."""
        size = len(groups) // self.config.ppo.minibatches
        minibatches = [
            weigh_tokens([s for group in sequences[i : i + size] for s in group], self.config.ppo.aggregation)
            for i in range(0, len(groups), size)
        ]
        self._in_training = groups
        metrics = await self.thread(self.train_engine.train_batch, minibatches, self._loss)
        self._settle()
        return metrics

    def _settle(self) -> None:
        """Note the batch in training as trained once the engine has it, also after a cancellation in between."""
        if self.train_engine.version > self.version:
            self.version = self.train_engine.version
            self.rollout.trained(self._in_training)
            self._in_training = ()

    async def _publish(self) -> None:
        """Snapshot the weights, and deliver them beside the next step; one delivery at a time."""
        await self._delivered()
        began = time.monotonic()
        update = await self.thread(self.transport.snapshot, self.train_engine)
        self._delivery = self._tasks.create_task(self._deliver(update, snapshot_s=time.monotonic() - began))
        if self.config.rollout.max_staleness == 0:
            await self._delivered()

    async def _deliver(self, update: WeightUpdate, snapshot_s: float) -> None:
        began = time.monotonic()
        cost = await self.transport.deliver(update, self.inference_engine)
        await self.buffer.published(update.version)
        self._published = PublishStats(
            version=update.version,
            snapshot_s=snapshot_s,
            transfer_s=time.monotonic() - began,
            pause_s=cost.pause_s,
            num_bytes=update.num_bytes,
        )

    async def _delivered(self) -> None:
        if self._delivery:
            await self._delivery

    # Beside the loop --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._resumed_at is None:
            self._resumed_at = time.monotonic()
            self._background.append(self._tasks.create_task(self.rollout.run()))
            if self.evaluator and self.config.evaluation.every:
                self._background.append(self._tasks.create_task(self._evaluate_when_due(self.evaluator)))

    async def stop(self) -> None:
        """Stop sampling for training and let a delivery end; the servers keep the newest weights. Idempotent."""
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background)
        self._background = []
        if self._resumed_at is not None:
            self.totals.wall_s += time.monotonic() - self._resumed_at
            self._resumed_at = None
        await self._delivered()

    async def _beside_training(self) -> None:
        if self.config.evaluation.every and self.version % self.config.evaluation.every == 0:
            self._evaluation_due.set()
        if self.config.checkpoint.every and self.version % self.config.checkpoint.every == 0:
            await self.save()

    async def _evaluate_when_due(self, evaluator: Evaluator) -> None:
        while True:
            await self._evaluation_due.wait()
            self._evaluation_due.clear()
            await asyncio.to_thread(self.log.evaluation, await evaluator.evaluate())

    async def evaluate(self) -> Evaluation:
        """Run the held-out examples on the newest published weights. Raises ConfigError where there are none."""
        if self.evaluator is None:
            raise ConfigError("evaluate() needs held-out examples; give launch an eval_dataset")
        await self._delivered()
        evaluation = await self.evaluator.evaluate()
        await asyncio.to_thread(self.log.evaluation, evaluation)
        return evaluation

    @property
    def evaluations(self) -> dict[int, Evaluation]:
        """Evaluations made so far in this run directory, by version; also those from before a resume."""
        return self.log.evaluations

    async def save(self) -> None:
        """Write a checkpoint of the last trained version, between steps. What is in flight will run again.

        Nothing is written where nothing was trained since the last one, nor after a batch that failed halfway:
        its minibatches may have changed the weights, and the checkpoint before it is what to continue from.
        """
        await self.thread(lambda: None)  # a call whose waiter was cancelled may still be running there
        self._settle()
        failed_midway = bool(self._in_training)
        if failed_midway or self.version in (0, self.checkpoints.newest_version()):
            return
        await self.thread(self.checkpoints.save, self.version, self.train_engine.save, self._state())

    def _state(self) -> dict[str, Any]:
        totals = replace(self.totals, wall_s=self._wall_s())
        return {"version": self.version, "totals": asdict(totals), "rollout": self.rollout.state_dict()}

    def _wall_s(self) -> float:
        running = 0.0 if self._resumed_at is None else time.monotonic() - self._resumed_at
        return self.totals.wall_s + running

    # Numbers ----------------------------------------------------------------------------------------------------

    def _stats(
        self, groups: Sequence[Group], metrics: dict[str, float], *, began: float, taken: float, trained: float
    ) -> StepStats:
        staleness = batch_metrics(groups, self.version - 1)
        rewards = episode_rewards(groups)
        self.totals.add(num_episodes=len(rewards), max_staleness=int(staleness["staleness/max"]))
        everything = {
            "version": self.version,
            "time_s": self._wall_s(),
            "reward": sum(rewards) / len(rewards),
            "samples_per_s": len(rewards) / max(time.monotonic() - began, 1e-9),
            "time/wait_s": taken - began,
            "time/train_s": trained - taken,
            **staleness,
            **metrics,
            **_publish_metrics(self._published),
            **self.rollout.counters(),
        }
        return StepStats(
            version=self.version,
            reward=everything["reward"],
            num_episodes=len(rewards),
            mean_staleness=staleness["staleness/mean"],
            max_staleness_seen=int(staleness["staleness/max"]),
            wait_s=taken - began,
            train_s=trained - taken,
            metrics=everything,
        )

    def summary(self) -> dict[str, float]:
        """Totals of the whole run, resumes included: what was trained, how fast, how stale."""
        wall_s = self._wall_s()
        return {
            "steps": self.version,
            "wall_s": wall_s,
            "samples_per_s": self.totals.episodes_trained / wall_s if wall_s else 0.0,
            "max_staleness": self.config.rollout.max_staleness,
            "max_staleness_seen": self.totals.max_staleness_seen,
            "episodes_trained": self.totals.episodes_trained,
            **{name: self.rollout.counters()[name] for name in ("episodes_rejected", "episodes_dropped")},
        }


def _publish_metrics(published: PublishStats | None) -> dict[str, float]:
    """Of the newest publish that is complete, which with overlap is that of an earlier version."""
    if published is None:
        return {}
    return {
        "weights/version": published.version,
        "weights/snapshot_s": published.snapshot_s,
        "weights/transfer_s": published.transfer_s,
        "weights/pause_s": published.pause_s,
        "weights/bytes": published.num_bytes,
    }

"""The decoupled PPO loop, as an async iterator over its steps.

                       finished groups                    snapshot of version t+1
    RolloutController ----------------> ReplayBuffer ----> Trainer ----> WeightTransport ----> InferenceEngine
            ^                                |                                                       |
            +---------- room in the buffer --+<------------------ published(t+1) --------------------+

| task      | consumes           | produces            | waits for                | woken by                       |
|-----------|--------------------|---------------------|--------------------------|--------------------------------|
| rollout   | examples           | finished groups     | room in the buffer       | `published`, a group rejected  |
| step      | a batch of groups  | weights, StepStats  | a batch that may be taken| a group finished or dropped    |
| delivery  | newest snapshot    | published version   | the servers              | their answers, update_timeout_s|
| evaluation| held-out examples  | Evaluation          | the delivery, its episodes| the step where it is due      |
| saving    | copies, RunState   | a checkpoint        | the disk                 | the step where it is due       |

`step` runs in whoever iterates the trainer; the others are tasks of the run's TaskGroup. Blocking work (training,
snapshots, checkpoints, file writes) crosses to threads in `TrainThread`, `_written` and `asyncio.to_thread`, here and
nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Self, TypeVar, TypeVarTuple

from arl.algorithm.advantages import grpo_advantages, to_sequences
from arl.algorithm.aggregation import weigh_tokens
from arl.algorithm.losses import PPOLoss
from arl.api.config import Config
from arl.api.engine import InferenceEngine, PublishStats, Saving, TrainEngine, WeightTransport, WeightUpdate
from arl.api.errors import ArlError, ConfigError, first_error
from arl.api.types import Group, StepStats, TrainSequence
from arl.buffer import ReplayBuffer
from arl.checkpoint import Checkpoints, RunState
from arl.evaluation import Evaluator
from arl.metrics import Evaluation, RunLog
from arl.rollout import RolloutController
from arl.stats import RunTotals, batch_metrics, episode_rewards, publish_metrics

log = logging.getLogger(__name__)

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
        return await self.finish(self.submit(function, *args))

    async def finish(self, call: asyncio.Future[ResultT]) -> ResultT:
        """Wait for a call that was begun, also when cancelled, so that its effects are known."""
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait([call])
            raise

    def close(self) -> None:
        self._executor.shutdown()


@dataclass(slots=True, kw_only=True, eq=False)
class _Step:
    """A batch from when it is taken until it is logged. Times are of the monotonic clock; call: its training."""

    groups: Sequence[Group]
    began: float
    taken: float
    call: asyncio.Future[dict[str, float]] | None = None
    trained: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    """Weights that wait for their delivery. taken: when, on the monotonic clock. snapshot_s: training stood still."""

    update: WeightUpdate
    taken: float
    snapshot_s: float


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
        self._rollout_task: asyncio.Task[None] | None = None
        self._undelivered: _Snapshot | None = None
        self._delivery: asyncio.Task[None] | None = None
        self._published: PublishStats | None = None
        self._publication = asyncio.Condition()
        self._evaluation: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._is_evaluation_due = False
        self._open_step: _Step | None = None
        self._started_at: float | None = None
        self._recorded_at = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Self]:
        """Serve and train inside the block, which ends with a checkpoint and raises the first error of any task."""
        async with self._saved_at_the_end():
            try:
                async with self._tasks:
                    await self._publish()
                    await self._delivered()
                    yield self
                    await self.stop()
            except BaseExceptionGroup as errors:
                error = first_error(errors)
                raise error from error.__cause__

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
        step = _Step(groups=groups, began=began, taken=time.monotonic())
        advantages = grpo_advantages(groups, scale_by_std=self.config.ppo.scale_by_std)
        sequences = await self.thread(to_sequences, groups, advantages)
        sequences = await self._with_proximal_logprobs(sequences)
        await self._train(step, sequences)
        await self._publish()
        stats = await self._record()
        await self._beside_training()
        return stats

    async def _with_proximal_logprobs(self, sequences: list[list[TrainSequence]]) -> list[list[TrainSequence]]:
        """Logprobs under the weights that the batch is taken with, before any update on it. Lists are groups."""
        if self._loss.proximal != "recomputed":
            return sequences
        flat = [sequence for group in sequences for sequence in group]
        proximal = iter(await self.thread(self.train_engine.forward, flat))
        return [[replace(sequence, proximal_logprobs=next(proximal)) for sequence in group] for group in sequences]

    async def _train(self, step: _Step, sequences: list[list[TrainSequence]]) -> None:
        """One optimizer step for each minibatch of equally many whole groups, in the batch's order."""
        size = len(sequences) // self.config.ppo.minibatches
        minibatches = [
            weigh_tokens([s for group in sequences[i : i + size] for s in group], self.config.ppo.aggregation)
            for i in range(0, len(sequences), size)
        ]
        step.call = self.thread.submit(self.train_engine.train_batch, minibatches, self._loss)
        self._open_step = step
        await self.thread.finish(step.call)
        self._settle()

    def _settle(self) -> None:
        """Note the batch in training as trained once the engine has it, also after a cancellation in between."""
        if self._open_step and self.train_engine.version > self.version:
            self.version = self.train_engine.version
            self.rollout.trained(self._open_step.groups)
            self._open_step.trained = time.monotonic()

    async def _publish(self) -> None:
        """Snapshot the weights, which are delivered beside the next step; a newer snapshot replaces one that waits."""
        began = time.monotonic()
        update = await self.thread(self.transport.snapshot, self.train_engine)
        if self._undelivered:
            self.transport.discard(self._undelivered.update)
        now = time.monotonic()
        self._undelivered = _Snapshot(update=update, taken=now, snapshot_s=now - began)
        if self._delivery is None or self._delivery.done():
            self._delivery = self._tasks.create_task(self._deliver())
        if self.config.rollout.max_staleness == 0:
            await self._delivered()

    async def _deliver(self) -> None:
        """Bring the newest snapshot to the servers, one delivery at a time, until there is none left."""
        while self._undelivered:
            snapshot, self._undelivered = self._undelivered, None
            cost = await self.transport.deliver(snapshot.update, self.inference_engine)
            await self.buffer.published(snapshot.update.version)
            self._published = PublishStats(
                version=snapshot.update.version,
                snapshot_s=snapshot.snapshot_s,
                transfer_s=time.monotonic() - snapshot.taken,
                pause_s=cost.pause_s,
                num_bytes=snapshot.update.num_bytes,
            )
            async with self._publication:
                self._publication.notify_all()

    async def _served(self, version: int) -> None:
        """Wait until the servers hold `version` or a newer one; woken by the delivery."""
        async with self._publication:
            await self._publication.wait_for(lambda: self._published is not None and self._published.version >= version)

    async def _delivered(self) -> None:
        if self._delivery:
            await asyncio.shield(self._delivery)  # whoever gives up waiting must not cancel the delivery

    # Beside the loop --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._started_at is None:
            self._started_at = self._recorded_at = time.monotonic()
            self._rollout_task = self._tasks.create_task(self.rollout.run())

    async def stop(self) -> None:
        """Stop sampling for training; let a delivery and an evaluation that is due end. Idempotent."""
        if self._rollout_task:
            self._rollout_task.cancel()
            await asyncio.wait([self._rollout_task])
        self.totals.wall_s = self._wall_s()
        self._started_at = None
        await self._delivered()
        if self._evaluation:
            await self._evaluation

    async def _beside_training(self) -> None:
        if self.config.evaluation.every and self.version % self.config.evaluation.every == 0:
            self._is_evaluation_due = True
            if self._evaluation is None or self._evaluation.done():
                self._evaluation = self._tasks.create_task(self._evaluate_while_due())
        every = self.config.checkpoint.every
        if every and self.version % every == 0 and (saving := await self._begin_saving()):
            self._saving = self._tasks.create_task(_written(saving))

    async def _evaluate_while_due(self) -> None:
        """One evaluation at a time; those that came due during a long one are made as one."""
        while self._is_evaluation_due:
            self._is_evaluation_due = False
            await self.evaluate()

    async def evaluate(self) -> Evaluation:
        """Run the held-out examples on the newest published weights. Raises ConfigError where there are none."""
        if self.evaluator is None:
            raise ConfigError("evaluate() needs held-out examples; give launch an eval_dataset")
        await self._served(self.version)
        evaluation = await self.evaluator.evaluate()
        await self.thread(self.log.evaluation, evaluation)
        return evaluation

    @property
    def evaluations(self) -> dict[int, Evaluation]:
        """Evaluations made so far in this run directory, by version; also those from before a resume."""
        return self.log.evaluations

    async def save(self) -> None:
        """Write a checkpoint of the last trained version, between steps. What is in flight will run again.

        Nothing is written where nothing was trained since the last one, nor after a batch that failed halfway:
        its minibatches may have changed the weights, and the checkpoint before it is what to continue from. Raises
        CheckpointError.
        """
        if saving := await self._begin_saving():
            await _written(saving)

    async def _begin_saving(self) -> Saving | None:
        """Copy aside what a checkpoint holds, all of this moment; None where there is nothing to write.

        One is written at a time: training waits here for a disk that is slower than `checkpoint.every`.
        """
        if self._saving:
            await asyncio.wait([self._saving])  # its error ends the TaskGroup, and need not be raised twice
        await self.thread(lambda: None)  # a call whose waiter was cancelled may still be running there
        self._settle()
        if self._open_step and self._open_step.trained:
            await self._record()
        failed_midway = self._open_step is not None
        if failed_midway or self.version in (0, self.checkpoints.newest_version()):
            return None
        return await self.thread(self.checkpoints.begin, self.version, self.train_engine.save, self._state())

    def _state(self) -> RunState:
        totals = replace(self.totals, wall_s=self._wall_s())
        values = {"version": self.version, "totals": asdict(totals), "rollout": self.rollout.state_dict()}
        return RunState(values=values, groups=self.buffer.untrained(self.version))

    @asynccontextmanager
    async def _saved_at_the_end(self) -> AsyncGenerator[None]:
        """Save, whatever ends the block. An error that ends it is the one to raise, even where saving fails too."""
        try:
            yield
        except asyncio.CancelledError:
            await self.save()
            raise
        except BaseException as error:
            try:
                await self.save()
            except (ArlError, OSError) as failure:
                log.error("the run's end could not be saved either: %s", failure)
                error.add_note(str(failure))
            raise
        await self.save()

    def _wall_s(self) -> float:
        return self.totals.wall_s + (0.0 if self._started_at is None else time.monotonic() - self._started_at)

    # Numbers ----------------------------------------------------------------------------------------------------

    async def _record(self) -> StepStats:
        """Log the step that was trained, once."""
        step, self._open_step = self._open_step, None
        if step is None or step.call is None:
            raise RuntimeError("there is no trained step to record")
        return await self.thread(self._record_now, step, step.call.result())

    def _record_now(self, step: _Step, metrics: dict[str, float]) -> StepStats:
        stats = self._stats(step, metrics)
        self.totals.max_staleness_seen = max(self.totals.max_staleness_seen, stats.max_staleness_seen)
        self.log.step(stats, step.groups)
        return stats

    def _stats(self, step: _Step, metrics: dict[str, float]) -> StepStats:
        now, rewards = time.monotonic(), episode_rewards(step.groups)
        interval_s, self._recorded_at = now - self._recorded_at, now
        numbers = batch_metrics(step.groups, self.version - 1)
        wait_s, train_s = step.taken - step.began, (step.trained or now) - step.taken
        everything = {
            "version": self.version,
            "time_s": self._wall_s(),
            "reward": sum(rewards) / len(rewards),
            "samples_per_s": len(rewards) / max(interval_s, 1e-9),
            "time/wait_s": wait_s,
            "time/train_s": train_s,
            **numbers,
            **metrics,
            **publish_metrics(self._published),
            **self.rollout.counters(),
        }
        return StepStats(
            version=self.version,
            reward=everything["reward"],
            num_episodes=len(rewards),
            mean_staleness=numbers["staleness/mean"],
            max_staleness_seen=int(numbers["staleness/max"]),
            wait_s=wait_s,
            train_s=train_s,
            metrics=everything,
        )

    def summary(self) -> dict[str, float]:
        """Totals of the whole run, resumes included: what was trained, how fast, how stale."""
        wall_s, counters = self._wall_s(), self.rollout.counters()
        return {
            "steps": self.version,
            "wall_s": wall_s,
            "samples_per_s": counters["episodes_trained"] / wall_s if wall_s else 0.0,
            "max_staleness": self.config.rollout.max_staleness,
            "max_staleness_seen": self.totals.max_staleness_seen,
            **{name: counters[name] for name in ("episodes_trained", "episodes_rejected", "episodes_dropped")},
        }


async def _written(saving: Saving) -> None:
    """Wait on a thread until it is on the disk; also when cancelled, as it goes on, and its error must not be lost."""
    call = asyncio.get_running_loop().run_in_executor(None, saving.wait)
    try:
        await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        call.result()
        raise

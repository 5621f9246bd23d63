"""The decoupled PPO loop, as an async iterator over its steps.

                       finished groups                    snapshot of version t+1
    RolloutController ----------------> ReplayBuffer ----> Trainer ----> WeightTransport ----> InferenceEngine
            ^                                |                                                       |
            +---------- room in the buffer --+<------------------ published(t+1) --------------------+

| task      | consumes           | produces            | waits for                | woken by                       |
|-----------|--------------------|---------------------|--------------------------|--------------------------------|
| rollout   | examples           | finished groups     | room in the buffer       | `published`, a group rejected  |
| step      | a batch of groups  | weights, StepStats  | a batch that may be taken| a group finished or dropped    |
|           |                    |                     | `save`, `export`         | their copies are made          |
|           |                    |                     | the thread arl-train     | the end of its call            |
| delivery  | newest snapshot    | published version   | the servers              | their answers, update_timeout_s|
|           |                    |                     | held weights             | the end of the evaluation      |
| evaluation| held-out examples  | Evaluation          | its weights, its episodes| the step where it is due       |
| saving    | copies, RunState   | a checkpoint        | the disk, the event log  | the step where it is due       |
| `save`, `export` in other tasks | | a checkpoint, a model | the end of the step  | the step, which holds `_training` |
| `stop`    |                    | the run's totals    | rollout, delivery, evaluation | their ends                |

`step` and then `stop` run in the task that iterates the trainer; with max_staleness 0, `step` waits for its delivery,
too. The others are tasks of the run's TaskGroup. Blocking work (training, snapshots, checkpoints, file writes) crosses
to threads in `TrainThread` and `offload`, here, in weight_sync.py and checkpoints.py. The watchdog has a
thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

from msgspec import structs

from arl.api.engine import InferenceEngine, WeightTransport
from arl.api.errors import ArlError, ConfigError, ProcessLostError, end_with, first_error
from arl.api.events import NOWHERE, BatchTaken, BatchTrained, Events, EventStore, TokensCounted, TrainedSummary
from arl.api.html import run_html
from arl.api.settings.run import Config
from arl.api.settings.sections import settings_without_keys
from arl.api.types import Evaluation, Group, StepStats
from arl.rollout.buffer import Replay, ReplayBuffer
from arl.rollout.controller import RolloutController
from arl.rollout.episode_events import Candidate
from arl.runtime.threads import TrainThread, offload
from arl.training.checkpoints import Checkpoints, RunState, Saver, written
from arl.training.evaluation_loop import BestModel, Evaluations, Pin, hold_weights
from arl.training.evaluator import Evaluator
from arl.training.learner_process import RunLearner
from arl.training.metrics import RunTotals, batch_metrics, episode_rewards, publish_metrics, reward_metrics
from arl.training.metrics_log import RunLog, read_jsonl
from arl.training.token_log import ReportedBatch, named
from arl.training.watchdog import Watchdog
from arl.training.weight_sync import Delivery, DeviceTurns

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Trains `config.steps` batches, one for each iteration. `launch` builds it and closes its parts."""

    config: Config
    learner: RunLearner
    inference_engine: InferenceEngine
    transport: WeightTransport
    buffer: ReplayBuffer
    rollout: RolloutController
    evaluator: Evaluator | None
    checkpoints: Checkpoints
    log: RunLog
    thread: TrainThread
    replay: Replay = field(default_factory=Replay)
    totals: RunTotals = field(default_factory=RunTotals)
    events: EventStore = NOWHERE
    last_words: Callable[[str], object] = lambda reason: None
    """Called with the reason before a process that cannot end its run is ended."""

    def __post_init__(self) -> None:
        self.version = self.learner.version
        self._tasks = asyncio.TaskGroup()
        self._rollout_task: asyncio.Task[None] | None = None
        self._turns = DeviceTurns(
            is_colocated=self.config.engine.colocated,
            servers=self.inference_engine,
            learner=self.learner,
            thread=self.thread,
            events=self.events,
        )
        self._delivery = Delivery(
            turns=self._turns,
            transport=self.transport,
            inference_engine=self.inference_engine,
            buffer=self.buffer,
            thread=self.thread,
            tasks=self._tasks,
            events=self.events,
        )
        self._num_in_hand = 1
        """How many callers wait for arl. The run itself is one, except while its block runs."""
        self._training = asyncio.Lock()
        """Held while a batch is trained, or state is copied: never both at once."""
        self._saver = Saver(
            config=self.config.checkpoint,
            checkpoints=self.checkpoints,
            learner=self.learner,
            thread=self.thread,
            events=self.events,
        )
        evaluation, run_dir = self.config.evaluation, self.config.run_dir
        self._evaluations = self.evaluator and Evaluations(
            config=evaluation,
            evaluator=self.evaluator,
            pin=self._pin_weights,
            best=None if evaluation.keep_best is None else BestModel(run_dir, evaluation.keep_best),
            log=self.log,
            thread=self.thread,
            tasks=self._tasks,
            training=self._training,
        )
        self._batch: Sequence[Group] = ()
        """Groups taken but not yet trained. A step that is cancelled before its training leaves them to the next."""
        self._open_step: Step | None = None
        self._started_at: float | None = None
        self._recorded_at = 0.0
        self.last_step: StepStats | None = None
        """The last step of this process."""

    async def _pin_weights(self) -> Pin:
        """Pin the newest weights for an evaluation. The caller holds `_training`."""
        config = self.config.evaluation
        if config.hold_weights or self._turns.is_colocated:
            await self._catch_up_servers()
        if not config.hold_weights:
            return Pin(self._delivery)
        return await hold_weights(self._delivery, self.learner, self.thread, keeps_model=config.keep_best is not None)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Self]:
        """Serve and train inside the block. Its end saves a checkpoint and raises the first error of any task.

        It saves before it waits for the tasks to end, so an episode that ignores its cancellation cannot prevent it.
        """
        watchdog = Watchdog(
            self.config.stall_timeout_s,
            self._progress,
            lambda error: end_with(error, self._tasks),
            self.learner.whereabouts,
            self.last_words,
        )
        try:
            with watchdog.watching():
                async with self._tokens_noted(), self._tasks:
                    async with self._saved_at_the_end():
                        await self._publish()
                        await self._delivery.finished()
                        with self._in_hand(-1):
                            yield self
                    await self.stop()
                    self._delivery.end()
        except BaseExceptionGroup as errors:
            error = first_error(errors)
            raise error from error.__cause__

    # The loop ---------------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StepStats:
        with self._in_hand():
            await self._catch_up()
            if self.version >= self.config.steps:
                await self.stop()
                raise StopAsyncIteration
            if self._started_at is None:
                self._started_at = self._recorded_at = time.monotonic()
                self._rollout_task = self._tasks.create_task(self.rollout.run())
            return await self._step()

    async def _step(self) -> StepStats:
        """take_batch -> prepare (logprobs -> advantages -> minibatches) -> train (optimizer steps) -> publish."""
        began = time.monotonic()
        self._batch = self._batch or await self.buffer.take_batch(self.version)
        async with self._training:
            return await self._train(self._batch, began)

    async def _train(self, groups: Sequence[Group], began: float) -> StepStats:
        replayed, taken = self.replay.take(self.version), time.monotonic()
        self.events.emit(
            BatchTaken(
                version=self.version,
                groups=[group.group_id for group in groups],
                replayed=[group.group_id for group in replayed],
                waited_s=taken - began,
            )
        )
        await self._take_turn()
        batch = await self.thread(self.learner.prepare, groups, replayed)
        self._open_step = Step(
            groups=groups,
            replayed=replayed,
            advantages=batch.advantages,
            began=began,
            taken=taken,
            call=self.thread.submit(self.learner.train, batch),
        )
        self._batch = ()
        await self.thread.finish(self._open_step.call)
        self._settle()
        await self._publish()
        stats = await self._record()
        if self._evaluations:
            await self._evaluations.begin(self.version)
        if self._saver.is_due(self.version) and (saving := await self._begin_saving()):
            self._tasks.create_task(written(saving))
        return stats

    def _settle(self) -> None:
        """Mark the batch as trained if the engine has trained it, even if the step was cancelled meanwhile."""
        step = self._open_step
        if step and self.learner.version > self.version:
            self.version = self.learner.version
            is_trained, num_new = step.is_trained, len(step.groups)
            self.rollout.trained(step.groups, is_trained[:num_new])
            for group, own in zip(step.replayed, is_trained[num_new:], strict=True):
                self.rollout.tokens.replayed(group, own)
            self.replay.add(step.groups, self.version)
            step.trained = time.monotonic()

    async def _catch_up(self) -> None:
        """Log and publish a step that was cancelled after its training had begun."""
        async with self._training:
            await self._catch_up_servers()

    async def _catch_up_servers(self) -> None:
        """Publish what a cancelled step has trained, also to servers that it left asleep.

        The caller holds `_training`.
        """
        await self._end_open_step()
        if self._delivery.newest < self.version or self._turns.are_servers_asleep:
            await self._publish()

    async def _end_open_step(self) -> None:
        """Log a trained step that was cancelled before it was logged, or whose rows could not be written."""
        if self._open_step:
            await self.thread(lambda: None)  # a call whose waiter was cancelled may still run on the thread
            self._settle()
            if self._open_step.trained:
                await self._record()

    async def _publish(self) -> None:
        """Snapshot the weights; the servers get them during the next step, or before it with max_staleness 0, or where
        both take turns.
        """
        await self._take_turn()
        await self._delivery.begin(self.learner.engine)
        if self.config.rollout.max_staleness == 0 or self._turns.is_colocated:
            await self._delivery.finished()

    async def _take_turn(self) -> None:
        """Have the devices, if servers share them. The publish gives them back."""
        if self._turns.is_colocated:
            await self._delivery.finished()
            await self._delivery.unheld()
            await self._turns.to_trainer()

    # Beside the loop --------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Stop sampling for training, and save. Wait for an open delivery and a due evaluation. Idempotent."""
        if self._rollout_task:
            self._rollout_task.cancel()
            await self.save()  # first, because episodes may ignore their cancellation
            await asyncio.wait([self._rollout_task])
        self.totals.wall_s = self._wall_s()
        self._started_at = None
        await self._delivery.finished()
        if self._evaluations:
            if self._turns.are_servers_asleep:
                await self._catch_up()
            await self._evaluations.finished()
        await self._note_tokens(self.thread)

    async def _note_tokens(self, thread: Callable[..., Awaitable[None]]) -> None:
        """Write the ledger."""
        self.events.emit(tokens := self.rollout.tokens.counted())
        await thread(self.log.tokens, tokens)

    @asynccontextmanager
    async def _tokens_noted(self) -> AsyncGenerator[None]:
        """Write the ledger, too, if an error ends the block, whose tasks have been cancelled by then."""
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException:
            try:
                await self._note_tokens(offload)  # the training thread may hang
            except (ArlError, OSError) as failure:
                log.error("the tokens could not be counted to the end: %s", failure)
            except asyncio.CancelledError:  # a late signal: what was counted last stays
                pass
            raise

    async def evaluate(self) -> Evaluation:
        """Run the held-out examples on the newest weights. Raises ConfigError without held-out examples.

        Raises FailureBudgetError if all episodes fail before the first step: a run in which nothing works does not
        start.
        """
        if self._evaluations is None:
            raise ConfigError("evaluate() needs held-out examples; give launch an eval_dataset")
        with self._in_hand():
            return await self._evaluations.evaluate(is_first=self.last_step is None)

    @property
    def evaluations(self) -> Mapping[int, Evaluation]:
        """All evaluations in this run directory, by version."""
        return self._evaluations.done if self._evaluations else self.log.evaluations()

    async def save(self) -> None:
        """Write a checkpoint of the last trained version. Episodes in flight will run again.

        Any task may call it. It waits for a batch in training. Writes nothing if nothing was trained since the last
        checkpoint, or after a failed optimizer step, which may have changed the weights. Raises CheckpointError.
        """
        with self._in_hand():
            while True:
                async with self._training:
                    saving = await self._begin_saving()
                if saving is None or await written(saving):
                    return

    async def export(self, directory: Path) -> None:
        """Write the model, adapters merged, as a Hugging Face directory. Raises TransportError.

        Any task may call it. It waits for a batch in training.
        """
        with self._in_hand():
            while True:
                async with self._training:
                    snapshot = await self.thread(self.learner.engine.snapshot)
                try:
                    await offload(snapshot.write, directory)
                    return
                except ProcessLostError:
                    log.warning("the snapshot to export was lost with the trainer's process; another follows")
                finally:
                    snapshot.release()

    async def _begin_saving(self) -> asyncio.Future[None] | None:
        """See Saver.begin. The caller holds `_training`, and awaits `written` on the result."""
        await self._saver.finished()
        await self._end_open_step()
        if self._open_step is not None:  # the optimizer step has failed
            return None
        return await self._saver.begin(self.version, self._state)

    def _state(self) -> RunState:
        def sync() -> None:
            self.log.sync()  # the rows of its steps
            self.events.flush()  # the records of its episodes

        totals = replace(self.totals, wall_s=self._wall_s())
        values = {"version": self.version, "totals": asdict(totals), "rollout": self.rollout.state_dict()}
        return RunState(
            values=values | {"settings": settings_without_keys(self.config)},
            groups=self.buffer.untrained(self.version),
            replay=self.replay.groups,
            sync=sync,
        )

    @asynccontextmanager
    async def _saved_at_the_end(self) -> AsyncGenerator[None]:
        """Save, whatever ends the block. If saving fails too, the block's error is still the one raised."""
        try:
            yield
        except asyncio.CancelledError:
            await self._save_whatever_comes()
            raise
        except BaseException as error:
            try:
                await self._save_whatever_comes()
            except (ArlError, OSError) as failure:
                log.error("saving at the end of the run failed, too: %s", failure)
                error.add_note(str(failure))
            raise
        await self._save_whatever_comes()

    async def _save_whatever_comes(self) -> None:
        """Save, and let a cancellation meanwhile (a late signal, a task that fails) take effect only then."""
        try:
            await self.save()
        except asyncio.CancelledError:
            await self._save_whatever_comes()  # goes on with the checkpoint that has begun
            raise

    def _wall_s(self) -> float:
        return self.totals.wall_s + (0.0 if self._started_at is None else time.monotonic() - self._started_at)

    # What the watchdog sees --------------------------------------------------------------------------------------

    def _progress(self) -> object:
        """Changes whenever the run moves; None while the script's own code runs, as in the body of its loop."""
        if not self._num_in_hand:
            return None
        beats = self.rollout.pulse.beats, self.learner.pulse
        return self.learner.version, self.version, self.published_version, beats, self._num_in_hand

    @contextmanager
    def _in_hand(self, change: int = 1) -> Generator[None]:
        """Count one more caller that waits for arl within the block; with -1, one fewer."""
        self._num_in_hand += change
        try:
            yield
        finally:
            self._num_in_hand -= change

    # Numbers ----------------------------------------------------------------------------------------------------

    async def _record(self) -> StepStats:
        """Log the trained step. This collects the loop's numbers; a thread does the rest.

        A step whose rows could not be written stays open: no checkpoint is written without them.
        """
        step = self._open_step
        if step is None:
            raise RuntimeError("there is no trained step to record")
        now, trained = time.monotonic(), step.call.result()
        known = {
            "time_s": self._wall_s(),
            "time/wait_s": step.taken - step.began,
            "time/train_s": (step.trained or now) - step.taken,
            "samples_per_s": sum(group.num_episodes for group in step.groups) / max(now - self._recorded_at, 1e-9),
            "trainer/recoveries": self.learner.num_recoveries,
            **trained.metrics,
            **publish_metrics(self._delivery.published),
            **self._turns.metrics,
            **self.rollout.counters(),
            **self.inference_engine.counters(),
        }
        if self.log.tracks(self.version):
            step.failed += self.rollout.failures.take()
        tokens = self.rollout.tokens.counted()
        stats = await self.thread(log_step, self.log, self.totals, step, self.version, known, tokens)
        report_step(self.events, step, self.version, known["time/train_s"])
        self.events.emit(tokens)
        self._open_step, self._recorded_at, self.last_step = None, now, stats
        return stats

    @property
    def published_version(self) -> int | None:
        """The newest version that every serving server holds; None before the first delivery."""
        return self._delivery.published and self._delivery.published.version

    @property
    def since_step_s(self) -> float | None:
        """Seconds since the last step ended, or training began; None before."""
        return time.monotonic() - self._recorded_at if self._recorded_at else None

    def summary(self) -> dict[str, float]:
        """Totals of the whole run, resumes included: steps, time, throughput, staleness, episodes."""
        wall_s, counters = self._wall_s(), self.rollout.counters()
        return {
            "steps": self.version,
            "wall_s": wall_s,
            "samples_per_s": counters["episodes_trained"] / wall_s if wall_s else 0.0,
            "max_staleness": self.config.rollout.max_staleness,
            "max_staleness_seen": self.totals.max_staleness_seen,
            **{name: counters[name] for name in ("episodes_trained", "episodes_rejected", "episodes_dropped")},
            **self.rollout.tokens.summary(),
            **self.rollout.lengths.summary(),
        }

    def _repr_html_(self) -> str:
        """For a notebook."""
        facts = {"run_dir": self.config.run_dir, "steps": f"{self.version} of {self.config.steps}"}
        evaluations = [asdict(evaluation) for evaluation in self.evaluations.values()]
        return run_html("Trainer", facts, read_jsonl(self.config.run_dir / "metrics.jsonl"), evaluations)


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """A batch from the start of its training until its log line. Times are of the monotonic clock."""

    groups: Sequence[Group]
    replayed: Sequence[Group]
    """Groups of earlier batches, trained with the new ones."""
    advantages: Sequence[float | None]
    """Of the trajectories of `groups`, then of those of `replayed`; see PreparedBatch."""
    began: float
    """When the wait for the batch began."""
    taken: float
    """When the wait ended."""
    call: asyncio.Future[ReportedBatch]
    trained: float | None = None
    """When training ended."""
    failed: list[Candidate] = field(default_factory=list[Candidate])
    """Failed episodes that trackers get with the step."""

    @property
    def is_trained(self) -> list[list[bool]]:
        """For each of `groups`, then each of `replayed`: whether the algorithm trained each of its trajectories."""
        left = iter(self.advantages)
        return [[next(left) is not None for _ in group.trajectories] for group in (*self.groups, *self.replayed)]


def log_step(
    log: RunLog, totals: RunTotals, step: Step, version: int, known: Mapping[str, float], tokens: TokensCounted
) -> StepStats:
    """Log the step that led to `version`. It touches only its arguments, because the event loop goes on.

    known: metrics computed before.
    """
    rewards = episode_rewards(step.groups)
    numbers = batch_metrics(step.groups, version - 1, step.replayed, step.is_trained)
    metrics = {"version": version, **reward_metrics(rewards), **numbers, **known}
    stats = StepStats(
        version=version,
        reward=metrics["reward"],
        num_episodes=len(rewards),
        mean_staleness=numbers["staleness/mean"],
        max_staleness_seen=int(numbers["staleness/max"]),
        wait_s=known["time/wait_s"],
        train_s=known["time/train_s"],
        metrics=metrics,
        remark=log.health.remark(metrics),
    )
    totals.max_staleness_seen = max(totals.max_staleness_seen, stats.max_staleness_seen)  # a cancelled step counts, too
    log.step(stats, step.groups, step.advantages, step.failed)
    log.tokens(tokens)
    return stats


def report_step(events: Events, step: Step, version: int, seconds: float) -> None:
    """Give the event log the step that led to `version`."""
    reported = step.call.result()
    names = [name for group in step.groups for name in named(group)]
    events.emit(
        BatchTrained(
            version=version,
            groups=[group.group_id for group in step.groups],
            seconds=seconds,
            cpu_s=reported.cpu_s,
            trajectories=[TrainedSummary(*name[:2], *own) for name, own in zip(names, reported.numbers, strict=False)],
        )
    )
    images = {name[:2]: [placed.image for placed in name[2].images] for name in names if name[2].images}
    for tokens in reported.tokens:
        own = {image: None for row in tokens.rows for image in images.get(row, ())}
        events.keep(structs.replace(tokens, images=[*own]) if own else tokens)

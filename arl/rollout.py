"""RolloutController: runs episodes as fast as the buffer admits groups, and accounts for every example.

    dataset --> ledger --issue--> group --episodes--> finish  --> ReplayBuffer --> Trainer --trained--> ledger
                  ^                 |                                                                     |
                  +---- settle -----+---- rejected, dropped --> release --> ReplayBuffer                  |
                  +--------------------------------- settle ----------------------------------------------+

| task | consumes | produces | waits for | woken by |
|---|---|---|---|---|
| run | room, an example | a group's task | a free episode place, `admit` | an episode's end; `published`, `release` |
| a group | an example | a finished group, or a free place | its episodes | their end, their time limit, a cut |
| an episode | an episode place | trajectories | the workflow | engine, tools, its time limit |
| stragglers | groups that keep the trainer waiting | cuts | `wait_for_stragglers` | the buffer, the clock |

All are tasks of one TaskGroup that lives as long as `run`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from arl.api.config import RolloutConfig
from arl.api.engine import InferenceEngine
from arl.api.errors import StarvedError, first_error
from arl.api.types import Example, Group
from arl.api.workflow import RolloutWorkflow
from arl.buffer import ReplayBuffer, Slot
from arl.episode import Episode, EpisodeRunner, FailureBudget
from arl.lag import LagMonitor
from arl.ledger import ExampleLedger, Issue, Outcome

log = logging.getLogger(__name__)


class Dataset(Protocol):
    """What examples are read from: a list of them, or a Hugging Face dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


@dataclass(slots=True, kw_only=True)
class RolloutTotals:
    """Episodes by how they ended, counted since the beginning of the run. Each is trained, rejected or dropped.

    episodes_rejected: returned None, or belonged to a group that was rejected. episodes_dropped: failed, or belonged
    to a group that was dropped. episodes_failed: those among the dropped that raised or timed out.
    episodes_retried: attempts that failed and were followed by another. groups_finished: groups handed to the buffer.
    groups_returned: finished groups of a checkpoint that run again, since rollout.batch_size or max_staleness, changed
    after it, leave no batch that could hold them in time.
    straggler_groups: groups cut because they kept the trainer waiting; straggler_episodes and straggler_s: their
    episodes that were cut while running, and the seconds these had run by then. finished_episodes and finished_s: the
    same for episodes that returned trajectories. All times in seconds, summed.
    """

    episodes_trained: int = 0
    episodes_rejected: int = 0
    episodes_dropped: int = 0
    episodes_failed: int = 0
    episodes_retried: int = 0
    groups_finished: int = 0
    groups_returned: int = 0
    straggler_groups: int = 0
    straggler_episodes: int = 0
    straggler_s: float = 0.0
    finished_episodes: int = 0
    finished_s: float = 0.0

    def count_episode(self, episode: Episode) -> None:
        self.episodes_retried += episode.attempts - 1
        self.episodes_failed += episode.error is not None
        if episode.is_finished:
            self.finished_episodes += 1
            self.finished_s += episode.elapsed_s

    def count_straggler(self, elapsed_s: float) -> None:
        self.straggler_episodes += 1
        self.straggler_s += elapsed_s


@dataclass(kw_only=True, eq=False)
class _GroupRun:
    """A group while it runs. episodes: by index, None until ended. launched: all have places, or none will get one."""

    slot: Slot
    issue: Issue
    episodes: list[Episode | None]
    launched: asyncio.Event = field(default_factory=asyncio.Event)
    scope: asyncio.Timeout | None = None
    is_cut: bool = False

    @property
    def finished(self) -> list[tuple[int, Episode]]:
        return [(index, e) for index, e in enumerate(self.episodes) if e is not None and e.is_finished]

    @property
    def num_failed(self) -> int:
        return sum(e is not None and e.error is not None for e in self.episodes)

    @property
    def num_rejected(self) -> int:
        return sum(e is not None and e.is_rejected for e in self.episodes)

    def cut(self) -> None:
        """Cancel its episodes, those that have not begun too."""
        self.is_cut = True
        if self.scope:
            self.scope.reschedule(asyncio.get_running_loop().time())


class RolloutController:
    """Turns examples into groups of finished episodes in the buffer.

    keep: an optional filter; a finished group for which it is false is rejected. The controller owns none of its
    collaborators. Raises, out of `run`, FailureBudgetError and StarvedError.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        workflow: RolloutWorkflow,
        dataset: Dataset,
        config: RolloutConfig,
        buffer: ReplayBuffer,
        seed: int = 0,
        keep: Callable[[Group], bool] | None = None,
    ) -> None:
        self._runner = EpisodeRunner(
            engine=engine, workflow=workflow, timeout_s=config.episode_timeout_s, retries=config.episode_retries
        )
        self._dataset = dataset
        self._config = config
        self._buffer = buffer
        self._keep = keep
        self._ledger = ExampleLedger(len(dataset), shuffle=config.shuffle, seed=seed)
        self._budget = FailureBudget(config.max_failure_rate, config.failure_window)
        self._places = asyncio.Semaphore(config.max_concurrent_episodes)
        self._lag = LagMonitor(type(workflow).__name__)
        self._running: dict[int, _GroupRun] = {}
        self._totals = RolloutTotals()
        self._fruitless_groups = 0
        self._was_run = False

    @property
    def ledger(self) -> ExampleLedger:
        """Which examples are pending, and how the others ended."""
        return self._ledger

    async def run(self) -> None:
        """Admit and run groups until cancelled; once in a controller's life, since what it leaves stays pending."""
        if self._was_run:
            raise RuntimeError("run was called again; make another controller, and give it this one's state_dict")
        self._was_run = True
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._lag.run())
                if self._config.drop_stragglers_after_s is not None:
                    tasks.create_task(self._cut_stragglers(self._config.drop_stragglers_after_s))
                while True:
                    async with self._places:
                        pass  # a place is free, and no episode of an earlier group waits for one
                    run = await self._admit()
                    tasks.create_task(self._run_group(run))
                    await run.launched.wait()
        except BaseExceptionGroup as errors:
            error = first_error(errors)
            raise error from error.__cause__

    def trained(self, groups: Iterable[Group]) -> None:
        """Settle the examples of a batch that the train engine has trained on, before anything is saved.

        Their outcome and the weights then change together, as far as a checkpoint can see.
        """
        for group in groups:
            self._ledger.settle(group.example_id, Outcome.TRAINED)
            self._totals.episodes_trained += group.num_episodes

    def counters(self) -> dict[str, float]:
        """What happened to episodes so far, for logs.

        finished_episode_s and straggler_episode_s are means: how long episodes ran that finished, and how long those
        had run that were cut as stragglers. Their difference is the length bias that cutting causes.
        """
        totals = asdict(self._totals)
        counters = {name: totals[name] for name in totals if name not in ("straggler_s", "finished_s")}
        if self._totals.finished_episodes:
            counters["finished_episode_s"] = self._totals.finished_s / self._totals.finished_episodes
        if self._totals.straggler_episodes:
            counters["straggler_episode_s"] = self._totals.straggler_s / self._totals.straggler_episodes
        counters["event_loop_lag_s"] = self._lag.worst_s
        return counters

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs beside the buffer's untrained groups, as JSON holds it."""
        return {"ledger": self._ledger.state_dict(), "totals": asdict(self._totals)}

    def load_state_dict(self, state: Mapping[str, Any], groups: Sequence[Group] = ()) -> None:
        """Continue from `state_dict`, before `run`. groups: the buffer's untrained ones, of the same moment.

        Examples that were running then run again. Raises CheckpointError if it is another dataset's or order's.
        """
        returned = self._buffer.restore(groups)
        finished = {group.example_id for group in groups} - {group.example_id for group in returned}
        self._ledger.load_state_dict(state["ledger"], finished)
        self._totals = RolloutTotals(**state["totals"])
        self._totals.groups_returned += len(returned)
        if returned:
            log.warning(
                "%d finished groups of the checkpoint would be older than rollout.max_staleness=%d when a batch of "
                "rollout.batch_size=%d takes them: their examples run again",
                len(returned),
                self._config.max_staleness,
                self._config.batch_size,
            )

    # A group ----------------------------------------------------------------------------------------------------

    async def _admit(self) -> _GroupRun:
        slot = await self._buffer.admit()
        run = _GroupRun(slot=slot, issue=self._ledger.issue(), episodes=[None] * self._config.group_size)
        self._running[slot.number] = run
        return run

    async def _run_group(self, run: _GroupRun) -> None:
        try:
            async with asyncio.timeout(0 if run.is_cut else None) as run.scope:
                await self._run_episodes(run)
        except TimeoutError:
            if not run.is_cut:
                raise
        finally:
            run.launched.set()
        await self._end(run)

    async def _run_episodes(self, run: _GroupRun) -> None:
        """Run the group's episodes, each as soon as it gets a place; places are given in order of admission."""
        example = self._dataset[run.issue.example_id[1]]
        async with asyncio.TaskGroup() as episodes:
            for index in range(len(run.episodes)):
                await self._places.acquire()
                task = episodes.create_task(self._run_episode(run, index, example))
                task.add_done_callback(lambda _: self._places.release())
            run.launched.set()

    async def _run_episode(self, run: _GroupRun, index: int, example: Example) -> None:
        epoch, row = run.issue.example_id
        clock = asyncio.get_running_loop()
        began = clock.time()
        try:
            episode = await self._runner.run(
                example, name=f"episode {index} of example {row}, epoch {epoch},", oldest_allowed=run.slot.stamp
            )
        except asyncio.CancelledError:
            if run.is_cut:
                self._totals.count_straggler(clock.time() - began)
            raise
        run.episodes[index] = episode
        self._totals.count_episode(episode)
        self._budget.record(episode)

    async def _end(self, run: _GroupRun) -> None:
        """Hand the group over, or free its place at once. A group that was cut has lost its place before."""
        self._running.pop(run.slot.number, None)
        outcome = Outcome.DROPPED if run.is_cut else self._judge(run)
        if isinstance(outcome, Group):
            self._fruitless_groups = 0
            self._totals.groups_finished += 1
            self._count_lost(run, kept=len(run.finished))
            await self._buffer.finish(run.slot, outcome)
            return
        self._ledger.settle(run.issue.example_id, outcome)
        self._count_lost(run, kept=0, finished_are_dropped=outcome is Outcome.DROPPED)
        if not run.is_cut:
            await self._buffer.release(run.slot)
        self._check_starvation(outcome)

    def _judge(self, run: _GroupRun) -> Group | Outcome:
        """The group to train on, or why there is none: too few episodes, all rewards equal, or the user's filter."""
        enough = min(self._config.min_group_size, self._config.group_size)
        num_finished = len(run.finished)
        if num_finished < enough:
            return Outcome.DROPPED if num_finished + run.num_failed >= enough else Outcome.REJECTED
        group = _group(run)
        if self._config.drop_equal_rewards and _has_equal_rewards(group):
            return Outcome.REJECTED
        if self._keep is not None and not self._keep(group):
            return Outcome.REJECTED
        return group

    def _count_lost(self, run: _GroupRun, *, kept: int, finished_are_dropped: bool = False) -> None:
        """Count the episodes that will not be trained: those of a cut group that never ended are dropped too."""
        lost = len(run.episodes) - kept
        finished_but_rejected = 0 if kept or finished_are_dropped else len(run.finished)
        rejected = run.num_rejected + finished_but_rejected
        self._totals.episodes_rejected += rejected
        self._totals.episodes_dropped += lost - rejected

    def _check_starvation(self, outcome: Outcome) -> None:
        """A thousand groups, or ten batches if these are more, without one to train on: it will not change by itself.

        Fewer would stop a run on hard examples that would have learned from a lucky one.
        """
        self._fruitless_groups += 1
        if self._fruitless_groups >= max(1000, 10 * self._config.batch_size):
            raise StarvedError(
                f"the last {self._fruitless_groups} groups were all rejected or dropped (the last one was "
                f"{outcome.name.lower()}), so there is nothing to train on; see whether arun_episode returns None "
                "always, whether all rewards are equal (rollout.drop_equal_rewards), and whether "
                "rollout.drop_stragglers_after_s is shorter than a usual episode"
            )

    async def _cut_stragglers(self, after_s: float) -> None:
        """Cut groups that keep the trainer waiting; each frees its place before its episodes are done with dying."""
        while True:
            for slot in await self._buffer.wait_for_stragglers(after_s):
                run = self._running.pop(slot.number, None)
                if run is None:
                    continue  # its episodes have just ended, and it is about to be handed over
                epoch, row = run.issue.example_id
                log.warning(
                    "example %d of epoch %d was dropped: it kept the trainer waiting for more than "
                    "rollout.drop_stragglers_after_s=%g",
                    row,
                    epoch,
                    after_s,
                )
                self._totals.straggler_groups += 1
                run.cut()
                await self._buffer.release(slot)


def _has_equal_rewards(group: Group) -> bool:
    """Whether each role's trajectories all have the same reward, so that all advantages are 0."""
    return len({(t.role, t.reward) for t in group.trajectories}) == len({t.role for t in group.trajectories})


def _group(run: _GroupRun) -> Group:
    """Trajectories in the order of their episodes."""
    return Group(
        group_id=run.issue.group_id,
        example_id=run.issue.example_id,
        stamp=run.slot.stamp,
        trajectories=tuple(t for _, episode in run.finished for t in episode.trajectories),
        episode_indices=tuple(index for index, episode in run.finished for _ in episode.trajectories),
    )


async def run_examples(
    engine: InferenceEngine,
    workflow: RolloutWorkflow,
    examples: Sequence[Example] | Dataset,
    *,
    max_concurrent: int,
    timeout_s: float,
) -> list[Episode]:
    """One episode for each example, in their order, `max_concurrent` at a time: for evaluation.

    A failed episode is recorded in the log and has an `error`; it and a rejected one have reward 0.
    """
    runner = EpisodeRunner(engine=engine, workflow=workflow, timeout_s=timeout_s)
    episodes: dict[int, Episode] = {}
    indices = iter(range(len(examples)))

    async def run_next_ones() -> None:
        for index in indices:
            episodes[index] = await runner.run(examples[index], name=f"evaluation of example {index}")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(max_concurrent, len(examples))):
            tasks.create_task(run_next_ones())
    return [episodes[index] for index in range(len(examples))]

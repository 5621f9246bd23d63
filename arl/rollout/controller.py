"""RolloutController: runs episodes as fast as the buffer admits groups, and accounts for every example.

    dataset --> ledger --issue--> group --episodes--> finish  --> ReplayBuffer --> Trainer --trained--> ledger
                  ^                 |                                                                     |
                  +---- settle -----+---- rejected, dropped --> release --> ReplayBuffer                  |
                  +--------------------------------- settle ----------------------------------------------+

| task | consumes | produces | waits for | woken by |
|---|---|---|---|---|
| run | room, an example | a group's task | a free episode place, `admit` | an episode's end; `published`, `release` |
| a group | an example | a finished group, or a free place | its episodes | enough of them, their time limit, a cut |
| an episode | an episode place | trajectories | the workflow | engine, tools, its time limit |
| stragglers | groups that keep the trainer waiting | cuts | `wait_for_stragglers` | the buffer, the clock |

All are tasks of one TaskGroup that lives as long as `run`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from arl.api.config import RolloutConfig
from arl.api.engine import InferenceEngine
from arl.api.errors import first_error
from arl.api.types import Example, Group
from arl.api.workflow import Curriculum, RolloutWorkflow
from arl.rollout.buffer import ReplayBuffer
from arl.rollout.episode import Episode, EpisodeRunner, EpisodeSampler, FailureBudget
from arl.rollout.group import GREEDY, GroupRules, GroupRun
from arl.rollout.ledger import ExampleLedger, Outcome
from arl.rollout.totals import RolloutTotals
from arl.rollout.watches import LagMonitor, StarvationWatch

log = logging.getLogger(__name__)


class Dataset(Protocol):
    """What examples are read from: a list of them, or a Hugging Face dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


class RolloutController:
    """Turns examples into groups of finished episodes in the buffer.

    rules: which groups can be trained on. curriculum: which examples come next; without one, shuffled epochs. The
    controller owns none of its collaborators. Raises, out of `run`, FailureBudgetError, StarvedError and
    CurriculumError.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        workflow: RolloutWorkflow,
        dataset: Dataset,
        config: RolloutConfig,
        buffer: ReplayBuffer,
        seed: int = 0,
        rules: GroupRules = GroupRules(),  # noqa: B008 - it is frozen
        curriculum: Curriculum | None = None,
    ) -> None:
        self._engine = engine
        self._runner = EpisodeRunner(
            workflow=workflow, timeout_s=config.episode_timeout_s, retries=config.episode_retries
        )
        self._dataset = dataset
        self._config = config
        self._buffer = buffer
        self._seed = seed
        self._rules = rules
        self._ledger = ExampleLedger(len(dataset), shuffle=config.shuffle, seed=seed, curriculum=curriculum)
        self._budget = FailureBudget(config.max_failure_rate, config.failure_window)
        self._places = asyncio.Semaphore(config.max_concurrent_episodes)
        self._lag = LagMonitor(type(workflow).__name__)
        self._running: dict[int, GroupRun] = {}
        self._totals = RolloutTotals()
        # Fewer would end a run on hard examples that would have learned from a lucky one.
        patience = max(1000, 10 * config.batch_size)
        self._starvation = StarvationWatch(window=max(32, config.batch_size), patience=patience)
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

        finished_episode_s, straggler_episode_s and overtaken_episode_s are means: how long episodes ran that finished,
        and how long those had run that were cut as stragglers, or as others of their group were enough. The difference
        is the length bias that cutting causes.
        """
        return {**self._totals.counters(), "event_loop_lag_s": self._lag.worst_s}

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

    async def _admit(self) -> GroupRun:
        slot = await self._buffer.admit()
        run = GroupRun(slot=slot, issue=self._ledger.issue(), config=self._config, rules=self._rules)
        self._running[slot.number] = run
        return run

    async def _run_group(self, run: GroupRun) -> None:
        """Hand the group over as soon as it is decided, though episodes that it does not need may be slow to end."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run_episodes(run))
            await run.decided.wait()
            await self._end(run)

    async def _run_episodes(self, run: GroupRun) -> None:
        """Run the group's episodes, each as soon as it gets a place; places are given in order of admission."""
        example = self._dataset[run.issue.example_id[1]]
        try:
            async with asyncio.timeout(0 if run.is_cut else None) as run.scope, asyncio.TaskGroup() as episodes:
                for index in run.indices:
                    await self._places.acquire()
                    if run.is_full:
                        self._places.release()
                        break
                    run.tasks[index] = episodes.create_task(self._run_episode(run, index, example))
                    run.tasks[index].add_done_callback(lambda _: self._places.release())
                run.launched.set()
        except TimeoutError:
            if not run.is_cut:
                raise
        finally:
            run.scope = None  # from here on a cut is no more than a note: a scope that is closed cannot be rescheduled
            run.launched.set()
        run.decided.set()

    async def _run_episode(self, run: GroupRun, index: int, example: Example) -> None:
        clock = asyncio.get_running_loop()
        began = clock.time()
        try:
            episode = await self._runner.run(
                self._sampler_for(run, index), example, name=_name(run, index), oldest_allowed=run.slot.stamp
            )
        except asyncio.CancelledError:
            if index != GREEDY:
                self._totals.count_cancelled(run, clock.time() - began)
            raise
        run.ended(index, episode)
        if index == GREEDY:
            self._totals.count_baseline(episode)
        else:
            self._totals.count_episode(episode)
        self._budget.record(episode)

    def _sampler_for(self, run: GroupRun, index: int) -> EpisodeSampler:
        seed = f"{self._seed}-{run.issue.group_id}-{index}" if self._config.seed_requests else None
        return EpisodeSampler(self._engine, is_greedy=index == GREEDY, seed=seed)

    async def _end(self, run: GroupRun) -> None:
        """Hand the group over, or free its place at once. A group that was cut has lost its place before."""
        self._running.pop(run.slot.number, None)
        judged = run.judge()
        self._totals.count_group(run, judged)
        if run.reward is not None and not run.is_cut:
            self._ledger.note_reward(run.issue.example_id, run.reward)
        if isinstance(judged, Group):
            self._starvation.fruitful()
            await self._buffer.finish(run.slot, judged)
            return
        self._ledger.settle(run.issue.example_id, judged.outcome)
        if not run.is_cut:
            await self._buffer.release(run.slot)
        self._starvation.fruitless(judged)

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


def _name(run: GroupRun, index: int) -> str:
    """What the log calls an episode."""
    epoch, row = run.issue.example_id
    which = "the greedy episode" if index == GREEDY else f"episode {index}"
    return f"{which} of example {row}, epoch {epoch},"


async def run_examples(
    engine: InferenceEngine,
    workflow: RolloutWorkflow,
    examples: Sequence[Example] | Dataset,
    *,
    max_concurrent: int,
    timeout_s: float,
    seed: int | None = None,
) -> list[Episode]:
    """One episode for each example, in their order, `max_concurrent` at a time: for evaluation.

    seed: each request gets a seed of its own, the same in every evaluation.
    A failed episode is recorded in the log and has an `error`; it and a rejected one have reward 0.
    """
    runner = EpisodeRunner(workflow=workflow, timeout_s=timeout_s)
    episodes: dict[int, Episode] = {}
    indices = iter(range(len(examples)))

    async def run_next_ones() -> None:
        for index in indices:
            sampler = EpisodeSampler(engine, seed=None if seed is None else f"{seed}-evaluation-{index}")
            episodes[index] = await runner.run(sampler, examples[index], name=f"evaluation of example {index}")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(max_concurrent, len(examples))):
            tasks.create_task(run_next_ones())
    return [episodes[index] for index in range(len(examples))]

"""RolloutController: runs episodes as fast as the buffer admits groups, and accounts for every example.

    dataset --> ledger --issue--> group --episodes--> finish  --> ReplayBuffer --> Trainer --trained--> ledger
                  ^                 |                                                                     |
                  +---- settle -----+---- rejected, dropped --> release --> ReplayBuffer                  |
                  +--------------------------------- settle ----------------------------------------------+

| task | consumes | produces | waits for | woken by |
|---|---|---|---|---|
| run | room, an example | a group's task | a free place; `admit`; `launched` | an episode; `published`, `release` |
| | rows of a stream | | `ready` | a thread that has read them |
| a group | an example | a finished group, or a free place | `_decided` | its episodes: enough, or all, have ended |
| an episode | an episode place | trajectories | the workflow | engine, tools, its time limit, a cut |
| stragglers | groups that keep the trainer waiting | cuts | `wait_for_stragglers` | the buffer, the clock |

All are tasks of one TaskGroup that lives as long as `run`; the episodes of a group are tasks of its own, within it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from arl.api.engine import Sampler
from arl.api.errors import first_error
from arl.api.events import Fate, GroupAdmitted, GroupEnded, KeptTokens
from arl.api.settings.run import RolloutConfig
from arl.api.types import Example, Group
from arl.rollout.buffer import ReplayBuffer
from arl.rollout.episode import Episode, EpisodeRunner, EpisodeSampler
from arl.rollout.episode_events import Candidate, EpisodeReport, FirstFailures, HeldOut, shown, told
from arl.rollout.group import GREEDY, Fruitless, GroupRules, GroupRun, episode_name
from arl.rollout.ledger import ExampleLedger, GroupOutcome, Issue, StreamLedger
from arl.rollout.monitors import (
    FailureBudget,
    LagMonitor,
    LengthWatch,
    ReturnWatch,
    RolloutTotals,
    StarvationWatch,
    collect_garbage,
)

if TYPE_CHECKING:
    from arl.rollout.tasks import TaskLedger

log = logging.getLogger(__name__)


class Dataset(Protocol):
    """Examples by index: a list, or a Hugging Face dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


class RolloutController:
    """Turns examples into groups of finished episodes in the buffer.

    The controller owns none of its collaborators. `run` raises FailureBudgetError, StarvedError and CurriculumError.
    In a run of tasks it looks up by an example's task: its dataset, the runner of its episodes, and its groups' rules.
    """

    def __init__(
        self,
        engine: Sampler,
        runner: EpisodeRunner,
        dataset: Dataset | Mapping[str, Dataset],
        config: RolloutConfig,
        buffer: ReplayBuffer,
        seed: int = 0,
        rules: GroupRules | Mapping[str, GroupRules] = GroupRules(),  # noqa: B008 - it is frozen
        ledger: ExampleLedger | StreamLedger | TaskLedger | None = None,
    ) -> None:
        """dataset, rules: or those of each task. A stream's ledger has its examples itself. ledger: None: of epochs of
        the dataset."""
        self._events = runner.events
        self._engine = engine
        self._runner = runner
        self.pulse = runner.pulse
        self.tokens = runner.tokens
        self.lengths = LengthWatch()
        self._datasets = cast("Mapping[str, Dataset]", dataset if isinstance(dataset, Mapping) else {"": dataset})
        self._config = config
        self._buffer = buffer
        self._seed = seed
        self._rules = {"": rules} if isinstance(rules, GroupRules) else rules
        self.ledger = ledger or ExampleLedger(len(self._datasets[""]), shuffle=config.shuffle, seed=seed)
        self._budget = FailureBudget(config.max_failure_rate)
        self.failures = FirstFailures()
        group_size = max(one.group_size or config.group_size for one in self._rules.values())
        self._returns = ReturnWatch(runner.called, config.batch_size * group_size)
        self._places = asyncio.Semaphore(config.max_concurrent_episodes)
        self._lag = LagMonitor(runner.called)
        self._running: dict[int, GroupRun] = {}
        self._totals = RolloutTotals()
        # Fewer would end a run on hard examples that would have learned from a lucky one.
        patience = max(1000, 10 * config.batch_size)
        self._starvation = StarvationWatch(window=max(32, config.batch_size), patience=patience)
        self._was_run = False

    async def run(self) -> None:
        """Admit and run groups until cancelled; once in a controller's life, since what it leaves stays pending."""
        if self._was_run:
            raise RuntimeError("run was called again; make another controller, and give it this one's state_dict")
        self._was_run = True
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._lag.run())
                tasks.create_task(collect_garbage())
                if self._config.drop_stragglers_after_s is not None:
                    tasks.create_task(self._cut_stragglers(self._config.drop_stragglers_after_s))
                while True:
                    async with self._places:
                        pass  # a place is free, and no episode of an earlier group waits for one
                    run = await self._admit()
                    tasks.create_task(self._run(run))
                    await run.launched.wait()
        except BaseExceptionGroup as errors:
            error = first_error(errors)
            raise error from error.__cause__

    def trained(self, groups: Iterable[Group], is_trained: Sequence[Sequence[bool]] | None = None) -> None:
        """Settle the examples of a trained batch: before anything is saved, as a checkpoint holds the weights too.

        is_trained: for each group, whether the algorithm trained each trajectory; None: it trained all.
        """
        for place, group in enumerate(groups):
            self.ledger.settle(group.example_id, GroupOutcome.TRAINED, group.task)
            self.tokens.trained(group, is_trained[place] if is_trained else None)
            self._totals.episodes_trained += group.num_episodes

    def counters(self) -> dict[str, float]:
        """Counts of the episodes so far, for logs."""
        return {**self._totals.counters(), **self.ledger.counters(), "event_loop_lag_s": self._lag.worst_s}

    def state_dict(self) -> dict[str, Any]:
        """The state that a resume needs beside the buffer's untrained groups, as JSON values."""
        return {
            "ledger": self.ledger.state_dict(),
            "totals": asdict(self._totals),
            "tokens": self.tokens.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], groups: Sequence[Group] = ()) -> None:
        """Continue from `state_dict`, before `run`. groups: the buffer's untrained ones. Raises CheckpointError."""
        returned = self._buffer.restore(groups)
        held = {group.group_id for group in groups} - {group.group_id for group in returned}
        self.ledger.load_state_dict(state["ledger"], held)
        self._totals = RolloutTotals(**state["totals"])
        self._totals.groups_returned += len(returned)
        self.tokens.load_state_dict(state["tokens"], held)
        if returned:
            log.warning(
                "%d finished groups of the checkpoint would be older than rollout.max_staleness=%d when a batch of "
                "rollout.batch_size=%d takes them: their examples run again",
                len(returned),
                self._config.max_staleness,
                self._config.batch_size,
            )

    async def _admit(self) -> GroupRun:
        await self.ledger.ready()
        slot = await self._buffer.admit()
        issue = self.ledger.issue()
        epoch, row = issue.example_id
        example = self._datasets[issue.task][row] if issue.example is None else issue.example  # read once, for all
        columns = shown(example)
        self._events.emit(
            GroupAdmitted(
                group=issue.group_id, epoch=epoch, row=row, stamp=slot.stamp, example=columns, task=issue.task
            )
        )
        rules, play = self._rules[issue.task], partial(self._play, example)
        run = GroupRun(slot, issue, self._config, rules, self._places, play, columns)
        self._running[slot.number] = run
        return run

    async def _run(self, run: GroupRun) -> None:
        await run.run(self._take)
        self.lengths.note(run.lengths, run.kept if run.is_trainable else ())

    async def _play(self, example: Example, run: GroupRun, index: int) -> Episode:
        clock = asyncio.get_running_loop()
        began = clock.time()
        seed = f"{self._seed}-{run.issue.group_id}-{index}" if self._config.seed_requests else None
        sampler = EpisodeSampler(self._engine, is_greedy=index == GREEDY, seed=seed)
        name = f"{'the greedy episode' if index == GREEDY else f'episode {index}'} of {_named(run.issue)}"
        runner = self._runner.of(run.issue.task)
        report = EpisodeReport(self._events, episode_name(run.issue.group_id, index), tokens=self.tokens)
        try:
            episode = await runner.run(sampler, example, name=name, report=report, oldest_allowed=run.slot.stamp)
        except asyncio.CancelledError:
            fate = Fate.STRAGGLER if run.is_cut else Fate.OVERTAKEN if run.is_full else Fate.STOPPED
            report.cancelled(fate.value)
            self._end(run, index, fate, is_whole=False)
            if index != GREEDY:
                self._totals.count_cancelled(run, clock.time() - began)
            raise
        fate = None  # where its group is not judged yet
        if episode.error is not None:
            fate = Fate.FAILED
        elif index == GREEDY:
            fate = Fate.BASELINE
        elif episode.is_rejected:
            fate = Fate.REJECTED
        elif run.is_judged:  # it ignored its cancellation
            fate = Fate.STRAGGLER if run.is_cut else Fate.SURPLUS
        self._end(run, index, fate, is_whole=episode.error is None)
        self._totals.count_episode(episode, is_greedy=index == GREEDY)
        self._budget.record(episode.error)
        if episode.error is None:
            self._returns.record(is_rejected=episode.is_rejected)
        else:
            self.failures.note(
                Candidate(
                    name=episode.name,
                    example_id=run.issue.example_id,
                    task=run.issue.task,
                    example=run.example,
                    group_id=run.issue.group_id,
                    index=index,
                    trajectory=episode.seen,
                    error=told(episode.error),
                )
            )
        return episode

    def _end(self, run: GroupRun, index: int, fate: Fate | None, *, is_whole: bool) -> None:
        """is_whole: the episode ended by itself, so its length is that which it wanted."""
        name = episode_name(run.issue.group_id, index)
        if index != GREEDY:
            run.lengths[index] = self.tokens.length(name), is_whole
        if fate is not None:
            self.tokens.settle(name, fate)

    async def _take(self, run: GroupRun, judged: Group | Fruitless) -> None:
        number, kept = run.issue.group_id, run.kept
        run.is_judged, run.is_trainable = True, isinstance(judged, Group)
        if run.is_trainable:
            self.tokens.hold(number, {index: episode_name(number, index) for index in kept})
        for index, episode in enumerate(run.episodes):
            if episode and episode.is_finished and not (run.is_trainable and index in kept):
                fate = _fate_in(judged, is_cut=run.is_cut, is_kept=index in kept)
                self.tokens.settle(episode_name(number, index), fate)
        self._running.pop(run.slot.number, None)
        self._totals.count_group(run, judged)
        if not run.is_cut:
            self.ledger.note_rewards(run.issue.example_id, run.rewards, run.issue.task)
        if isinstance(judged, Group):
            self._events.emit(GroupEnded(group=number, outcome="kept"))
            self._starvation.fruitful()
            await self._buffer.finish(run.slot, judged)
            return
        self._report(run, judged)
        self.ledger.settle(run.issue.example_id, judged.outcome, run.issue.task)
        if not run.is_cut:
            await self._buffer.release(run.slot)
        self._starvation.fruitless(judged)

    def _report(self, run: GroupRun, judged: Fruitless) -> None:
        number = run.issue.group_id
        outcome, reason = judged.outcome.name.lower(), judged.reason.name.lower()
        self._events.emit(GroupEnded(group=number, outcome=outcome, reason=reason, detail=judged.detail))
        rows = [
            (episode_name(number, index), i, trajectory)
            for index in run.kept
            if (episode := run.episodes[index])
            for i, trajectory in enumerate(episode.trajectories)
        ]
        if rows:
            self._events.keep(KeptTokens(rows=rows))

    async def _cut_stragglers(self, after_s: float) -> None:
        """Cut groups that keep the trainer waiting. Their places are free at once, though episodes may end later."""
        while True:
            for slot in await self._buffer.wait_for_stragglers(after_s):
                run = self._running.pop(slot.number, None)
                if run is None:
                    continue  # it is being handed over
                log.warning(
                    "%s was dropped: it kept the trainer waiting for more than rollout.drop_stragglers_after_s=%g",
                    _named(run.issue),
                    after_s,
                )
                self._totals.straggler_groups += 1
                run.cut()
                await self._buffer.release(slot)


def _named(issue: Issue) -> str:
    """The example, for messages."""
    epoch, row = issue.example_id
    return f"example {row}, epoch {epoch}" + (f", of task {issue.task!r}" if issue.task else "")


def _fate_in(judged: Group | Fruitless, *, is_cut: bool, is_kept: bool) -> Fate:
    """The fate of the tokens of a finished episode that is not trained."""
    if is_cut:
        return Fate.STRAGGLER
    if not is_kept or isinstance(judged, Group):
        return Fate.SURPLUS
    return Fate.REJECTED if judged.outcome is GroupOutcome.REJECTED else Fate.DROPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEpisode:
    """One episode of an evaluation."""

    number: int
    """Names it, and gives its requests their seeds."""
    row: int
    """The index of its example."""
    task: str = ""
    """Of its example."""


async def run_examples(
    engine: Sampler,
    runner: EpisodeRunner,
    examples: Sequence[Example] | Dataset,
    wanted: Sequence[EvaluationEpisode] | None = None,
    *,
    max_concurrent: int,
    seed: int | None = None,
    on_end: Callable[[Episode], None] = lambda _: None,
    number: int = 0,
) -> list[Episode]:
    """Run episodes of examples, `max_concurrent` at a time, for evaluation. Returns them in the order of `wanted`.

    wanted: None: one of each example. seed: each request gets a seed of its own, the same in every evaluation. on_end:
    called as each episode ends; what it raises ends all. number: of the evaluation, for the event log.
    """
    episodes: dict[int, Episode] = {}
    wanted = wanted or [EvaluationEpisode(number=row, row=row) for row in range(len(examples))]
    coming = iter(wanted)

    async def run_next_ones() -> None:
        for one in coming:
            index, row = one.number, one.row
            sampler = EpisodeSampler(engine, seed=None if seed is None else f"{seed}-evaluation-{index}")
            example, name = examples[row], f"evaluation of example {row}"
            report = EpisodeReport(
                runner.events,
                f"e{number}.{index}",
                held_out=HeldOut(example=example, row=row, task=one.task),
                tokens=runner.tokens,
            )
            try:
                episode = await runner.of(one.task).run(sampler, example, name=name, report=report)
            except asyncio.CancelledError:
                report.cancelled("stopped")
                raise
            finally:
                runner.tokens.settle(report.episode, Fate.EVALUATION)
            episodes[index] = episode
            if episode.trajectories:
                rows = [(report.episode, i, trajectory) for i, trajectory in enumerate(episode.trajectories)]
                runner.events.keep(KeptTokens(rows=rows))
            on_end(episode)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(max_concurrent, len(wanted))):
                tasks.create_task(run_next_ones())
    except BaseExceptionGroup as errors:
        error = first_error(errors)
        raise error from error.__cause__
    return [episodes[one.number] for one in wanted]

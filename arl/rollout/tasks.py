"""The tasks of one run: TaskLedger holds their ledgers, and whose turn it is; TaskWorkflows their workflows."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Self

from arl.api.engine import Sampler
from arl.api.errors import CheckpointError, ConfigError, CurriculumError, left
from arl.api.types import Example, Trajectory
from arl.api.workflow import RolloutWorkflow, TaskCurriculum, TaskRecord, check_weight
from arl.rollout.ledger import ExampleId, ExampleLedger, GroupNumbers, GroupOutcome, Issue, StreamLedger

log = logging.getLogger(__name__)

_WINDOW = 64
"""How many of a task's last groups TaskRecord describes."""


class Turns:
    """Shares turns among tasks: after n of them, each has had its share of n to within 1 - 1 / (2 m - 2), for m tasks.

    Tijdeman's rule (1980, "The chairman assignment problem"): of the tasks that are owed enough for a turn, the one
    that will first be owed too much. If shares change, a task's share of n is the sum of its shares so far.
    """

    def __init__(self, num_tasks: int) -> None:
        self.credits = [0.0] * num_tasks
        """What each task is owed: its share of the turns so far, minus its turns."""
        self._least = 1 / (2 * num_tasks - 2) if num_tasks > 1 else 0.0

    def next(self, shares: Sequence[float]) -> int:
        """Whose turn it is. `take` takes the turn. shares: add up to 1."""
        owed = [credit + share for credit, share in zip(self.credits, shares, strict=True)]
        able = [i for i, share in enumerate(shares) if share > 0]
        due = [i for i in able if owed[i] >= self._least]
        if not due:  # shares have changed, and those that are owed have none now
            return max(able, key=lambda i: owed[i])
        return min(due, key=lambda i: (1 - self._least - owed[i]) / shares[i])

    def take(self, task: int, shares: Sequence[float]) -> None:
        self.credits = [credit + share for credit, share in zip(self.credits, shares, strict=True)]
        self.credits[task] -= 1


@dataclass(slots=True, kw_only=True)
class _Fared:
    """How a task has fared."""

    recent: deque[tuple[float, float]]
    """Of each of its last groups: mean reward, and the share of the episodes that succeeded."""
    num_groups: int = 0
    ended: Counter[str] = field(default_factory=Counter[str])
    """How many groups ended in each way, by the letter of the outcome."""

    def mean(self, column: int) -> float | None:
        return fmean(one[column] for one in self.recent) if self.recent else None


class TaskLedger:
    """The ledgers of a run's tasks. An example belongs to the task that its Issue names; group ids are the run's.

    A ledger restored from `state_dict` owes the same tasks the same turns. Pending examples are handed out again
    first, in the order of their group ids, and take no turn: they had theirs.
    """

    def __init__(
        self,
        ledgers: Mapping[str, ExampleLedger | StreamLedger],
        weights: Mapping[str, float],
        numbers: GroupNumbers,
        *,
        curriculum: TaskCurriculum | None = None,
        every: int = 1,
    ) -> None:
        """ledgers, weights: by the names of the tasks, in their order. numbers: which all ledgers share.

        curriculum: changes the weights, after `every` groups each time. Raises ConfigError.
        """
        if curriculum is None:
            _check_weights(weights)
        self._ledgers = dict(ledgers)
        self._weights = dict(weights)
        self._numbers = numbers
        self._curriculum = curriculum
        self._every = every
        self._asked_at: int | None = None
        """The number of groups at which the curriculum was last asked."""
        self._turns = Turns(len(ledgers))
        self._fared = {name: _Fared(recent=deque(maxlen=_WINDOW)) for name in ledgers}

    def prepare(self) -> None:
        for ledger in self._ledgers.values():
            ledger.prepare()

    async def ready(self) -> None:
        for ledger in self._ledgers.values():
            await ledger.ready()

    def of(self, task: str) -> ExampleLedger | StreamLedger:
        return self._ledgers[task]

    def issue(self) -> Issue:
        """The next example of the task whose turn it is. Raises CurriculumError."""
        owed = {number: name for name, ledger in self._ledgers.items() if (number := ledger.owed) is not None}
        if owed:
            return self._ledgers[owed[min(owed)]].issue()
        shares = [*self.shares().values()]
        turn = self._turns.next(shares)
        name = [*self._ledgers][turn]
        issue = self._ledgers[name].issue()
        self._turns.take(turn, shares)
        self._fared[name].num_groups += 1
        return issue

    def shares(self) -> dict[str, float]:
        """Each task's share of the groups that are handed out now. They add up to 1. A curriculum that is due changes
        the weights first."""
        if self._curriculum is not None and (
            self._asked_at is None or self._numbers.next >= self._asked_at + self._every
        ):
            self._weights |= _asked_for_weights(self._curriculum, self._numbers.next, self.records())
            self._asked_at = self._numbers.next
        total = sum(self._weights.values())
        return {name: weight / total for name, weight in self._weights.items()}

    def note_rewards(self, example_id: ExampleId, rewards: Sequence[float], task: str = "") -> None:
        """Of the episodes that finished. A group without any counts as one without success."""
        succeeded = fmean(reward >= 1 for reward in rewards) if rewards else 0.0
        self._fared[task].recent.append((fmean(rewards) if rewards else 0.0, succeeded))
        self._ledgers[task].note_rewards(example_id, rewards)

    def settle(self, example_id: ExampleId, outcome: GroupOutcome, task: str = "") -> None:
        self._ledgers[task].settle(example_id, outcome)
        self._fared[task].ended[outcome] += 1

    def records(self) -> list[TaskRecord]:
        return [
            TaskRecord(
                name=name,
                weight=self._weights[name],
                num_examples=self._ledgers[name].num_examples,
                epoch=self._ledgers[name].epoch,
                num_groups=fared.num_groups,
                num_trained=fared.ended["t"],
                num_rejected=fared.ended["r"],
                num_dropped=fared.ended["d"],
                reward=fared.mean(0),
                success=fared.mean(1),
            )
            for name, fared in self._fared.items()
        ]

    def counters(self) -> dict[str, float]:
        """For logs: what each task gets, and how its groups ended since the beginning of the run."""
        found: dict[str, float] = {}
        for one in self.records():
            counts = {"groups": one.num_groups, "groups_rejected": one.num_rejected, "groups_dropped": one.num_dropped}
            rates = {} if one.success is None else {"success": one.success}
            known = {"weight": one.weight, "epoch": one.epoch, **counts, **rates}
            found |= {f"task/{one.name}/{name}": value for name, value in known.items()}
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "tasks": {name: ledger.state_dict() for name, ledger in self._ledgers.items()},
            "credits": self._turns.credits,
            "weights": dict(self._weights),
            "asked_at": self._asked_at,
            "fared": {
                name: {"recent": list(one.recent), "num_groups": one.num_groups, "ended": dict(one.ended)}
                for name, one in self._fared.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], finished: Collection[int] = ()) -> None:
        """Tasks may be added at the end. Raises CheckpointError, which names the task, if others have changed."""
        saved_names, names = [*state.get("tasks", ())], [*self._ledgers]
        if names[: len(saved_names)] != saved_names or not saved_names:
            told = ", ".join(map(repr, saved_names)) or "no tasks"
            raise CheckpointError(
                f"the checkpoint was written with {told}, this run has {', '.join(map(repr, names))}; give the same "
                "tasks in the same order, new ones after them, or start in another run_dir"
            )
        for name, saved in state["tasks"].items():
            try:
                self._ledgers[name].load_state_dict(saved, finished)
            except CheckpointError as error:
                raise CheckpointError(f"task {name!r}: {error}") from error
            fared = state["fared"][name]
            self._fared[name].recent.extend((reward, success) for reward, success in fared["recent"])
            self._fared[name].num_groups = fared["num_groups"]
            self._fared[name].ended = Counter(fared["ended"])
        self._turns.credits[: len(state["credits"])] = state["credits"]
        if self._curriculum:
            self._weights |= state["weights"]
            self._asked_at = state["asked_at"]
        elif other := {name: one for name, one in state["weights"].items() if self._weights[name] != one}:
            told = "; ".join(f"{name!r} {one:g} -> {self._weights[name]:g}" for name, one in other.items())
            log.warning("from here on, tasks have other weights than before: %s", told)
        self.prepare()


def _asked_for_weights(curriculum: TaskCurriculum, num_groups: int, records: Sequence[TaskRecord]) -> dict[str, float]:
    """The weights that it gives. Raises CurriculumError naming the curriculum and what is wrong."""
    name = f"the curriculum over tasks {getattr(curriculum, '__qualname__', type(curriculum).__qualname__)}"
    try:
        weights = dict(curriculum(num_groups, records))
    except (Exception, SystemExit) as error:
        raise CurriculumError(f"{name} raised {type(error).__name__} after {num_groups} groups: {error}") from error
    known = {one.name: one.weight for one in records}
    if unknown := [one for one in weights if one not in known]:
        raise CurriculumError(f"{name} named the task {unknown[0]!r:.80}; the tasks are {', '.join(map(repr, known))}")
    try:
        for task, weight in weights.items():
            check_weight(f"the weight of task {task!r}", weight)
        _check_weights({**known, **weights})
    except ConfigError as error:
        raise CurriculumError(f"{name} is wrong after {num_groups} groups: {error}") from None
    return weights


def _check_weights(weights: Mapping[str, float]) -> None:
    if not any(weights.values()):
        raise ConfigError(f"the weights of all tasks ({', '.join(map(repr, weights))}) are 0; give one of them more")


class TaskWorkflows(RolloutWorkflow):
    """Holds the workflows of several tasks. A workflow that several tasks share is entered once."""

    def __init__(self, workflows: Mapping[str, RolloutWorkflow]) -> None:
        """workflows: by the names of their tasks."""
        self._workflows = dict(workflows)
        self._entered: AsyncExitStack | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._workflows)

    def of(self, task: str) -> RolloutWorkflow:
        return self._workflows[task]

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for workflow in {id(one): one for one in self._workflows.values()}.values():
                await stack.enter_async_context(workflow)
            self._entered = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._entered is not None:
            await left(self._entered.aclose(), exc[1] if isinstance(exc[1], BaseException) else None)

    @property
    def declared_roles(self) -> frozenset[str] | None:
        declared = [workflow.declared_roles for workflow in self._workflows.values()]
        known = [roles for roles in declared if roles is not None]
        return frozenset[str]().union(*known) if len(known) == len(declared) else None

    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory | Sequence[Trajectory] | None:
        raise RuntimeError("an episode belongs to one task; run it with `of`")

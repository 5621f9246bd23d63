"""What a run is given to train on, checked: one agent and its dataset, or several tasks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from arl.api.errors import ConfigError, DatasetError
from arl.api.settings.algorithm import AlgorithmConfig
from arl.api.settings.engines import PolicyRoles
from arl.api.settings.objective import DistillationAdvantage, GiGPOAdvantage, ReturnsAdvantage
from arl.api.settings.run import Config, check_group_size
from arl.api.types import Example, Group
from arl.api.workflow import Curriculum, RolloutWorkflow, Task, TaskCurriculum
from arl.data.lazy_rows import NamedRows, StreamedRows, fingerprint
from arl.data.loading import examples_of, held_out_of
from arl.rollout.controller import Dataset
from arl.rollout.episode import check_workflow
from arl.rollout.group import GroupRules
from arl.rollout.ledger import ExampleLedger, GroupNumbers, StreamLedger
from arl.runtime.threads import offload

if TYPE_CHECKING:
    from arl.rollout.tasks import TaskLedger

log = logging.getLogger(__name__)

_OF_ONE_AGENT = ("workflow", "dataset", "eval_dataset", "keep", "curriculum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a run is given to train on: an agent and its data, or tasks."""

    workflow: RolloutWorkflow | None = None
    dataset: Dataset | Iterable[Example] | None = None
    eval_dataset: Dataset | Mapping[str, Dataset] | None = None
    """Held-out examples, or several datasets of them by name."""
    keep: Callable[[Group], bool] | None = None
    curriculum: Curriculum | None = None
    tasks: Sequence[Task] | None = None
    """Several tasks, instead of all these."""
    task_curriculum: TaskCurriculum | None = None
    """Changes the tasks' weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTask:
    """One task of a run, with its rows; the only one has no name."""

    name: str = ""
    workflow: RolloutWorkflow
    dataset: Dataset | StreamedRows
    eval_dataset: Dataset | None
    weight: float = 1.0
    group_size: int | None = None
    keep: Callable[[Group], bool] | None = None
    curriculum: Curriculum | None = None

    def called(self, what: str) -> str:
        """What errors call its `what`."""
        return f"{what} of task {self.name!r}" if self.name else what


@dataclass(frozen=True, kw_only=True)
class RunTasks:
    """All tasks of a run."""

    tasks: tuple[RunTask, ...]
    curriculum: TaskCurriculum | None = None
    """Changes the tasks' weights."""

    @property
    def names(self) -> list[str]:
        """Empty in a run without tasks."""
        return [task.name for task in self.tasks if task.name]

    @cached_property
    def workflow(self) -> RolloutWorkflow:
        """The only one, or all of them as one."""
        if not self.names:
            return self.only.workflow
        from arl.rollout.tasks import TaskWorkflows

        return TaskWorkflows({task.name: task.workflow for task in self.tasks})

    @property
    def only(self) -> RunTask:
        (task,) = self.tasks
        return task

    @property
    def num_examples(self) -> int | None:
        """None: unknown, of a stream."""
        sized = [task.dataset for task in self.tasks if not isinstance(task.dataset, StreamedRows)]
        return sum(map(len, sized)) if len(sized) == len(self.tasks) else None

    @property
    def datasets(self) -> dict[str, Dataset]:
        """Those with rows by index, by task."""
        return {task.name: task.dataset for task in self.tasks if not isinstance(task.dataset, StreamedRows)}

    @cached_property
    def held_out(self) -> Dataset | None:
        """All held-out examples. Of named tasks they are NamedRows: by NAME, or by NAME/SUB."""
        if not self.names:
            return self.only.eval_dataset
        named: dict[str, Any] = {}
        for task in self.tasks:
            if isinstance(task.eval_dataset, NamedRows):
                named |= {f"{task.name}/{sub}": rows for sub, rows in task.eval_dataset.parts.items()}
            elif task.eval_dataset is not None:
                named[task.name] = task.eval_dataset
        return NamedRows(named) if named else None

    @property
    def trained(self) -> Dataset:
        """All examples that are trained; of named tasks NamedRows. Raises ConfigError if there is a stream."""
        if len(self.datasets) < len(self.tasks):
            raise ConfigError("the examples that are trained are a stream, which has no rows by index; run others")
        return NamedRows(self.datasets) if self.names else self.datasets[""]

    def task_of(self, rows: Dataset | None, index: int) -> str:
        """The name of the task of an example of `held_out` or `trained`; "" in a run without tasks."""
        return rows.name_of(index).partition("/")[0] if self.names and isinstance(rows, NamedRows) else ""

    def workflow_of(self, name: str) -> RolloutWorkflow:
        return next(task.workflow for task in self.tasks if task.name == name)

    def alone(self, name: str) -> RunTasks:
        """This task, without the others. Raises ConfigError, which names them."""
        found = tuple(task for task in self.tasks if task.name == name)
        if not found:
            known = ", ".join(map(repr, self.names)) or "none, as there is one workflow and one dataset"
            raise ConfigError(f"--task is {name!r:.80}, and the tasks are: {known}")
        return RunTasks(tasks=found)


def given_tasks(given: Given) -> RunTasks:
    """Check what a run is given, and take its datasets as rows. Raises ConfigError and DatasetError."""
    check_choice(given)
    if given.tasks is None:
        return RunTasks(tasks=(_taken(given),))
    tasks = list[RunTask]()
    for task in given.tasks:
        try:
            tasks.append(_taken(task, name=task.name, weight=task.weight, group_size=task.group_size))
        except DatasetError as error:
            raise DatasetError(f"task {task.name!r}: {error}") from error
    return RunTasks(tasks=tuple(tasks), curriculum=given.task_curriculum)


def _taken(given: Given | Task, **own: Any) -> RunTask:
    return RunTask(
        workflow=cast("RolloutWorkflow", given.workflow),  # check_choice has seen it
        dataset=examples_of("dataset", given.dataset, may_stream=True),
        eval_dataset=held_out_of(given.eval_dataset),
        keep=given.keep,
        curriculum=given.curriculum,
        **own,
    )


def check_choice(given: Given) -> None:
    """Raise ConfigError unless it is one agent with a dataset, or tasks of different names."""
    if given.tasks is None:
        if given.task_curriculum is not None:
            raise ConfigError("task_curriculum gives the weights of tasks, and there are none; give tasks=[...]")
        if given.workflow is None and given.dataset is None:
            raise ConfigError("there is nothing to train on; give a workflow and a dataset, or tasks=[arl.Task(...)]")
        check_workflow(given.workflow)
        return
    if both := [name for name in _OF_ONE_AGENT if getattr(given, name) is not None]:
        raise ConfigError(f"tasks were given, and {', '.join(both)} too; each arl.Task has its own: leave them out")
    if not isinstance(cast("object", given.tasks), list | tuple):
        raise ConfigError(f"tasks is a {type(given.tasks).__name__}; give a list of arl.Task(...)")
    tasks = list(given.tasks)
    if strange := next((task for task in tasks if not isinstance(task, Task)), None):
        raise ConfigError(f"tasks has a {type(strange).__name__}; it must be a list of arl.Task(...)")
    if not tasks:
        raise ConfigError("tasks is empty; give at least one arl.Task")
    name, number = Counter(task.name for task in tasks).most_common(1)[0]
    if number > 1:
        raise ConfigError(f"{number} tasks are named {name!r}; each needs a name of its own")
    for task in tasks:
        try:
            check_workflow(task.workflow)
        except ConfigError as error:
            raise ConfigError(f"task {task.name!r}: {error}") from None
    if not any(task.weight for task in tasks) and given.task_curriculum is None:
        raise ConfigError(f"the weights of all tasks ({', '.join(repr(t.name) for t in tasks)}) are 0; give one more")


def check_settings(config: Config, given: RunTasks) -> None:
    """Raise ConfigError for settings that do not fit the tasks: for roles without a policy; and for policies without a
    role, where all workflows declare theirs."""
    if config.policies:
        policies, declared = PolicyRoles.of(config.policies), [task.workflow.declared_roles for task in given.tasks]
        known = [roles for roles in declared if roles is not None]
        if len(known) == len(declared):
            policies.check(frozenset[str]().union(*known))
        for role in (role for roles in known for role in sorted(roles)):
            policies.policy_of(role)
    for task in given.tasks:
        if task.curriculum is not None and isinstance(task.dataset, StreamedRows):
            raise ConfigError(
                f"the {task.called('curriculum')} chooses examples by their index, and its dataset is a stream; leave "
                "it out, or give rows by index"
            )
        if task.group_size is not None:
            check_group_size(task.called("group_size"), task.group_size, config.algorithm)


# What the controller gets of them.


def ledger_of(config: Config, tasks: RunTasks) -> ExampleLedger | StreamLedger | TaskLedger:
    numbers = GroupNumbers()
    ledgers = {task.name: _ledger_of_one(config, task, numbers) for task in tasks.tasks}
    if not tasks.names:
        return ledgers[""]
    from arl.rollout.tasks import TaskLedger

    return TaskLedger(
        ledgers,
        {task.name: task.weight for task in tasks.tasks},
        numbers,
        curriculum=tasks.curriculum,
        every=config.rollout.batch_size,
    )


def _ledger_of_one(config: Config, task: RunTask, numbers: GroupNumbers) -> ExampleLedger | StreamLedger:
    if isinstance(task.dataset, StreamedRows):
        log.warning(
            "the %s is a stream: its rows come in the stream's order, which rollout.shuffle does not change, and again "
            "when it has ended",
            task.called("dataset"),
        )
        return StreamLedger(task.dataset, offload, task=task.name, numbers=numbers)
    return ExampleLedger(
        len(task.dataset),
        shuffle=config.rollout.shuffle,
        seed=f"{config.seed}-{task.name}" if task.name else config.seed,
        curriculum=task.curriculum,
        task=task.name,
        numbers=numbers,
        fingerprint=fingerprint(task.dataset),
    )


def group_rules(algorithm: AlgorithmConfig, task: RunTask) -> GroupRules:
    advantage = algorithm.advantage
    return GroupRules(
        group_size=task.group_size,
        keep=task.keep,
        drop_equal_rewards=algorithm.dynamic_sampling,
        compares_parts=isinstance(advantage, ReturnsAdvantage) and advantage.separate_rewards,
        compares_totals=algorithm.compares_episodes,
        compares_turns=isinstance(advantage, GiGPOAdvantage),
        compares_tokens=isinstance(advantage, DistillationAdvantage),
        has_baseline=algorithm.needs_greedy_episode,
    )

"""What users write: workflows, curricula and tasks; and `Shared`, for what several workflows open together."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

from arl.api.errors import ConfigError

if TYPE_CHECKING:
    from arl.api.engine import Sampler
    from arl.api.types import Example, Group, Trajectory


class RolloutWorkflow(ABC):
    """An agent. One instance serves all episodes at once, so per-episode state belongs in local variables.

    Open worker processes, servers and connections in `__aenter__` and close them in `__aexit__`. A run enters its
    workflow before the first episode and leaves it after the last.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    @property
    def declared_roles(self) -> frozenset[str] | None:
        """All roles that its requests and trajectories may have; None: they show in episodes alone.

        A run of several policies compares them with the policies' before it starts.
        """
        return None

    def check_first(self, data: Example, models: Sequence[str]) -> str | None:
        """Called with the first example before a run starts; a returned remark is logged as a warning.

        Raises ImageError if the example has images that cannot be read, or that one of `models` does not see.
        """
        return None

    async def arehearse(self, examples: Sequence[Example]) -> None:
        """Called with a few examples before engines start, when the workflow is entered; if it is entered in worker
        processes, in none of them, and not entered. What it raises ends the start."""
        return None

    def check_room(self, limit: int) -> None:
        """Raise ConfigError for a setting of its own that asks for more than `limit` tokens of prompt and answer."""
        return None

    @abstractmethod
    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory | Sequence[Trajectory] | None:
        """Run one episode on the example `data` and return its trajectory, or several, or None to reject it.

        It may await anything: `engine.agenerate`, tools, HTTP, other agents. An exception fails this episode alone; it
        is recorded, and the episode runs again up to rollout.episode_retries times. The task is cancelled at
        rollout.episode_timeout_s.
        """


# A curriculum says which examples to train on next, instead of shuffled epochs.


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleRecord:
    """How an example has fared so far. Groups that still run do not count."""

    index: int
    """The index in the dataset."""
    num_trained: int = 0
    """Groups of this example that were trained."""
    num_rejected: int = 0
    num_dropped: int = 0
    last_reward: float | None = None
    """The mean reward of its newest group's finished episodes, trained or not. None until an episode finished."""
    mean_reward: float | None = None
    """The mean of its groups' rewards. None until an episode finished."""


class Curriculum(Protocol):
    """Called at the beginning of each stage; stages take the place of epochs. Any function of these arguments is one.

    def unsolved(stage: int, records: Sequence[ExampleRecord]) -> Sequence[int]:
        return [record.index for record in records if record.last_reward != 1.0]
    """

    def __call__(self, stage: int, records: Sequence[ExampleRecord], /) -> Sequence[int]:
        """The dataset indices to hand out in this stage, each once, in this order; records[i] is of example i.

        stage: counts from 0. The event loop waits for this call, so it must be quick. It comes when the last example of
        the previous stage is handed out; some of these still run. A continued run goes on with its stage. An exception,
        an empty stage, and an index that comes twice or is out of range end the run with a CurriculumError.
        """
        ...


# Several tasks in one run


_RESERVED = ("reward", "episode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One of several tasks of a run: its agent, its examples, and how much of the run it gets. Raises ConfigError."""

    name: str
    """Metrics, checkpoints and the event log call it so: a text without `/`."""
    workflow: RolloutWorkflow
    """Its agent, with its own sampling, tools and reward."""
    dataset: Any
    """Its examples, as `launch` takes them."""
    weight: float = 1.0
    """Its share of the groups that the run hands out, relative to other tasks' weights. 0: nothing for now."""
    group_size: int | None = None
    """Episodes of each example. Unset: rollout.group_size."""
    eval_dataset: Any = None
    """Held-out examples, or several datasets of them by name. They are reported as NAME, or NAME/SUB."""
    keep: Callable[[Group], bool] | None = None
    """A filter for its groups."""
    curriculum: Curriculum | None = None
    """Which of its examples come next."""

    def __post_init__(self) -> None:
        name, group_size = cast("object", self.name), cast("object", self.group_size)
        if not isinstance(name, str) or not name or "/" in name or name in _RESERVED:
            raise ConfigError(
                f"a task is named {self.name!r:.80}; a name is a text without '/', and not 'reward' or 'episode', "
                "because it becomes the metric task/NAME/reward"
            )
        check_weight(f"the weight of task {self.name!r}", self.weight)
        if group_size is not None and (not isinstance(group_size, int) or group_size < 1):
            raise ConfigError(f"group_size of task {self.name!r} is {group_size!r:.40}; give a whole number from 1")


def check_weight(what: str, weight: object) -> None:
    """Raise ConfigError unless it is a finite number from 0."""
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise ConfigError(f"{what} is {weight!r:.40}; give a finite number, 0 or more")


# A curriculum over tasks changes their weights.


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """How a task has fared so far. Groups that still run do not count, but for num_groups."""

    name: str
    weight: float
    """Its weight until now."""
    num_examples: int | None
    """None for a stream."""
    epoch: int
    """How often its examples were all handed out."""
    num_groups: int
    """Groups of this task that were handed out."""
    num_trained: int
    num_rejected: int
    num_dropped: int
    reward: float | None
    """The mean reward over its last 64 groups. None until an episode finished."""
    success: float | None
    """The share of their episodes with a reward of at least 1."""


class TaskCurriculum(Protocol):
    """Gives the tasks' weights as the run goes on. Any function of these arguments is one.

    def later(num_groups: int, records: Sequence[TaskRecord]) -> Mapping[str, float]:
        return {"sums": 1.0, "proofs": 1.0 if num_groups > 1000 else 0.0}
    """

    def __call__(self, num_groups: int, records: Sequence[TaskRecord], /) -> Mapping[str, float]:
        """The weights of tasks by name; a task without one keeps the weight that it has. records: in the tasks' order.

        num_groups: how many groups were handed out. Called at the beginning, and after each rollout.batch_size groups;
        the event loop waits for it. A continued run goes on with the weights that it had. An exception, an unknown
        name, and weights that are negative, not finite or all 0 end the run with a CurriculumError.
        """
        ...


# A dataset without a length


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """Rows of a stream, one after another."""

    rows: Sequence[Example]
    cursor: Any
    """Where it begins, as a JSON value."""
    after: Any
    """Where the next one begins; None: nowhere, as the stream has ended."""
    digest: str
    """Of its first row; "" without one."""


class Stream(Protocol):
    @property
    def beginning(self) -> Any:
        """The cursor of the first row."""
        ...

    def read(self, cursor: Any) -> StreamChunk:
        """The chunk at a cursor; the same one each time. Blocks. Raises DatasetError."""
        ...


# What several workflows hold open together: rewards, sandboxes, servers.


class Shared(ABC):
    """Opened by the first `async with` and closed by the last, however many use it at the same time.

    So a workflow can enter a reward that it was given, although others have it open.
    """

    def __init__(self) -> None:
        self._num_users = 0
        self._entering = asyncio.Lock()
        self._closes = AsyncExitStack()

    @property
    def is_open(self) -> bool:
        return self._num_users > 0

    async def __aenter__(self) -> Self:
        async with self._entering:
            if not self._num_users:
                async with AsyncExitStack() as opened:
                    await self._open(opened)
                    self._closes = opened.pop_all()
            self._num_users += 1
        return self

    async def __aexit__(self, *exc: object) -> None:
        async with self._entering:
            self._num_users -= 1
            if not self._num_users:
                await self._closes.aclose()

    @abstractmethod
    async def _open(self, opened: AsyncExitStack) -> None:
        """Open what is needed, and enter it in `opened`: that closes it at the end, and if the rest cannot be opened.

        await opened.enter_async_context(self._server)
        opened.push_async_callback(self._connection.aclose)
        """

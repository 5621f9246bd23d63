"""Tasks: what one run trains together, and how it shares its groups among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from arl.api.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from arl.api.types import Group
    from arl.api.workflow import Curriculum, RolloutWorkflow


from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from arl.api.types import Example

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

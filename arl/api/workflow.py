"""The one class a user writes."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from arl.api.engine import Sampler
    from arl.api.types import Example, Trajectory


class RolloutWorkflow(ABC):
    """An agent. One instance serves all episodes at once, so per-episode state lives in local variables.

    What lives as long as a run (worker processes, servers, connections) is opened in `__aenter__` and closed in
    `__aexit__`: whoever runs episodes enters the workflow before the first and leaves it after the last.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    @abstractmethod
    async def arun_episode(self, engine: Sampler, data: Example) -> Trajectory | Sequence[Trajectory] | None:
        """Run one episode on the example `data` and return its trajectory, or several, or None to reject it.

        Any awaits: `engine.agenerate`, tools, HTTP, other agents. An exception fails this episode alone; it is
        recorded and retried as rollout.episode_retries says. The task is cancelled at rollout.episode_timeout_s.
        """


# Which examples to train on next: a function that a user may give `launch`, in the place of shuffled epochs.


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleRecord:
    """What is known of an example so far. index: in the dataset.

    num_trained, num_rejected, num_dropped: how often it ended so. A group's reward is the mean over its episodes that
    finished, whether they were trained or not; last_reward is that of the newest group, mean_reward the mean over all.
    Both are None until an episode finished. Groups that are still running are not in it.
    """

    index: int
    num_trained: int = 0
    num_rejected: int = 0
    num_dropped: int = 0
    last_reward: float | None = None
    mean_reward: float | None = None


class Curriculum(Protocol):
    """Called at the beginning of each stage, which takes an epoch's place. Any function of these arguments is one.

    def unsolved(stage: int, records: Sequence[ExampleRecord]) -> Sequence[int]:
        return [record.index for record in records if record.last_reward != 1.0]
    """

    def __call__(self, stage: int, records: Sequence[ExampleRecord], /) -> Sequence[int]:
        """The dataset indices to hand out in this stage, each once, in this order; records[i] is of example i.

        stage: counts from 0. Called on the event loop, which waits: sort, and look nothing up. The stage is asked for
        when the last example of the one before is handed out, so a few of that one still run. A run that is continued
        goes on with the stage it was in. An exception, an empty stage, and an index twice or out of range end the run
        with a CurriculumError.
        """
        ...


# What several users have open at the same time: rewards, sandboxes, servers.


class Shared(ABC):
    """What is opened by the first `async with` and closed by the last, however many use it at the same time.

    So a workflow can enter a reward that it was given: whoever opened it before keeps it open.
    """

    def __init__(self) -> None:
        self._num_users = 0
        self._entering = asyncio.Lock()

    async def __aenter__(self) -> Self:
        async with self._entering:
            if not self._num_users:
                await self._open()
            self._num_users += 1
        return self

    async def __aexit__(self, *exc: object) -> None:
        async with self._entering:
            self._num_users -= 1
            if not self._num_users:
                await self._close()

    @abstractmethod
    async def _open(self) -> None: ...

    @abstractmethod
    async def _close(self) -> None: ...

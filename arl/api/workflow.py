"""The classes that users write: workflows and curricula; and `Shared`, for what several workflows open together."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from arl.api.engine import Sampler
    from arl.api.types import Example, Trajectory


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

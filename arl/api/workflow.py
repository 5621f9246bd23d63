"""The one class a user writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from arl.api.engine import InferenceEngine
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
    async def arun_episode(self, engine: InferenceEngine, data: Example) -> Trajectory | Sequence[Trajectory] | None:
        """Run one episode on the example `data` and return its trajectory, or several, or None to reject it.

        Any awaits: `engine.agenerate`, tools, HTTP, other agents. An exception fails this episode alone; it is
        recorded and retried as rollout.episode_retries says. The task is cancelled at rollout.episode_timeout_s.
        """

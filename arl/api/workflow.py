"""The one class a user writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arl.api.engine import InferenceEngine
    from arl.api.types import Example, Trajectory


class RolloutWorkflow(ABC):
    """An agent. One instance serves all episodes at once, so per-episode state lives in local variables."""

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: Example) -> Trajectory | Sequence[Trajectory] | None:
        """Run one episode on the example `data` and return its trajectory, or several, or None to reject it.

        Any awaits: `engine.agenerate`, tools, HTTP, other agents. An exception fails this episode alone; it is
        recorded and retried as rollout.episode_retries says. The task is cancelled at rollout.episode_timeout_s.
        """

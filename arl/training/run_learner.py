"""The learner as a run's loop sees it, whether it trains one policy or several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from arl.api.engine import ModelLimits, Saving, WeightSource
from arl.api.types import Group
from arl.training.kept_tokens import ReportedBatch


class RunWeights(WeightSource, Protocol):
    """The weights being trained, which outlive the processes that hold them."""

    @property
    def limits(self) -> ModelLimits:
        """The limits of the model's input."""
        ...


class PreparedStep(Protocol):
    """A batch that is ready for training."""

    @property
    def advantages(self) -> Sequence[float | None]:
        """PreparedBatch's."""
        ...


class RunLearner(Protocol):
    """Trains one batch after another, in other processes, and survives their loss. Calls block, on one thread."""

    @property
    def version(self) -> int:
        """The number of batches trained."""
        ...

    @property
    def engine(self) -> RunWeights: ...

    @property
    def num_recoveries(self) -> int: ...

    @property
    def pulse(self) -> int:
        """Counts what recoveries have done; any thread may read it."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether a checkpoint is due, because so many batches are kept since the last one."""
        ...

    def prepare(self, groups: Sequence[Group], replayed: Sequence[Group] = ()) -> PreparedStep: ...

    def train(self, batch: Any) -> ReportedBatch:
        """Train `batch`, the one that was prepared last."""
        ...

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def save(self, directory: Path) -> Saving: ...

    def load(self, directory: Path) -> None:
        """Raises CheckpointError, which names the mismatch."""
        ...

    def whereabouts(self) -> str:
        """Where its processes are. Any thread may ask."""
        ...

    def close(self) -> None: ...

"""Which examples to train on next: a function that a user may give `launch`, in the place of shuffled epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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

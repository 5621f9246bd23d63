"""What a curriculum gets, and what it may answer."""

from __future__ import annotations

import operator
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from arl.api.errors import CurriculumError
from arl.api.workflow import Curriculum, ExampleRecord
from arl.rollout.outcome import GroupOutcome, packed, unpacked


class Experience:
    """How the examples of a dataset fared so far."""

    def __init__(self, num_examples: int) -> None:
        self._counts = {outcome.value: array("i", bytes(4 * num_examples)) for outcome in GroupOutcome}
        self._num_rewards = array("i", bytes(4 * num_examples))
        self._reward_sums = array("d", bytes(8 * num_examples))
        self._last_rewards = array("d", bytes(8 * num_examples))
        self._records: list[ExampleRecord] = []

    def note_outcome(self, index: int, outcome: GroupOutcome) -> None:
        self._counts[outcome][index] += 1
        if self._records:
            self._records[index] = self._record(index)

    def note_reward(self, index: int, reward: float) -> None:
        self._num_rewards[index] += 1
        self._reward_sums[index] += reward
        self._last_rewards[index] = reward
        if self._records:
            self._records[index] = self._record(index)

    def records(self) -> list[ExampleRecord]:
        """One for each example of the dataset, in its order. The first call makes them, which takes seconds."""
        self._records = self._records or [self._record(index) for index in range(len(self._num_rewards))]
        return self._records.copy()

    def _record(self, index: int) -> ExampleRecord:
        num_rewards = self._num_rewards[index]
        return ExampleRecord(
            index=index,
            num_trained=self._counts["t"][index],
            num_rejected=self._counts["r"][index],
            num_dropped=self._counts["d"][index],
            last_reward=self._last_rewards[index] if num_rewards else None,
            mean_reward=self._reward_sums[index] / num_rewards if num_rewards else None,
        )

    def _columns(self) -> dict[str, array[Any]]:
        rewards = {"num": self._num_rewards, "sum": self._reward_sums, "last": self._last_rewards}
        return {**self._counts, **rewards}

    def saved(self) -> Callable[[], dict[str, str]]:
        """Makes its JSON value, on any thread, from a copy that is taken here and now."""
        copies = {name: column.tobytes() for name, column in self._columns().items()}
        return lambda: {name: packed(column) for name, column in copies.items()}

    def load(self, state: Mapping[str, str]) -> None:
        """From `saved`."""
        self._records = []
        for name, column in self._columns().items():
            column[:] = array(column.typecode, unpacked(state[name]))


def asked_for_stage(curriculum: Curriculum, stage: int, records: Sequence[ExampleRecord]) -> list[int]:
    """The dataset indices of a stage, in order. Raises CurriculumError naming the curriculum and what is wrong."""
    name = f"the curriculum {getattr(curriculum, '__qualname__', type(curriculum).__qualname__)}"
    try:
        indices = [operator.index(index) for index in curriculum(stage, records)]
    except (Exception, SystemExit) as error:
        raise CurriculumError(f"{name} raised {type(error).__name__} for stage {stage}: {error}") from error
    if not indices:
        raise CurriculumError(f"{name} returned no examples for stage {stage}; return some, or set fewer steps")
    if min(indices) < 0 or max(indices) >= len(records):
        outside = next(index for index in indices if not 0 <= index < len(records))
        indices_are = f"the dataset's indices are 0 to {len(records) - 1}"
        raise CurriculumError(f"{name} returned index {outside} for stage {stage}; {indices_are}")
    if len(set(indices)) < len(indices):
        index, _ = Counter(indices).most_common(1)[0]
        raise CurriculumError(f"{name} returned index {index} twice for stage {stage}; each example runs once in it")
    return indices

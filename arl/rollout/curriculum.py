"""What a curriculum is told, and what it may answer."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from arl.api.curriculum_contract import Curriculum, ExampleRecord
from arl.api.errors import CurriculumError


@dataclass(slots=True, kw_only=True)
class _Known:
    """Of one example: the ledger's mark of each time it ended, and the rewards of its groups."""

    marks: str = ""
    num_rewards: int = 0
    reward_sum: float = 0.0
    last_reward: float | None = None


class Experience:
    """How the examples of a dataset fared so far, kept in checkpoints. Memory: for examples that have run."""

    def __init__(self, num_examples: int) -> None:
        self._num_examples = num_examples
        self._known: dict[int, _Known] = {}

    def note_outcome(self, index: int, mark: str) -> None:
        """mark: the letter of an Outcome."""
        self._of(index).marks += mark

    def note_reward(self, index: int, reward: float) -> None:
        known = self._of(index)
        known.num_rewards += 1
        known.reward_sum += reward
        known.last_reward = reward

    def records(self) -> list[ExampleRecord]:
        """One for each example of the dataset, in its order."""
        return [_record(index, self._known.get(index, _Known())) for index in range(self._num_examples)]

    def state_dict(self) -> list[list[Any]]:
        """As JSON holds it."""
        return [[index, *astuple(known)] for index, known in self._known.items()]

    def load_state_dict(self, state: Iterable[Sequence[Any]]) -> None:
        self._known = {
            index: _Known(marks=marks, num_rewards=num_rewards, reward_sum=reward_sum, last_reward=last_reward)
            for index, marks, num_rewards, reward_sum, last_reward in state
        }

    def _of(self, index: int) -> _Known:
        return self._known.setdefault(index, _Known())


def _record(index: int, known: _Known) -> ExampleRecord:
    return ExampleRecord(
        index=index,
        num_trained=known.marks.count("t"),
        num_rejected=known.marks.count("r"),
        num_dropped=known.marks.count("d"),
        last_reward=known.last_reward,
        mean_reward=known.reward_sum / known.num_rewards if known.num_rewards else None,
    )


def asked_for_stage(curriculum: Curriculum, stage: int, records: Sequence[ExampleRecord]) -> list[int]:
    """The dataset indices of a stage, in order. Raises CurriculumError naming the curriculum and what is wrong."""
    name = getattr(curriculum, "__qualname__", type(curriculum).__qualname__)
    try:
        indices = [operator.index(index) for index in curriculum(stage, records)]
    except Exception as error:
        raise CurriculumError(
            f"the curriculum {name} raised {type(error).__name__} when it was asked for stage {stage}: {error}"
        ) from error
    if not indices:
        raise CurriculumError(
            f"the curriculum {name} returned no examples for stage {stage}, so there is nothing to train on; return at "
            "least one, or set steps so that the run ends before"
        )
    if outside := [index for index in indices if not 0 <= index < len(records)]:
        raise CurriculumError(
            f"the curriculum {name} returned index {outside[0]} for stage {stage}; the dataset's indices are 0 to "
            f"{len(records) - 1}"
        )
    index, times = Counter(indices).most_common(1)[0]
    if times > 1:
        raise CurriculumError(
            f"the curriculum {name} returned index {index} twice for stage {stage}; an example is handed out once in a "
            "stage: name it again in the next one"
        )
    return indices

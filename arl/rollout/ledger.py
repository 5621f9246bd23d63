"""The ledger of examples: which have run in which epoch, how each ended (exactly once), and which come next."""

from __future__ import annotations

import operator
import random
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from operator import itemgetter
from typing import Any

from arl.api.errors import CheckpointError, CurriculumError, DatasetError
from arl.api.workflow import Curriculum, ExampleRecord

ExampleId = tuple[int, int]
"""(epoch, index in the dataset). With a curriculum, its stages are the epochs."""


class GroupOutcome(StrEnum):
    """How an example of an epoch ended. The letter is its mark in checkpoints; `.` marks one that has not ended."""

    TRAINED = "t"
    REJECTED = "r"
    DROPPED = "d"


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """An example handed out to run."""

    group_id: int
    """Its place in the order of handing out. It keeps it when it has to run again."""
    example_id: ExampleId


@dataclass(frozen=True, slots=True, kw_only=True)
class _Epoch:
    indices: Sequence[int]
    """Of the examples in it, ascending."""
    marks: bytearray
    """How each of them ended, in this order."""

    def settle(self, index: int, outcome: GroupOutcome) -> None:
        self.marks[bisect_left(self.indices, index)] = ord(outcome)

    def ended_as(self, outcome: GroupOutcome) -> list[int]:
        return [index for index, mark in zip(self.indices, self.marks, strict=True) if mark == ord(outcome)]


class ExampleLedger:
    """Hands out a dataset's examples, epoch after epoch, and keeps one outcome for each.

    An example that was handed out and has no outcome is pending. A ledger restored from `state_dict` first hands out
    the pending ones again, in their order and under their group ids: what was in flight runs again, and what was
    trained never does. Memory: one byte for each example of each epoch; with a curriculum also its index, and a record
    of each example.
    """

    def __init__(self, num_examples: int, *, shuffle: bool, seed: int, curriculum: Curriculum | None = None) -> None:
        if num_examples < 1:
            raise DatasetError("the dataset is empty; training needs at least one example")
        self._settings = {"num_examples": num_examples, "shuffle": shuffle, "seed": seed}
        self._num_examples = num_examples
        self._shuffle = shuffle
        self._seed = seed
        self._curriculum = curriculum
        self._experience = Experience(num_examples) if curriculum else None
        self._epochs: list[_Epoch] = []
        self._order: Sequence[int] = []
        self._position = 0
        self._next_group_id = 0
        self._pending: dict[ExampleId, int] = {}
        self._owed: deque[Issue] = deque()

    @property
    def epoch(self) -> int:
        """The epoch being handed out, from 0."""
        return max(len(self._epochs) - 1, 0)

    @property
    def pending(self) -> tuple[ExampleId, ...]:
        """Handed out and not ended, in the order of handing out."""
        return tuple(sorted(self._pending, key=self._pending.__getitem__))

    def issue(self) -> Issue:
        """The next example to run; begins an epoch when the last example is out. Raises CurriculumError."""
        issue = self._owed.popleft() if self._owed else self._next_of_epoch()
        self._pending[issue.example_id] = issue.group_id
        return issue

    def note_reward(self, example_id: ExampleId, reward: float) -> None:
        """Note, for the curriculum, the mean reward of the episodes of an example that ran."""
        if self._experience:
            self._experience.note_reward(example_id[1], reward)

    def settle(self, example_id: ExampleId, outcome: GroupOutcome) -> None:
        """Give a pending example its outcome. Raises ValueError for one that is not pending."""
        epoch, index = example_id
        if example_id not in self._pending:
            raise ValueError(f"example {index} of epoch {epoch} is not running; it cannot be {outcome.name.lower()}")
        del self._pending[example_id]
        self._epochs[epoch].settle(index, outcome)
        if self._experience:
            self._experience.note_outcome(index, outcome)

    def outcomes(self, epoch: int) -> dict[GroupOutcome, list[int]]:
        """The dataset indices of an epoch that ended in each way."""
        return {outcome: self._epochs[epoch].ended_as(outcome) for outcome in GroupOutcome}

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as JSON values. order, stages: null for the settings' order and for the whole dataset."""
        is_whole = not self._epochs or isinstance(self._epochs[-1].indices, range)
        return {
            **self._settings,
            "epoch": self.epoch,
            "order": None if is_whole else list(self._order),
            "position": self._position,
            "next_group_id": self._next_group_id,
            "pending": [[*example_id, group_id] for example_id, group_id in self._pending.items()]
            + [[*issue.example_id, issue.group_id] for issue in self._owed],
            "outcomes": [epoch.marks.decode("ascii") for epoch in self._epochs],
            "stages": [None if isinstance(epoch.indices, range) else list(epoch.indices) for epoch in self._epochs],
            "experience": self._experience.state_dict() if self._experience else None,
        }

    def load_state_dict(self, state: Mapping[str, Any], finished: Collection[ExampleId] = ()) -> None:
        """Continue from `state_dict`, in the epoch that was begun. finished: pending examples whose groups were kept.

        Raises CheckpointError if it was written for another dataset, order or seed.
        """
        for name, value in self._settings.items():
            if state[name] != value:
                raise CheckpointError(
                    f"the checkpoint was written with {name} {state[name]}, this run has {value}; "
                    "continue with the same dataset and settings, or start in another run_dir"
                )
        self._epochs = [
            _Epoch(indices=range(self._num_examples) if indices is None else indices, marks=bytearray(marks, "ascii"))
            for indices, marks in zip(state["stages"], state["outcomes"], strict=True)
        ]
        self._order = state["order"] or (self._order_of(self.epoch) if self._epochs else [])
        self._position = state["position"]
        self._next_group_id = state["next_group_id"]
        pending = [
            Issue(group_id=group_id, example_id=(epoch, index))
            for epoch, index, group_id in sorted(state["pending"], key=itemgetter(2))
        ]
        self._pending = {issue.example_id: issue.group_id for issue in pending if issue.example_id in finished}
        self._owed = deque(issue for issue in pending if issue.example_id not in finished)
        if self._experience:
            self._load_experience(self._experience, state["experience"])

    def _load_experience(self, experience: Experience, state: Sequence[Sequence[Any]] | None) -> None:
        """A run without a curriculum kept the outcomes, but no rewards."""
        if state is not None:
            experience.load_state_dict(state)
            return
        for epoch in range(len(self._epochs)):
            for outcome, indices in self.outcomes(epoch).items():
                for index in indices:
                    experience.note_outcome(index, outcome)

    def _next_of_epoch(self) -> Issue:
        if self._position == len(self._order):
            self._begin_epoch(len(self._epochs))
        index = self._order[self._position]
        self._position += 1
        self._next_group_id += 1
        return Issue(group_id=self._next_group_id - 1, example_id=(self.epoch, index))

    def _begin_epoch(self, epoch: int) -> None:
        indices: Sequence[int] = range(self._num_examples)
        if self._curriculum and self._experience:
            order = asked_for_stage(self._curriculum, epoch, self._experience.records())
            indices = sorted(order)
        else:
            order = self._order_of(epoch)
        self._epochs.append(_Epoch(indices=indices, marks=bytearray(b"." * len(indices))))
        self._order = order
        self._position = 0

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(self._num_examples))
        if self._shuffle:
            random.Random(f"{self._seed}-{epoch}").shuffle(order)
        return order


# What a curriculum is told, and what it may answer.


@dataclass(slots=True)
class _Known:
    marks: str = ""
    """The letter of each GroupOutcome that it had."""
    num_rewards: int = 0
    reward_sum: float = 0.0
    last_reward: float | None = None

    def record(self, index: int) -> ExampleRecord:
        return ExampleRecord(
            index=index,
            num_trained=self.marks.count("t"),
            num_rejected=self.marks.count("r"),
            num_dropped=self.marks.count("d"),
            last_reward=self.last_reward,
            mean_reward=self.reward_sum / self.num_rewards if self.num_rewards else None,
        )


class Experience:
    """How the examples of a dataset fared so far."""

    def __init__(self, num_examples: int) -> None:
        self._num_examples = num_examples
        self._known: dict[int, _Known] = {}

    def note_outcome(self, index: int, outcome: GroupOutcome) -> None:
        self._of(index).marks += outcome

    def note_reward(self, index: int, reward: float) -> None:
        known = self._of(index)
        known.num_rewards += 1
        known.reward_sum += reward
        known.last_reward = reward

    def records(self) -> list[ExampleRecord]:
        """One for each example of the dataset, in its order."""
        return [self._known.get(index, _Known()).record(index) for index in range(self._num_examples)]

    def state_dict(self) -> list[list[Any]]:
        return [[index, *astuple(known)] for index, known in self._known.items()]

    def load_state_dict(self, state: Iterable[Sequence[Any]]) -> None:
        self._known = {index: _Known(*values) for index, *values in state}

    def _of(self, index: int) -> _Known:
        return self._known.setdefault(index, _Known())


def asked_for_stage(curriculum: Curriculum, stage: int, records: Sequence[ExampleRecord]) -> list[int]:
    """The dataset indices of a stage, in order. Raises CurriculumError naming the curriculum and what is wrong."""
    name = f"the curriculum {getattr(curriculum, '__qualname__', type(curriculum).__qualname__)}"
    try:
        indices = [operator.index(index) for index in curriculum(stage, records)]
    except (Exception, SystemExit) as error:
        raise CurriculumError(f"{name} raised {type(error).__name__} for stage {stage}: {error}") from error
    if not indices:
        raise CurriculumError(f"{name} returned no examples for stage {stage}; return some, or set fewer steps")
    if outside := [index for index in indices if not 0 <= index < len(records)]:
        indices_are = f"the dataset's indices are 0 to {len(records) - 1}"
        raise CurriculumError(f"{name} returned index {outside[0]} for stage {stage}; {indices_are}")
    index, times = Counter(indices).most_common(1)[0]
    if times > 1:
        raise CurriculumError(f"{name} returned index {index} twice for stage {stage}; each example runs once in it")
    return indices

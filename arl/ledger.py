"""ExampleLedger: which examples of which epoch have run, and how each ended. Every one ends exactly once."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from typing import Any

from arl.api.errors import CheckpointError, DatasetError

ExampleId = tuple[int, int]
"""(epoch, index in the dataset)."""


class Outcome(StrEnum):
    """How an example of an epoch ended. The letter is its mark in checkpoints; `.` marks one that has not ended."""

    TRAINED = "t"
    REJECTED = "r"
    DROPPED = "d"


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """An example handed out to run. group_id: its place in the order of handing out, kept when it has to run again."""

    group_id: int
    example_id: ExampleId


class ExampleLedger:
    """Hands out a dataset's examples, epoch after epoch, and keeps one outcome for each.

    An example that was handed out and has no outcome is pending. A ledger restored from `state_dict` hands out the
    pending ones again, in their order and under their group ids, before it goes on: what was in flight runs again, what
    was trained never does.
    Memory: one byte for each example of each epoch.
    """

    def __init__(self, num_examples: int, *, shuffle: bool, seed: int) -> None:
        if num_examples < 1:
            raise DatasetError("the dataset is empty; training needs at least one example")
        self._settings = {"num_examples": num_examples, "shuffle": shuffle, "seed": seed}
        self._num_examples = num_examples
        self._shuffle = shuffle
        self._seed = seed
        self._marks: list[bytearray] = []
        self._order: list[int] = []
        self._position = 0
        self._next_group_id = 0
        self._pending: dict[ExampleId, int] = {}
        self._owed: deque[Issue] = deque()

    @property
    def epoch(self) -> int:
        """The epoch being handed out, from 0."""
        return max(len(self._marks) - 1, 0)

    @property
    def pending(self) -> tuple[ExampleId, ...]:
        """Handed out and not ended, in the order of handing out."""
        return tuple(sorted(self._pending, key=self._pending.__getitem__))

    def issue(self) -> Issue:
        """The next example to run; begins an epoch, in an order of its own if shuffled, when the last one is out."""
        issue = self._owed.popleft() if self._owed else self._next_of_epoch()
        self._pending[issue.example_id] = issue.group_id
        return issue

    def settle(self, example_id: ExampleId, outcome: Outcome) -> None:
        """Give a pending example its outcome. Raises ValueError for one that is not pending."""
        if example_id not in self._pending:
            raise ValueError(
                f"example {example_id[1]} of epoch {example_id[0]} cannot end as {outcome.name.lower()}: "
                "it is not running, or has ended before"
            )
        del self._pending[example_id]
        epoch, index = example_id
        self._marks[epoch][index] = ord(outcome)

    def outcomes(self, epoch: int) -> dict[Outcome, list[int]]:
        """The dataset indices of an epoch that ended in each way."""
        marks = self._marks[epoch]
        return {outcome: [i for i, mark in enumerate(marks) if mark == ord(outcome)] for outcome in Outcome}

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON holds it."""
        return {
            **self._settings,
            "epoch": self.epoch,
            "position": self._position,
            "next_group_id": self._next_group_id,
            "pending": [[*example_id, group_id] for example_id, group_id in self._pending.items()]
            + [[*issue.example_id, issue.group_id] for issue in self._owed],
            "outcomes": [marks.decode("ascii") for marks in self._marks],
        }

    def load_state_dict(self, state: Mapping[str, Any], finished: Collection[ExampleId] = ()) -> None:
        """Continue from `state_dict`. finished: pending examples whose groups were kept, so that they need not run.

        Raises CheckpointError if it was written for another dataset, order or seed.
        """
        for name, value in self._settings.items():
            if state[name] != value:
                raise CheckpointError(
                    f"the checkpoint was written with {name} {state[name]}, this run has {value}; "
                    "continue with the same dataset and settings, or start in another run_dir"
                )
        self._marks = [bytearray(marks, "ascii") for marks in state["outcomes"]]
        self._order = self._order_of(self.epoch) if self._marks else []
        self._position = state["position"]
        self._next_group_id = state["next_group_id"]
        pending = [
            Issue(group_id=group_id, example_id=(epoch, index))
            for epoch, index, group_id in sorted(state["pending"], key=itemgetter(2))
        ]
        self._pending = {issue.example_id: issue.group_id for issue in pending if issue.example_id in finished}
        self._owed = deque(issue for issue in pending if issue.example_id not in finished)

    def _next_of_epoch(self) -> Issue:
        if self._position == len(self._order):
            self._marks.append(bytearray(b"." * self._num_examples))
            self._order = self._order_of(self.epoch)
            self._position = 0
        index = self._order[self._position]
        self._position += 1
        self._next_group_id += 1
        return Issue(group_id=self._next_group_id - 1, example_id=(self.epoch, index))

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(self._num_examples))
        if self._shuffle:
            random.Random(f"{self._seed}-{epoch}").shuffle(order)
        return order

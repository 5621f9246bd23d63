"""The ledger of examples: which have run in which epoch, how each ended (exactly once), and which come next."""

from __future__ import annotations

import asyncio
import operator
import zlib
from array import array
from base64 import b64decode, b64encode
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from operator import itemgetter
from statistics import fmean
from typing import Any, Protocol

from arl.api.errors import CheckpointError, CurriculumError, DatasetError
from arl.api.types import Example
from arl.api.workflow import Curriculum, ExampleRecord

_LARGE = 1 << 17
"""So many examples are shuffled on a thread: a million would block the event loop for 20 ms."""

ExampleId = tuple[int, int]
"""(epoch, index in the dataset of the task). With a curriculum, its stages are the epochs."""


class GroupOutcome(StrEnum):
    """How an example of an epoch ended. The letter is its mark in checkpoints; `.` marks one that has not ended."""

    TRAINED = "t"
    REJECTED = "r"
    DROPPED = "d"


def packed(data: bytes | bytearray) -> str:
    return b64encode(zlib.compress(data)).decode("ascii")


def unpacked(text: str) -> bytes:
    return zlib.decompress(b64decode(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """An example handed out to run."""

    group_id: int
    """Its place in the order of handing out. It keeps it when it has to run again."""
    example_id: ExampleId
    task: str = ""
    """The name of its task; "" in a run without tasks."""
    example: Example | None = None
    """The row, of a stream; others are read by their index."""


class Ledger(Protocol):
    """What a run's controller asks for: an ExampleLedger, or a TaskLedger over several.

    task: the name of the example's task; "" in a run without tasks.
    """

    def prepare(self) -> None: ...

    async def ready(self) -> None:
        """Wait until `issue` can answer at once. Await it before each."""
        ...

    def issue(self) -> Issue: ...

    def note_rewards(self, example_id: ExampleId, rewards: Sequence[float], task: str = "") -> None: ...

    def settle(self, example_id: ExampleId, outcome: GroupOutcome, task: str = "") -> None: ...

    def counters(self) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], finished: Collection[int] = ()) -> None: ...


@dataclass(slots=True)
class GroupNumbers:
    """Counts the groups of a run. The ledgers of its tasks share it."""

    next: int = 0

    def take(self) -> int:
        self.next += 1
        return self.next - 1


class _Epoch:
    """The examples of an epoch or a stage, in the order in which they are handed out, and how each ended."""

    def __init__(self, order: Sequence[int] | None, marks: bytearray) -> None:
        """order: None stands for the order that the settings define. marks: one for each place in the order."""
        self.order = order
        self.marks = marks
        self._num_open = marks.count(b".")
        self._saved: dict[str, str | None] | None = None

    def settle(self, place: int, outcome: GroupOutcome) -> None:
        self.marks[place] = ord(outcome)
        self._num_open -= 1

    def saved(self) -> Callable[[], dict[str, str | None]]:
        """Makes its JSON value, on any thread. An ended epoch is packed once; an open one is copied here and now."""
        return self._packed if not self._num_open else partial(_packed_epoch, self.order, bytes(self.marks))

    def _packed(self) -> dict[str, str | None]:
        self._saved = self._saved or _packed_epoch(self.order, bytes(self.marks))
        return self._saved


def _packed_epoch(order: Sequence[int] | None, marks: bytes) -> dict[str, str | None]:
    places = None if order is None else packed(array("q", order).tobytes())
    return {"order": places, "marks": packed(marks.rstrip(b"."))}


class ExampleLedger:
    """Hands out a dataset's examples, epoch after epoch, and keeps one outcome for each.

    An example that was handed out and has no outcome is pending. A ledger restored from `state_dict` first hands out
    the pending ones again, in their order and under their group ids: what was in flight runs again, and what was
    trained never does. Memory: a byte for each example of each epoch, and 4 bytes for each shuffled example; with a
    curriculum an index of 8 bytes instead of these, and a record of each example.
    """

    def __init__(
        self,
        num_examples: int,
        *,
        shuffle: bool,
        seed: int | str,
        curriculum: Curriculum | None = None,
        task: str = "",
        numbers: GroupNumbers | None = None,
        fingerprint: Mapping[str, str] | None = None,
    ) -> None:
        """task: whose examples they are. numbers: those of the run, if it has other ledgers. fingerprint: digests of
        some examples, by their index, for comparison with a checkpoint's."""
        if num_examples < 1:
            raise DatasetError("the dataset is empty; training needs at least one example")
        self._settings = {"num_examples": num_examples, "shuffle": shuffle, "seed": seed}
        self._num_examples = num_examples
        self._shuffle = shuffle
        self._seed = seed
        self._curriculum = curriculum
        self._task = task
        self._numbers = numbers or GroupNumbers()
        self._fingerprint = fingerprint
        self._experience = Experience(num_examples) if curriculum else None
        self._epochs: list[_Epoch] = []
        self._order: Sequence[int] = []
        self._coming: Sequence[int] | None = None
        """The order of the next epoch, if it was made ahead of time."""
        self._position = 0
        self._pending: dict[ExampleId, tuple[int, int]] = {}
        """Group id, and place in the epoch's order."""
        self._owed: deque[tuple[Issue, int]] = deque()

    @property
    def num_examples(self) -> int | None:
        """None: unknown, of a stream."""
        return self._num_examples

    def prepare(self) -> None:
        """Do the work that takes seconds with a million examples. Call it on a thread, before the first `issue`."""
        if self._experience:
            self._experience.records()
        elif self._position == len(self._order):
            self._coming = self._settings_order(len(self._epochs))

    async def ready(self) -> None:
        if self._num_examples >= _LARGE and self._position == len(self._order) and self._coming is None:
            await asyncio.to_thread(self.prepare)

    @property
    def epoch(self) -> int:
        """The epoch being handed out, from 0."""
        return max(len(self._epochs) - 1, 0)

    @property
    def pending(self) -> tuple[ExampleId, ...]:
        """Handed out and not ended, in the order of handing out."""
        return tuple(sorted(self._pending, key=self._pending.__getitem__))

    @property
    def owed(self) -> int | None:
        """The id of the group that a resumed ledger hands out again next; None if it owes none."""
        return self._owed[0][0].group_id if self._owed else None

    def issue(self) -> Issue:
        """The next example to run; begins an epoch when the last example is out. Raises CurriculumError."""
        issue, place = self._owed.popleft() if self._owed else self._next_of_epoch()
        self._pending[issue.example_id] = issue.group_id, place
        return issue

    def note_rewards(self, example_id: ExampleId, rewards: Sequence[float], task: str = "") -> None:
        """Note, for the curriculum, the rewards of the episodes of an example that finished, if any did."""
        if self._experience and rewards:
            self._experience.note_reward(example_id[1], fmean(rewards))

    def settle(self, example_id: ExampleId, outcome: GroupOutcome, task: str = "") -> None:
        """Give a pending example its outcome. Raises ValueError for one that is not pending."""
        epoch, index = example_id
        if example_id not in self._pending:
            raise ValueError(f"example {index} of epoch {epoch} is not running; it cannot be {outcome.name.lower()}")
        _, place = self._pending.pop(example_id)
        self._epochs[epoch].settle(place, outcome)
        if self._experience:
            self._experience.note_outcome(index, outcome)

    def outcomes(self, epoch: int) -> dict[GroupOutcome, list[int]]:
        """The dataset indices of an epoch that ended in each way."""
        found: dict[int, list[int]] = {ord(outcome): [] for outcome in GroupOutcome}
        order, marks = self._order_of(epoch), self._epochs[epoch].marks
        for index, mark in zip(order, marks, strict=True):
            if mark in found:
                found[mark].append(index)
        return {outcome: sorted(found[ord(outcome)]) for outcome in GroupOutcome}

    def counters(self) -> dict[str, float]:
        """Nothing: a run without tasks has its counts elsewhere."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as JSON values, and functions that make them on the thread that writes them."""
        return {
            **self._settings,
            "order": self._beginning(),
            **({"fingerprint": dict(self._fingerprint)} if self._fingerprint else {}),
            "epoch": self.epoch,
            "position": self._position,
            "next_group_id": self._numbers.next,
            "pending": [[*example_id, *ids] for example_id, ids in self._pending.items()]
            + [[*issue.example_id, issue.group_id, place] for issue, place in self._owed],
            "epochs": [epoch.saved() for epoch in self._epochs],
            "experience": self._experience.saved() if self._experience else None,
        }

    def load_state_dict(self, state: Mapping[str, Any], finished: Collection[int] = ()) -> None:
        """Continue from `state_dict`, in the epoch that was begun. finished: the ids of groups that were kept.

        Raises CheckpointError if it was written for another dataset, order or seed.
        """
        if state.get("is_stream"):
            raise CheckpointError(
                "the checkpoint was written with a stream, and this run has rows by index; continue with the same "
                "dataset, or start in another run_dir"
            )
        if "tasks" in state:
            raise CheckpointError(
                f"the checkpoint was written with the tasks {', '.join(map(repr, state['tasks']))}, this run has none; "
                "give the same tasks, or start in another run_dir"
            )
        for name, value in self._settings.items():
            if state[name] != value:
                raise CheckpointError(
                    f"the checkpoint was written with {name} {state[name]}, this run has {value}; "
                    "continue with the same dataset and settings, or start in another run_dir"
                )
        now = self._fingerprint or {}
        saved = state.get("fingerprint", {}).items()
        if changed := [index for index, digest in saved if now.get(index, digest) != digest]:
            raise CheckpointError(
                f"the dataset has changed since the checkpoint was written: example {changed[0]} is another one; "
                "continue with the dataset as it was, or start in another run_dir"
            )
        self._epochs = [self._unpacked_epoch(**saved) for saved in state["epochs"]]
        self._order = self._order_of(self.epoch) if self._epochs else []
        if state.get("order") != self._beginning():
            raise CheckpointError(
                "the checkpoint was written by another version of arl or numpy, which shuffles examples differently: "
                "continue with that version, or start in another run_dir"
            )
        self._position = state["position"]
        self._numbers.next = state["next_group_id"]
        pending = [
            (Issue(group_id=group_id, example_id=(epoch, index), task=self._task), place)
            for epoch, index, group_id, place in sorted(state["pending"], key=itemgetter(2))
        ]
        self._pending = {i.example_id: (i.group_id, place) for i, place in pending if i.group_id in finished}
        self._owed = deque((issue, place) for issue, place in pending if issue.group_id not in finished)
        if self._experience:
            self._load_experience(self._experience, state["experience"])
        self._coming = None
        self.prepare()

    def _beginning(self) -> list[int]:
        """The first examples of the epoch, by which its order is recognized."""
        return [*self._order[:8]]

    def _unpacked_epoch(self, order: str | None, marks: str) -> _Epoch:
        places = None if order is None else array("q", unpacked(order))
        length = self._num_examples if places is None else len(places)
        return _Epoch(places, bytearray(unpacked(marks).ljust(length, b".")))

    def _load_experience(self, experience: Experience, state: Any) -> None:
        """A run without a curriculum kept the outcomes, but no rewards."""
        if state is not None:
            experience.load(state)
            return
        for epoch in range(len(self._epochs)):
            for outcome, indices in self.outcomes(epoch).items():
                for index in indices:
                    experience.note_outcome(index, outcome)

    def _next_of_epoch(self) -> tuple[Issue, int]:
        if self._position == len(self._order):
            self._begin_epoch(len(self._epochs))
        place, index = self._position, self._order[self._position]
        self._position += 1
        return Issue(group_id=self._numbers.take(), example_id=(self.epoch, index), task=self._task), place

    def _begin_epoch(self, epoch: int) -> None:
        if self._curriculum and self._experience:
            self._order = array("q", asked_for_stage(self._curriculum, epoch, self._experience.records()))
        else:
            self._order, self._coming = self._coming or self._settings_order(epoch), None
        self._epochs.append(_Epoch(self._order if self._curriculum else None, bytearray(b"." * len(self._order))))
        self._position = 0

    def _order_of(self, epoch: int) -> Sequence[int]:
        if epoch == self.epoch and self._order:
            return self._order
        order = self._epochs[epoch].order
        return self._settings_order(epoch) if order is None else order

    def _settings_order(self, epoch: int) -> Sequence[int]:
        """The order that the settings define."""
        if not self._shuffle:
            return range(self._num_examples)
        import numpy as np

        draw = np.random.default_rng([*f"{self._seed}-{epoch}".encode()])
        return array("i", draw.permutation(np.arange(self._num_examples, dtype=np.int32)).tobytes())


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

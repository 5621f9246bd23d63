"""The ledger of examples: which have run in which epoch, how each ended (exactly once), and which come next.

ExampleLedger hands out rows by their index, StreamLedger those of a stream. A run of tasks has a TaskLedger over
several (tasks.py).
"""

from __future__ import annotations

import asyncio
import operator
import zlib
from array import array
from base64 import b64decode, b64encode
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from operator import itemgetter
from statistics import fmean
from typing import Any

from arl.api.errors import CheckpointError, CurriculumError, DatasetError
from arl.api.types import Example
from arl.api.workflow import Curriculum, ExampleRecord, Stream, StreamChunk

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


class _Ledger:
    """The examples that are pending: handed out, without an outcome."""

    def __init__(self, task: str, numbers: GroupNumbers | None) -> None:
        """task: whose examples they are. numbers: those of the run, if it has other ledgers."""
        self._task = task
        self._numbers = numbers or GroupNumbers()
        self._pending: dict[ExampleId, tuple[int, int]] = {}
        """Group id, and place in the epoch's order."""
        self._owed: deque[tuple[Issue, int]] = deque()
        """What a resumed ledger hands out again, and its place."""

    @property
    def pending(self) -> tuple[ExampleId, ...]:
        """In the order of handing out."""
        return tuple(sorted(self._pending, key=self._pending.__getitem__))

    @property
    def owed(self) -> int | None:
        """The id of the group that a resumed ledger hands out again next; None if it owes none."""
        return self._owed[0][0].group_id if self._owed else None

    def counters(self) -> dict[str, float]:
        """Nothing: a run without tasks has its counts elsewhere."""
        return {}

    def _ended(self, example_id: ExampleId, outcome: GroupOutcome) -> int:
        """The place of a pending example, which it is no longer. Raises ValueError for one that is not pending."""
        epoch, index = example_id
        if example_id not in self._pending:
            raise ValueError(f"example {index} of epoch {epoch} is not running; it cannot be {outcome.name.lower()}")
        return self._pending.pop(example_id)[1]

    def _saved_pending(self) -> list[list[int]]:
        return [[*example_id, *ids] for example_id, ids in self._pending.items()] + [
            [*issue.example_id, issue.group_id, place] for issue, place in self._owed
        ]

    def _load_pending(self, saved: Iterable[Sequence[int]], finished: Collection[int]) -> None:
        """finished: the ids of groups that were kept: they stay pending, and the others are owed."""
        pending = [
            (Issue(group_id=group_id, example_id=(epoch, index), task=self._task), place)
            for epoch, index, group_id, place in sorted(saved, key=itemgetter(2))
        ]
        self._pending = {i.example_id: (i.group_id, place) for i, place in pending if i.group_id in finished}
        self._owed = deque((issue, place) for issue, place in pending if issue.group_id not in finished)


class ExampleLedger(_Ledger):
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
        """fingerprint: digests of some examples, by their index, for comparison with a checkpoint's."""
        if num_examples < 1:
            raise DatasetError("the dataset is empty; training needs at least one example")
        super().__init__(task, numbers)
        self._settings = {"num_examples": num_examples, "shuffle": shuffle, "seed": seed}
        self._num_examples = num_examples
        self._shuffle = shuffle
        self._seed = seed
        self._curriculum = curriculum
        self._fingerprint = fingerprint
        self._experience = Experience(num_examples) if curriculum else None
        self._epochs: list[_Epoch] = []
        self._order: Sequence[int] = []
        self._coming: Sequence[int] | None = None
        """The order of the next epoch, if it was made ahead of time."""
        self._position = 0

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
        place = self._ended(example_id, outcome)
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

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as JSON values, and functions that make them on the thread that writes them."""
        return {
            **self._settings,
            "order": self._beginning(),
            **({"fingerprint": dict(self._fingerprint)} if self._fingerprint else {}),
            "epoch": self.epoch,
            "position": self._position,
            "next_group_id": self._numbers.next,
            "pending": self._saved_pending(),
            "epochs": [epoch.saved() for epoch in self._epochs],
            "experience": self._experience.saved() if self._experience else None,
        }

    def load_state_dict(self, state: Mapping[str, Any], finished: Collection[int] = ()) -> None:
        """Continue from `state_dict`, in the epoch that was begun. finished: the ids of groups that were kept.

        Raises CheckpointError if it was written for another dataset, order or seed.
        """
        self._check(state)
        self._epochs = []
        for saved in state["epochs"]:
            order = None if saved["order"] is None else array("q", unpacked(saved["order"]))
            length = self._num_examples if order is None else len(order)
            self._epochs.append(_Epoch(order, bytearray(unpacked(saved["marks"]).ljust(length, b"."))))
        self._order = self._order_of(self.epoch) if self._epochs else []
        if state.get("order") != self._beginning():
            raise CheckpointError(
                "the checkpoint was written by another version of arl or numpy, which shuffles examples differently: "
                "continue with that version, or start in another run_dir"
            )
        self._position = state["position"]
        self._numbers.next = state["next_group_id"]
        self._load_pending(state["pending"], finished)
        if self._experience and state["experience"] is not None:
            self._experience.load(state["experience"])
        elif self._experience:  # a run without a curriculum kept the outcomes, but no rewards
            for epoch in range(len(self._epochs)):
                for outcome, indices in self.outcomes(epoch).items():
                    for index in indices:
                        self._experience.note_outcome(index, outcome)
        self._coming = None
        self.prepare()

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError for the state of another dataset."""
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

    def _beginning(self) -> list[int]:
        """The first examples of the epoch, by which its order is recognized."""
        return [*self._order[:8]]

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


_FEW = 16
Read = Callable[[Callable[[], StreamChunk]], Awaitable[StreamChunk]]
"""Calls a function that blocks, on a thread."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a chunk is in its epoch."""

    epoch: int
    first: int
    """The number of its first row."""
    size: int
    cursor: Any
    digest: str


class StreamLedger(_Ledger):
    """Hands out the rows of a stream, epoch after epoch; an epoch ends where the stream ends.

    An example's index is the number of its row. A checkpoint holds the cursors of the chunks that have a pending
    example, and of the chunk that is being handed out: no other row is read again. Memory: these chunks' rows, and a
    byte for each example of each epoch. `ready` is awaited before each `issue`.
    """

    num_examples: int | None = None
    """Unknown."""

    def __init__(self, stream: Stream, read: Read, *, task: str = "", numbers: GroupNumbers | None = None) -> None:
        super().__init__(task, numbers)
        self._stream = stream
        self._read = read
        self.epoch = 0
        self._position = 0
        """The number of the next row."""
        self._rows: deque[Example] = deque()
        """Rows that were read, the next one first."""
        self._after: Any = stream.beginning
        """Where the next chunk begins; None: in the next epoch."""
        self._places: list[_Place] = []
        """The chunks that would be read again, and until there are _most_places, others."""
        self._most_places = _FEW
        self._marks = [bytearray()]
        self._packed: dict[int, str] = {}
        """The marks of epochs that have ended, as they lie in checkpoints."""
        self._is_restored = False
        """Whether rows that a checkpoint counts on are still to be read."""

    def prepare(self) -> None:
        pass

    async def ready(self) -> None:
        """Read ahead, so that `issue` has a row. Raises DatasetError if the stream fails, or has none."""
        await self._read_again()
        if self._owed or self._rows:
            return
        if self._after is None:
            self._begin_epoch()
        await self._read_chunk()
        if not self._rows and self._position:  # it ended with a whole chunk
            self._begin_epoch()
            await self._read_chunk()
        if not self._rows:
            raise DatasetError("the stream is empty; training needs at least one example")

    def issue(self) -> Issue:
        if self._owed:
            issue, place = self._owed.popleft()
        else:
            place, self._position = self._position, self._position + 1
            example_id, example = (self.epoch, place), self._rows.popleft()
            issue = Issue(group_id=self._numbers.take(), example_id=example_id, task=self._task, example=example)
            self._marks[-1].append(ord("."))
        self._pending[issue.example_id] = issue.group_id, place
        return issue

    def note_rewards(self, example_id: ExampleId, rewards: Sequence[float], task: str = "") -> None:
        pass  # no curriculum asks

    def settle(self, example_id: ExampleId, outcome: GroupOutcome, task: str = "") -> None:
        """Give a pending example its outcome. Raises ValueError for one that is not pending."""
        place = self._ended(example_id, outcome)
        self._marks[example_id[0]][place] = ord(outcome)

    def outcomes(self, epoch: int) -> dict[GroupOutcome, list[int]]:
        """The indices of an epoch that ended in each way."""
        return {one: [i for i, mark in enumerate(self._marks[epoch]) if mark == ord(one)] for one in GroupOutcome}

    def state_dict(self) -> dict[str, Any]:
        self._forget_places()
        return {
            "is_stream": True,
            "epoch": self.epoch,
            "position": self._position,
            "next_group_id": self._numbers.next,
            "pending": self._saved_pending(),
            "places": [[one.epoch, one.first, one.size, one.cursor, one.digest] for one in self._places],
            "after": self._after,
            "marks": [self._saved(epoch) for epoch in range(len(self._marks))],
        }

    def _saved(self, epoch: int) -> Callable[[], str]:
        """Makes the JSON value of its marks, on any thread. An epoch that has ended is packed once."""
        if epoch == self.epoch or b"." in self._marks[epoch]:
            return partial(packed, bytes(self._marks[epoch]))

        def packed_once() -> str:
            if epoch not in self._packed:
                self._packed[epoch] = packed(self._marks[epoch])
            return self._packed[epoch]

        return packed_once

    def load_state_dict(self, state: Mapping[str, Any], finished: Collection[int] = ()) -> None:
        """Continue from `state_dict`. finished: the ids of groups that were kept. Raises CheckpointError."""
        if not state.get("is_stream"):
            raise CheckpointError(
                "the checkpoint was written with rows by index, and this run has a stream; continue with the same "
                "dataset, or start in another run_dir"
            )
        self.epoch, self._position = state["epoch"], state["position"]
        self._numbers.next = state["next_group_id"]
        self._after = state["after"]
        self._places = [_Place(*values) for values in state["places"]]
        self._marks = [bytearray(unpacked(marks)) for marks in state["marks"]]
        self._load_pending(state["pending"], finished)
        self._is_restored = True

    async def _read_again(self) -> None:
        """After a resume: the chunks whose rows are owed, and what is left of the one that was being handed out."""
        if not self._is_restored:
            return
        known: dict[ExampleId, Example] = {}
        wanted = {issue.example_id for issue, _ in self._owed}
        for place in self._places:
            chunk = await self._read(partial(self._stream.read, place.cursor))
            if (len(chunk.rows), chunk.digest) != (place.size, place.digest):
                raise CheckpointError(
                    f"the stream{f' of task {self._task!r}' if self._task else ''} has changed since the checkpoint "
                    f"was written: row {place.first}, or the number of rows after it, is another; continue with the "
                    "stream as it was, or start in another run_dir"
                )
            ids = [(place.epoch, place.first + number) for number in range(len(chunk.rows))]
            known |= {one: row for one, row in zip(ids, chunk.rows, strict=True) if one in wanted}
            if place is self._places[-1] and place.epoch == self.epoch:
                self._rows = deque(chunk.rows[self._position - place.first :])
        self._owed = deque((replace(one, example=known[one.example_id]), place) for one, place in self._owed)
        self._is_restored = False

    async def _read_chunk(self) -> None:
        chunk = await self._read(partial(self._stream.read, self._after))
        if len(self._places) > self._most_places:
            self._forget_places()
            self._most_places = 2 * len(self._places) + _FEW
        if chunk.rows:
            self._places.append(_Place(self.epoch, self._position, len(chunk.rows), chunk.cursor, chunk.digest))
        self._rows.extend(chunk.rows)
        self._after = chunk.after

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self._position = 0
        self._marks.append(bytearray())
        self._after = self._stream.beginning

    def _forget_places(self) -> None:
        """Keep the last chunk, and those that have a pending example."""
        begins = [(place.epoch, place.first) for place in self._places]
        needed = [*self._pending, *(issue.example_id for issue, _ in self._owed)]
        kept = {bisect_right(begins, example_id) - 1 for example_id in needed} | {len(begins) - 1}
        self._places = [place for number, place in enumerate(self._places) if number in kept]

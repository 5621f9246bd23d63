"""StreamLedger: the ledger of a stream's examples, which come in the stream's order; a resumed one reads some again."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

from arl.api.errors import CheckpointError, DatasetError
from arl.api.types import Example
from arl.api.workflow import Stream, StreamChunk
from arl.rollout.ledger import ExampleId, GroupNumbers, GroupOutcome, Issue, packed, unpacked

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


class StreamLedger:
    """Hands out the rows of a stream, epoch after epoch; an epoch ends where the stream ends.

    An example's index is the number of its row. A checkpoint holds the cursors of the chunks that have a pending
    example, and of the chunk that is being handed out: no other row is read again. Memory: these chunks' rows, and a
    byte for each example of each epoch. `ready` is awaited before each `issue`.
    """

    num_examples: int | None = None
    """Unknown."""

    def __init__(self, stream: Stream, read: Read, *, task: str = "", numbers: GroupNumbers | None = None) -> None:
        """task: whose examples they are. numbers: those of the run, if it has other ledgers."""
        self._stream = stream
        self._read = read
        self._task = task
        self._numbers = numbers or GroupNumbers()
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
        self._pending: dict[ExampleId, int] = {}
        self._owed: deque[Issue] = deque()

    def prepare(self) -> None:
        """Nothing."""

    @property
    def pending(self) -> tuple[ExampleId, ...]:
        """Handed out and not ended, in the order of handing out."""
        return tuple(sorted(self._pending, key=self._pending.__getitem__))

    @property
    def owed(self) -> int | None:
        return self._owed[0].group_id if self._owed else None

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
            issue = self._owed.popleft()
        else:
            example_id = self.epoch, self._position
            issue = Issue(
                group_id=self._numbers.take(), example_id=example_id, task=self._task, example=self._rows.popleft()
            )
            self._position += 1
            self._marks[-1].append(ord("."))
        self._pending[issue.example_id] = issue.group_id
        return issue

    def note_rewards(self, example_id: ExampleId, rewards: Sequence[float], task: str = "") -> None:
        """Nothing: no curriculum asks."""

    def settle(self, example_id: ExampleId, outcome: GroupOutcome, task: str = "") -> None:
        """Give a pending example its outcome. Raises ValueError for one that is not pending."""
        epoch, index = example_id
        if self._pending.pop(example_id, None) is None:
            raise ValueError(f"example {index} of epoch {epoch} is not running; it cannot be {outcome.name.lower()}")
        self._marks[epoch][index] = ord(outcome)

    def outcomes(self, epoch: int) -> dict[GroupOutcome, list[int]]:
        """The indices of an epoch that ended in each way."""
        return {one: [i for i, mark in enumerate(self._marks[epoch]) if mark == ord(one)] for one in GroupOutcome}

    def counters(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        self._forget_places()
        return {
            "is_stream": True,
            "epoch": self.epoch,
            "position": self._position,
            "next_group_id": self._numbers.next,
            "pending": [[*example_id, group_id] for example_id, group_id in self._pending.items()]
            + [[*issue.example_id, issue.group_id] for issue in self._owed],
            "places": [[one.epoch, one.first, one.size, one.cursor, one.digest] for one in self._places],
            "after": self._after,
            "marks": [self._saved(epoch) for epoch in range(len(self._marks))],
        }

    def _saved(self, epoch: int) -> Callable[[], str]:
        """Makes the JSON value of its marks, on any thread. An epoch that has ended is packed once."""
        if epoch < self.epoch and b"." not in self._marks[epoch]:
            return partial(self._packed_once, epoch)
        return partial(packed, bytes(self._marks[epoch]))

    def _packed_once(self, epoch: int) -> str:
        if epoch not in self._packed:
            self._packed[epoch] = packed(self._marks[epoch])
        return self._packed[epoch]

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
        pending = [((epoch, index), number) for epoch, index, number in sorted(state["pending"], key=itemgetter(2))]
        self._pending = {example_id: number for example_id, number in pending if number in finished}
        self._owed = deque(
            Issue(group_id=number, example_id=example_id, task=self._task)
            for example_id, number in pending
            if number not in finished
        )
        self._is_restored = True

    _is_restored = False
    """Whether rows that a checkpoint counts on are still to be read."""

    async def _read_again(self) -> None:
        """After a resume: the chunks whose rows are owed, and what is left of the one that was being handed out."""
        if not self._is_restored:
            return
        known: dict[ExampleId, Example] = {}
        wanted = {issue.example_id for issue in self._owed}
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
        self._owed = deque(replace(issue, example=known[issue.example_id]) for issue in self._owed)
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
        needed = [*self._pending, *(issue.example_id for issue in self._owed)]
        kept = {bisect_right(begins, example_id) - 1 for example_id in needed} | {len(begins) - 1}
        self._places = [place for number, place in enumerate(self._places) if number in kept]

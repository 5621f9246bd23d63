"""The files of an event log.

    run_dir/events/TABLE-LIFE-SEGMENT.arrows      table: batches.py; life: a process that trained in run_dir, from 1;
                                                  segment: from 1

Each is a stream of Arrow's IPC format: what a kill cut short is its last batch, and all before it can be read, also
while the file grows.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from arl.api.errors import RunFileError
from arl.api.events import SCHEMA, Event
from arl.observe.events.batches import SCHEMA_KEY, SCHEMAS, TABLES, TableName, records_in

_SEGMENT_BYTES: dict[TableName, int] = {"events": 16 << 20, "calls": 16 << 20, "tokens": 64 << 20}
_NAME = re.compile(r"(events|calls|tokens)-(\d{4,})-(\d{4,})\.arrows")
_CUT_SHORT = re.compile(r"bytes available|but only read|for message body, got")
"""What pyarrow says of a message that is not there to its end."""
_MARK = b"\xff" * 4
"""Each message begins so."""
_DAMAGES = (pa.ArrowException, ValueError, OSError, MemoryError, EOFError)


class SegmentName(NamedTuple):
    life: int
    segment: int
    table: TableName

    @property
    def file(self) -> str:
        return f"{self.table}-{self.life:04}-{self.segment:04}.arrows"


def segments(directory: Path) -> list[SegmentName]:
    """The files of the log, by life and segment; empty without a log."""
    if not directory.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in directory.iterdir())
    names = [SegmentName(int(match[2]), int(match[3]), match[1]) for match in found if match]  # pyright: ignore[reportArgumentType]
    return sorted(names)


# Writing


@dataclass(slots=True)
class _Open:
    name: SegmentName
    file: IO[bytes]
    head: bytes
    """The message of its schema."""
    end: int = 0
    """Where its last whole batch ends."""


class SegmentFiles:
    """The files of one life. Keeps all of `directory` below `most_bytes` by deleting old segments, tokens first."""

    def __init__(self, directory: Path, most_bytes: int) -> None:
        self._directory = directory
        self._most_bytes = most_bytes
        self._life = 0
        self._open: dict[TableName, _Open] = {}
        self._next: dict[TableName, int] = {}
        """The number of the table's next segment, if that is not 1."""

    def append(self, table: TableName, stream: bytes) -> tuple[int, int]:
        """Write the batch of a stream that batches.packed made; returns its segment and offset."""
        size = 8 + int.from_bytes(stream[4:8], "little")
        own = self._file(table, stream[:size])
        if own.file.tell() != own.end:  # an error cut a batch short
            own.file.seek(own.end)
            own.file.truncate()
        if own.end == 0:
            own.file.write(own.head)
        own.file.write(stream[size:])
        own.file.flush()
        own.end = own.file.tell()
        return own.name.segment, own.end - (len(stream) - size)

    def force_to_disk(self) -> None:
        """Wait until what was written would survive a power cut."""
        if not self._open:
            return
        for own in self._open.values():
            os.fsync(own.file.fileno())
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def close(self) -> None:
        for own in self._open.values():
            with suppress(OSError):
                own.file.close()
        self._open.clear()

    def _file(self, table: TableName, head: bytes) -> _Open:
        """The open segment of the table, or the next one."""
        while not self._life:  # take the next number that no other process has taken, by making its first file
            self._directory.mkdir(parents=True, exist_ok=True)
            life = 1 + max((name.life for name in segments(self._directory)), default=0)
            with suppress(FileExistsError):
                self._create(SegmentName(life, 1, "events"), SCHEMAS["events"].serialize().to_pybytes())
                self._life = life
        if own := self._open.get(table):
            is_there = (self._directory / own.name.file).exists()  # or somebody has deleted the log
            if is_there and own.end < min(_SEGMENT_BYTES[table], self._most_bytes // 8) and own.head == head:
                return own
            if is_there:
                os.fsync(own.file.fileno())
            with suppress(OSError):
                own.file.close()
            del self._open[table]
            self._next[table] = own.name.segment + 1  # also if it cannot be opened yet
        self._directory.mkdir(parents=True, exist_ok=True)
        self._make_room()
        return self._create(SegmentName(self._life, self._next.get(table, 1), table), head)

    def _create(self, name: SegmentName, head: bytes) -> _Open:
        self._open[name.table] = _Open(name, (self._directory / name.file).open("xb"), head)
        return self._open[name.table]

    def _make_room(self) -> None:
        """Delete the oldest segments, tokens before calls before events, until the rest fits. Open ones stay."""
        sizes = {name: (self._directory / name.file).stat().st_size for name in segments(self._directory)}
        total, are_open = sum(sizes.values()), {own.name for own in self._open.values()}
        for name in sorted(sizes, key=lambda name: (-TABLES.index(name.table), name)):
            if total <= self._most_bytes * 7 // 8:
                return
            if name not in are_open:
                (self._directory / name.file).unlink(missing_ok=True)
                total -= sizes[name]


# Reading


class _CallBatch(NamedTuple):
    """A batch of calls: the times of its first and last one are known before it is read."""

    begin: int
    end: int
    first: float
    last: float


class LogFiles:
    """The files in `directory`, which may grow while they are read.

    What cannot be read is left out, and a sentence about it is added to `problems`, once.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.problems: dict[str, None] = {}
        """Sentences, in order."""
        self.num_bytes_read = self.num_bytes_waiting = 0
        """Bytes of the table `events` that were read; and that the last `new_records` left to the next one."""
        self._ends: dict[SegmentName, int] = {}
        """How far each file of `events` was read."""
        self._known: dict[SegmentName, list[_CallBatch]] = {}
        self._tokens: tuple[tuple[int, int, int], pa.RecordBatch] | None = None
        """The last batch of tokens, and where it lies: the episodes of a group are in one."""

    def new_records(self, most: int | None = None) -> Iterator[tuple[int, Event]]:
        """(life, record) for each record of the table `events` since the last call, in order.

        most: ends after the batch that makes it so many; the next call goes on.
        """
        number, left = 0, dict[SegmentName, int]()
        for name in segments(self.directory):
            if name.table == "events":
                with suppress(FileNotFoundError):  # deleted meanwhile
                    left[name] = (self.directory / name.file).stat().st_size
        for name in list(left):
            start = self._ends.get(name, 0)
            for _, end, batch in self._batches(name, start):
                records = self._records(name, batch)
                yield from ((name.life, record) for record in records)
                number, self._ends[name] = number + len(records), end
                if most is not None and number >= most:
                    break
            else:
                del left[name]  # what of it is not read cannot be
            self.num_bytes_read += self._ends.get(name, 0) - start
            if most is not None and number >= most:
                break
        self.num_bytes_waiting = sum(max(size - self._ends.get(name, 0), 0) for name, size in left.items())

    def calls(self, first: float, last: float, life: int | None = None, episode: str | None = None) -> Iterator[Event]:
        """The turns, tool calls and rewards that ended within these times; of all episodes, or of one of this name."""
        wanted = (pc.field("t") >= first) & (pc.field("t") <= last)
        if episode is not None:
            wanted &= pc.field("episode") == episode
        for name, batch in self.call_batches(first, last, life):
            yield from self._records(name, batch.filter(wanted))

    def call_batches(
        self, first: float = -math.inf, last: float = math.inf, life: int | None = None
    ) -> Iterator[tuple[SegmentName, pa.RecordBatch]]:
        """The batches that may hold calls of these times, each with its file."""
        for name in segments(self.directory):
            if name.table != "calls" or life not in (None, name.life):
                continue
            known = self._known.setdefault(name, [])
            for begin, end, batch in self._batches(name, known[-1].end if known else 0):
                if len(t := batch.column("t").to_numpy(zero_copy_only=False)):
                    known.append(_CallBatch(begin, end, t.min(), t.max()))
            for one in known:
                if one.first <= last and one.last >= first:
                    try:
                        yield name, self._batch_at(name, one.begin)
                    except RunFileError as error:
                        self.problems.setdefault(str(error))

    def tokens(self, life: int, segment: int, offset: int) -> pa.RecordBatch:
        """The batch of tokens there. Raises RunFileError for one that was deleted, or is damaged."""
        place = life, segment, offset
        if self._tokens is None or self._tokens[0] != place:
            self._tokens = place, self._batch_at(SegmentName(life, segment, "tokens"), offset)
        return self._tokens[1]

    def _batch_at(self, name: SegmentName, offset: int) -> pa.RecordBatch:
        path = self.directory / name.file
        try:
            with pa.OSFile(str(path)) as file:
                schema = _schema_of(path, name.table, file)
                file.seek(offset)
                return _decoded(pa.ipc.read_message(file), schema)
        except FileNotFoundError:
            raise RunFileError(f"{path} is gone: the oldest tokens are deleted to keep log.events.max_gb") from None
        except _DAMAGES as error:
            raise RunFileError(f"{path} is damaged at byte {offset}: {error}") from error

    def _records(self, name: SegmentName, batch: pa.RecordBatch) -> list[Event]:
        records, flaws = records_in(batch)
        for flaw in flaws:
            path = self.directory / name.file
            self.problems.setdefault(f"{path} holds a record that this arl does not know, and leaves out: {flaw}")
        return records

    def _batches(self, name: SegmentName, start: int) -> Iterator[tuple[int, int, pa.RecordBatch]]:
        """The batches from byte `start` on, each with its begin and end. One that is not whole yet is no problem."""
        path, offset = self.directory / name.file, 0
        try:
            with pa.OSFile(str(path)) as file:
                size = file.size()
                schema = _schema_of(path, name.table, file) if size else None
                file.seek(max(start, file.tell()))
                while (offset := file.tell()) < size:
                    message = _message(path, file)
                    try:
                        batch = _decoded(message, schema)
                    except _DAMAGES as error:
                        self.problems.setdefault(
                            f"{path} is damaged at byte {offset}: {error}; later records can be read"
                        )
                        continue
                    yield offset, file.tell(), batch
        except FileNotFoundError:
            return  # deleted meanwhile
        except RunFileError as error:
            self.problems.setdefault(str(error))
        except _DAMAGES as error:
            if not _CUT_SHORT.search(str(error)):
                self.problems.setdefault(f"{path} is damaged at byte {offset}: {error}; what follows is left out")


def _schema_of(path: Path, table: TableName, file: pa.NativeFile) -> pa.Schema:
    """Read the schema, at the file's beginning. Raises RunFileError for one of a newer arl, or of another table."""
    schema = pa.ipc.read_schema(_message(path, file))
    if (number := int((schema.metadata or {}).get(SCHEMA_KEY, 0))) > SCHEMA:
        raise RunFileError(
            f"{path} was written by a newer arl, in schema {number}; this arl reads schemas up to {SCHEMA}: update it"
        )
    for known in SCHEMAS[table]:
        index = schema.get_field_index(known.name)
        if index < 0 or schema.field(index).type != known.type:
            raise RunFileError(f"{path} is no event log, or damaged: it has no column {known.name} of {known.type}")
    return schema


def _message(path: Path, file: pa.NativeFile) -> pa.Message:
    """The next one. Raises RunFileError if there is something else."""
    offset = file.tell()
    if not _MARK.startswith(file.read(4)):
        raise RunFileError(f"{path} is no event log, or damaged, at byte {offset}: what follows is left out")
    file.seek(offset)
    return pa.ipc.read_message(file)


def _decoded(message: pa.Message, schema: pa.Schema) -> pa.RecordBatch:
    batch = pa.ipc.read_record_batch(message, schema)
    batch.validate(full=True)
    return batch

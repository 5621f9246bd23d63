"""Rows that are made when they are read: lines of a file, parts and columns of other rows, streams; their digests."""

from __future__ import annotations

import json
import mmap
import os
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, overload

from arl.api.errors import DatasetError
from arl.api.types import Example
from arl.api.workflow import StreamChunk

Columns = Mapping[str, str | Callable[[Example], Any]]
"""Columns that rows get: each by the name of another column, or by a function of the row."""


class LazyRows(Sequence[Example]):
    """Rows by index. A slice is lazy too."""

    @abstractmethod
    def row(self, index: int) -> Example:
        """index: from 0, below the length."""

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> LazyRows: ...
    def __getitem__(self, index: int | slice) -> Example | LazyRows:
        places = range(len(self))[index]
        return Chosen(self, places) if isinstance(places, range) else self.row(places)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} rows>"


class Chosen(LazyRows):
    """Some of the rows, in another order perhaps."""

    def __init__(self, rows: Any, places: Sequence[int]) -> None:
        """rows: anything with integer indexing."""
        self._rows, self._places = rows, places

    def __len__(self) -> int:
        return len(self._places)

    def row(self, index: int) -> Example:
        return self._rows[self._places[index]]


class Joined(LazyRows):
    """The rows of several parts, one after another."""

    def __init__(self, parts: Sequence[Any]) -> None:
        """parts: with a length and integer indexing."""
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> Example:
        part = bisect_right(self._ends, index)
        return self._parts[part][index - (self._ends[part - 1] if part else 0)]


class NamedRows(Joined):
    """The rows of several datasets, one after another, and which are whose."""

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        super().__init__([*datasets.values()])
        self.parts = dict(datasets)
        """Name -> its rows."""
        starts = (0, *self._ends)
        self.places = {name: range(*starts[i : i + 2]) for i, name in enumerate(datasets)}
        """Name -> the indices of its rows."""

    def name_of(self, index: int) -> str:
        """Whose row it is."""
        return [*self.parts][bisect_right(self._ends, index)]


class WithColumns(LazyRows):
    """Rows that have more columns, computed when a row is read."""

    def __init__(self, rows: Any, columns: Columns, source: object) -> None:
        """source: what errors call the rows. Raises DatasetError for columns that are neither names nor functions, and
        those of the first row."""
        for name, made in columns.items():
            if not isinstance(made, str) and not callable(made):
                raise DatasetError(
                    f"columns[{name!r}] is {made!r:.80}; give the name of another column, or a function of the row"
                )
        self._rows, self._columns, self._source = rows, columns, source
        if len(rows):
            self.row(0)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Example:
        given = self._rows[index]
        return {**given, **{name: self._value(name, made, given, index) for name, made in self._columns.items()}}

    def _value(self, name: str, made: str | Callable[[Example], Any], given: Example, index: int) -> Any:
        if isinstance(made, str) and made not in given:
            raise DatasetError(
                f"row {index + 1} of {self._source} has no {made!r} for columns[{name!r}] (it has "
                f"{', '.join(map(repr, given))})"
            )
        try:
            return given[made] if isinstance(made, str) else made(given)
        except Exception as error:
            raise DatasetError(
                f"columns[{name!r}] failed on row {index + 1} of {self._source}: {type(error).__name__}: {error}"
            ) from error


class JsonlRows(LazyRows):
    """The rows of a JSONL file that is mapped into memory. It is pickled as the file's path and the places of lines."""

    def __init__(self, path: Path, starts: array[int], stamp: tuple[int, int]) -> None:
        """starts: where the lines begin, in bytes. stamp: `stamp_of` the file when they were found."""
        self._path, self._starts, self._stamp = path, starts, stamp
        with path.open("rb") as file:
            if stamp_of(file.fileno()) != stamp:
                raise DatasetError(f"{path} has changed since it was opened; start again with it as it is now")
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> Example:
        start = self._starts[index]
        end = self._bytes.find(b"\n", start)
        line = self._bytes[start : end if end >= 0 else len(self._bytes)]
        try:
            return json.loads(line.decode("utf-8-sig"))
        except ValueError as error:
            raise DatasetError(f"{self._path} was changed while it was in use: row {index + 1}: {error}") from None

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self._path, self._starts, self._stamp)


def stamp_of(file: int) -> tuple[int, int]:
    """The size and the time of the last change of an open file."""
    known = os.fstat(file)
    return known.st_size, known.st_mtime_ns


_NUM_ROWS = 64
"""Rows that are read, evenly spread."""


def fingerprint(rows: Any) -> dict[str, str]:
    """Index -> digest, of a few rows: the same in every process. rows: with a length and integer indexing.

    A row that is not the same when it is read again, because a column is drawn at random, say, has no digest. Nor has a
    row's value that JSON does not know: only its type counts.
    """
    number = min(len(rows), _NUM_ROWS)
    places = [i * (len(rows) - 1) // max(number - 1, 1) for i in range(number)]
    first, again = ({str(place): digest_of(rows[place]) for place in places} for _ in range(2))
    return {place: digest for place, digest in first.items() if again[place] == digest}


def digest_of(row: Any) -> str:
    """32 bits of a row's content, as hexadecimal text."""
    text = json.dumps(_plain(row), sort_keys=True, default=lambda value: type(value).__name__)
    return blake2b(text.encode(errors="surrogatepass"), digest_size=4).hexdigest()


def _plain(value: Any) -> Any:
    """Keys of all kinds as text, and numpy's values and tuples as JSON has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    to_list: Callable[[], Any] | None = getattr(value, "tolist", None)
    return to_list() if callable(to_list) and not isinstance(value, str | bytes) else value


CHUNK = 64
"""Rows that are read at a time."""


class StreamedRows:
    """The rows of a `datasets.IterableDataset`, in the stream's own order. It is read in one place at a time."""

    def __init__(self, name: str, stream: Any, columns: Columns = MappingProxyType({})) -> None:
        """name: what errors call it. columns: that rows get, as in load_dataset. Raises DatasetError."""
        self._name, self._columns = name, columns
        self._open: Iterator[Any] = iter(())
        self._next: Any = None
        """The cursor of the row that `_open` gives next; None: it is not open."""
        part = getattr(stream, "_ex_iterable", None)
        while part is not None:
            if "Shuffled" in type(part).__name__ and "Buffer" in type(part).__name__:
                raise DatasetError(
                    f"{name} is a stream that was shuffled: what is in its buffer when a run stops would be lost. "
                    "Shuffle its rows before, or give rows by index: without streaming=True a dataset's files are "
                    "mapped"
                )
            part = getattr(part, "ex_iterable", None)
        self._stream = stream.skip(0)  # one that begins at its first row, even if `stream` has been read from
        self.beginning: Any = self._stream.state_dict()

    def __repr__(self) -> str:
        return f"<StreamedRows of {self._name}>"

    def head(self, number: int) -> list[Example]:
        """The first rows."""
        rows, cursor = list[Example](), self.beginning
        while len(rows) < number and cursor is not None:
            chunk = self.read(cursor)
            rows, cursor = [*rows, *chunk.rows], chunk.after
        return rows[:number]

    def read(self, cursor: Any) -> StreamChunk:
        """The chunk at a cursor: CHUNK rows, or fewer at the end. Blocks. Raises DatasetError."""
        try:
            if cursor != self._next or self._next is None:
                self._stream.load_state_dict(cursor)
                self._open = iter(self._stream)
            rows = list(islice(self._open, CHUNK))
            self._next = self._stream.state_dict() if len(rows) == CHUNK else None
        except Exception as error:
            self._next = None
            raise DatasetError(f"{self._name} cannot be read: {type(error).__name__}: {error}") from error
        if self._columns and rows:
            rows = [*WithColumns(rows, self._columns, self._name)]
        digest = digest_of(rows[0]) if rows else ""
        return StreamChunk(rows=rows, cursor=cursor, after=self._next, digest=digest)

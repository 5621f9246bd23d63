"""A stream of `datasets` as a source of examples: read in chunks, each of which can be read again from its cursor."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import MappingProxyType
from typing import Any

from arl.api.errors import DatasetError
from arl.api.tasks import StreamChunk
from arl.api.types import Example
from arl.data.lazy_rows import Columns, WithColumns
from arl.data.row_digests import digest_of

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
        if _has_buffer(stream):
            raise DatasetError(
                f"{name} is a stream that was shuffled: what is in its buffer when a run stops would be lost. Shuffle "
                "its rows before, or give rows by index: without streaming=True a dataset's files are mapped"
            )
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


def _has_buffer(stream: Any) -> bool:
    """Whether a part of it is a shuffle's buffer."""
    part = getattr(stream, "_ex_iterable", None)
    while part is not None:
        if "Shuffled" in type(part).__name__ and "Buffer" in type(part).__name__:
            return True
        part = getattr(part, "ex_iterable", None)
    return False

"""Reads the files of an event log: records as they were emitted, and columns of tokens."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import msgspec

from arl.api import events, token_records
from arl.api.errors import RunFileError
from arl.api.events import Event
from arl.eventlog.segments import (
    FrameHead,
    SegmentName,
    Stream,
    UnpackedTokens,
    frame_at,
    frame_heads,
    segments,
    unpack_tokens,
    unpacked,
)

KINDS: dict[str, type[Event]] = {
    name: kind
    for name, kind in {**vars(events), **vars(token_records)}.items()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}
"""Every kind of record, by name."""

_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(reduce(or_, KINDS.values()))


class LogFiles:
    """The files in `directory`, which may grow while they are read.

    What cannot be read is left out, and a sentence about it is added to `problems`, once.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.problems: dict[str, None] = {}
        """Sentences, in order."""
        self.num_bytes_read = 0
        """Bytes of the stream `events` that were read."""
        self._waiting: deque[tuple[SegmentName, FrameHead]] = deque()
        """Frames of that stream that were not read yet."""
        self._heads: dict[SegmentName, list[FrameHead]] = {}
        self._bad_sizes: dict[SegmentName, int] = {}
        """The sizes of files whose ends cannot be read, unless more is written."""
        self._unpacked: tuple[tuple[int, int, int], UnpackedTokens] | None = None
        """The last frame of tokens, and where it lies: the episodes of a group are in one."""

    @property
    def num_bytes_waiting(self) -> int:
        """Bytes of the stream `events` that the last `new_records` found and left to the next one."""
        return sum(head.size for _, head in self._waiting)

    def new_records(self, most: int | None = None) -> Iterator[tuple[int, Event]]:
        """(life, record) for each record of the stream `events` since the last call, in order.

        most: ends after the frame that makes it so many; the next call goes on.
        """
        for name in segments(self.directory):
            if name.stream == "events":
                self._waiting.extend((name, head) for head in self._new_heads(name))
        number = 0
        while self._waiting and (most is None or number < most):
            name, head = self._waiting.popleft()
            records = self._records(name, head)
            number += len(records)
            self.num_bytes_read += head.size
            for record in records:
                yield name.life, record

    def lives(self) -> list[int]:
        """The lives that left a file, in order."""
        return sorted({name.life for name in segments(self.directory)})

    def calls(self, first: float, last: float, life: int | None = None, most: int | None = None) -> Iterator[Event]:
        """The turns, tool calls and rewards that ended within these times.

        most: of frames that hold more records than this, only every Nth frame is read.
        """
        frames = list(self._call_frames(first, last, life))
        stride = -(-sum(head.num_records for _, head in frames) // most) if most else 1
        for name, head in frames[:: max(stride, 1)]:
            yield from (record for record in self._records(name, head) if first <= record.t <= last)

    def num_calls(self, first: float, last: float) -> int:
        """About how many `calls` yields: all records of the frames that overlap these times."""
        return sum(head.num_records for _, head in self._call_frames(first, last, None))

    def _call_frames(self, first: float, last: float, life: int | None) -> Iterator[tuple[SegmentName, FrameHead]]:
        for name in segments(self.directory):
            if name.stream == "calls" and life in (None, name.life):
                self._new_heads(name)
                for head in self._heads.get(name, ()):
                    if head.first <= last and head.last >= first:
                        yield name, head

    def tokens(self, life: int, segment: int, offset: int) -> UnpackedTokens:
        """The frame of tokens there. Raises RunFileError for one that was deleted, or is damaged."""
        place = life, segment, offset
        if self._unpacked and self._unpacked[0] == place:
            return self._unpacked[1]
        path = self.directory / SegmentName(life, segment, "tokens").file
        try:
            self._unpacked = place, unpack_tokens(frame_at(path, offset))
            return self._unpacked[1]
        except FileNotFoundError:
            raise RunFileError(f"{path} is gone: the oldest tokens are deleted to keep log.events.max_gb") from None
        except (ValueError, TypeError, struct.error, OSError) as error:
            raise RunFileError(f"{path} is damaged at byte {offset}: {error}") from error

    def num_bytes(self) -> dict[Stream, int]:
        sizes: dict[Stream, int] = {}
        for name in segments(self.directory):
            with suppress(FileNotFoundError):  # deleted meanwhile
                sizes[name.stream] = sizes.get(name.stream, 0) + (self.directory / name.file).stat().st_size
        return sizes

    def _new_heads(self, name: SegmentName) -> list[FrameHead]:
        path, known = self.directory / name.file, self._heads.setdefault(name, [])
        new: list[FrameHead] = []
        end, size = known[-1].end if known else 0, 0
        try:
            size = path.stat().st_size
            if self._bad_sizes.get(name) != size:
                for head in frame_heads(path, end):
                    if head.offset > end:
                        self._complain(f"{path} is damaged: {head.offset - end:,} bytes from byte {end} on are skipped")
                    new.append(head)
                    end = head.end
        except FileNotFoundError:
            pass  # deleted meanwhile
        except (RunFileError, OSError) as error:
            self._complain(str(error))
            self._bad_sizes[name] = size
        known += new
        return new

    def _records(self, name: SegmentName, head: FrameHead) -> list[Event]:
        path = self.directory / name.file
        try:
            with path.open("rb") as file:
                file.seek(head.end - head.size)
                raw = unpacked(path, head, file.read(head.size))
        except FileNotFoundError:
            return []
        except (RunFileError, OSError) as error:
            self._complain(str(error))
            return []
        try:
            return _DECODER.decode_lines(raw)
        except msgspec.MsgspecError:
            return self._one_by_one(path, raw)

    def _one_by_one(self, path: Path, raw: bytes) -> list[Event]:
        """The records of a frame that also holds others: of kinds that a newer arl added, for instance."""
        records: list[Event] = []
        for line in raw.splitlines():
            try:
                records.append(_DECODER.decode(line))
            except msgspec.MsgspecError as error:
                self._complain(f"{path} holds a record that this arl does not know, and leaves out: {error}")
        return records

    def _complain(self, sentence: str) -> None:
        self.problems.setdefault(sentence)

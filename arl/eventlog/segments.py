"""The files of an event log: where they lie, and the frames that they are made of.

    run_dir/events/LIFE-SEGMENT.STREAM.zst        life: a process that trained in run_dir, from 1; segment: from 1

    stream    frames of
    events    JSON lines, a record each
    calls     JSON lines: turns, tool calls, rewards
    tokens    columns of trajectories

A file is a sequence of pairs: a skippable frame of 52 bytes with what is in the next frame, and a zstd frame with a
checksum. So `zstdcat` prints the lines of a file, a reader skips frames that it does not need, and a frame that a kill
cut short is recognised by its length.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import zstandard

from arl.api.errors import RunFileError
from arl.api.events import SCHEMA

Stream = Literal["events", "calls", "tokens"]
STREAMS: tuple[Stream, ...] = ("events", "calls", "tokens")

_SKIPPABLE = 0x184D2A5A
_HEAD = struct.Struct("<II4sHHIQQdd")
_MARK = b"arle"
_HEADS_BEGIN = struct.pack("<II4s", _SKIPPABLE, _HEAD.size - 8, _MARK)
_NAME = re.compile(r"(\d{4,})-(\d{4,})\.(events|calls|tokens)\.zst")
_MOST_RAW = 1 << 31
"""No frame unpacks to more bytes than this."""


class SegmentName(NamedTuple):
    life: int
    segment: int
    stream: Stream

    @property
    def file(self) -> str:
        return f"{self.life:04}-{self.segment:04}.{self.stream}.zst"


def segments(directory: Path) -> list[SegmentName]:
    """The files of the log, by life and segment; empty without a log."""
    if not directory.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in directory.iterdir())
    names = [SegmentName(int(match[1]), int(match[2]), match[3]) for match in found if match]  # pyright: ignore[reportArgumentType]
    return sorted(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHead:
    """The head of a frame, which can be read without unpacking the frame."""

    offset: int
    """Where the pair begins."""
    size: int
    """The size of the packed bytes."""
    raw_size: int
    num_records: int
    first: float
    """The time of the first record."""
    last: float

    @property
    def end(self) -> int:
        return self.offset + _HEAD.size + self.size


def new_packer() -> zstandard.ZstdCompressor:
    """For packed_frame; of one thread."""
    return zstandard.ZstdCompressor(level=1, write_checksum=True)


def packed_frame(packer: zstandard.ZstdCompressor, raw: bytes, num_records: int, first: float, last: float) -> bytes:
    """A pair of frames."""
    body = packer.compress(raw)
    size = _HEAD.size - 8
    head = _HEAD.pack(_SKIPPABLE, size, _MARK, SCHEMA, 0, num_records, len(body), len(raw), first, last)
    return head + body


def frame_heads(path: Path, start: int = 0) -> Iterator[FrameHead]:
    """The whole frames from `start` on. A last one that is cut short does not count.

    What is damaged is skipped, up to the next frame: its offset says so. Raises RunFileError for a file of a newer
    schema, and if nothing that can be read follows what is damaged.
    """
    end, sought = path.stat().st_size, start
    with path.open("rb") as file:
        while start + _HEAD.size <= end:
            file.seek(start)
            head = _head_in(path, start, file.read(_HEAD.size))
            if head is not None and head.end <= end:
                yield head
                start, sought = head.end, start + 1  # where to seek the next one, if this one's size is wrong
                continue
            file.seek(sought)
            found = file.read(end - sought).find(_HEADS_BEGIN)
            if found < 0 and head is None:
                raise _damaged(path, start)
            if found < 0:
                return
            start, sought = sought + found, sought + found + 1


def frame_at(path: Path, offset: int) -> bytes:
    """The unpacked bytes of the frame whose pair begins at `offset`. Raises RunFileError for a damaged one."""
    with path.open("rb") as file:
        file.seek(offset)
        head = _head_in(path, offset, file.read(_HEAD.size))
        if head is None:
            raise _damaged(path, offset)
        return unpacked(path, head, file.read(head.size))


def unpacked(path: Path, head: FrameHead, body: bytes) -> bytes:
    try:
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=min(head.raw_size + 1, _MOST_RAW))
    except zstandard.ZstdError as error:
        raise RunFileError(f"{path} is damaged at byte {head.offset}: {error}; later records can be read") from error


def _damaged(path: Path, offset: int) -> RunFileError:
    return RunFileError(f"{path} is no event log, or damaged, at byte {offset}")


def _head_in(path: Path, offset: int, data: bytes) -> FrameHead | None:
    """None if it is none. Raises RunFileError for one of a newer schema."""
    if len(data) == _HEAD.size:
        magic, length, mark, schema, _, num_records, size, raw_size, first, last = _HEAD.unpack(data)
        if (magic, length, mark) == (_SKIPPABLE, _HEAD.size - 8, _MARK):
            if schema > SCHEMA:
                raise RunFileError(
                    f"{path} was written by a newer arl, in schema {schema}; this arl reads schemas up to {SCHEMA}: "
                    "update it"
                )
            return FrameHead(
                offset=offset, size=size, raw_size=raw_size, num_records=num_records, first=first, last=last
            )
    return None


# Tokens


class TokenRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The description of one trajectory in a frame of tokens."""

    episode: str
    number: int
    tokens: int
    """T: entries of this row in the columns per token."""
    trained: int = 0
    """M: entries in the columns per trained token; 0 if it was not trained, or no values were kept."""
    role: str = "agent"
    reward: float | None = None
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    turns: list[tuple[int, int, float]] = []
    """(start, stop, reward) of each."""
    states: list[str | None] = []
    """The key of the state in which each turn was taken; empty if none has one."""
    temperature: float = 1.0
    is_truncated: bool = False
    images: list[tuple[str, int, int, int, int]] = []
    """(digest, width, height, start, stop) of each: its file in the run's ImageStore, and its placeholders."""


class _Columns(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[TokenRow]
    columns: list[tuple[str, str, int]]
    """(name, dtype, entries)"""


def pack_tokens(rows: Sequence[TokenRow], columns: Mapping[str, np.ndarray]) -> bytes:
    """The raw bytes of a frame of tokens: the size of a JSON header, the header, the columns end to end."""
    about = [(name, column.dtype.str, len(column)) for name, column in columns.items()]
    header = msgspec.json.encode(_Columns(rows=list(rows), columns=about))
    return b"".join((struct.pack("<I", len(header)), header, *(column.tobytes() for column in columns.values())))


class UnpackedTokens(NamedTuple):
    """A frame of tokens."""

    rows: list[TokenRow]
    columns: dict[str, np.ndarray]
    starts: list[int]
    """Where each row begins in the columns per token, and the end of the last."""
    trained_starts: list[int]
    """The same in the columns per trained token."""


def unpack_tokens(raw: bytes) -> UnpackedTokens:
    """Raises ValueError (msgspec's, too) for bytes that pack_tokens did not make."""
    (length,) = struct.unpack_from("<I", raw)
    header = msgspec.json.decode(raw[4 : 4 + length], type=_Columns)
    columns: dict[str, np.ndarray] = {}
    start = 4 + length
    for name, dtype, entries in header.columns:
        if np.dtype(dtype).kind not in "biuf":
            raise ValueError(f"column {name} is of dtype {dtype}")
        columns[name] = np.frombuffer(raw, dtype, count=entries, offset=start)
        start += columns[name].nbytes
    starts = accumulate((row.tokens for row in header.rows), initial=0)
    trained_starts = accumulate((row.trained for row in header.rows), initial=0)
    return UnpackedTokens(header.rows, columns, [*starts], [*trained_starts])

"""SegmentFiles: the files that one life of an event log writes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import IO

from arl.eventlog.segments import STREAMS, SegmentName, Stream, new_packer, packed_frame, segments

_SEGMENT_BYTES: dict[Stream, int] = {"events": 16 << 20, "calls": 16 << 20, "tokens": 64 << 20}


class SegmentFiles:
    """The files of one life. Keeps all of `directory` below `most_bytes` by deleting old segments, tokens first."""

    def __init__(self, directory: Path, most_bytes: int) -> None:
        self._directory = directory
        self._most_bytes = most_bytes
        self._life = 0
        self._packer = new_packer()
        self._open: dict[Stream, tuple[SegmentName, IO[bytes], int]] = {}
        """The name, the file, and where its last whole frame ends."""
        self._next: dict[Stream, int] = {}
        """The number of the stream's next segment, if that is not 1."""

    def append(self, stream: Stream, raw: bytes, num_records: int, times: tuple[float, float]) -> None:
        """Write a frame. times: of its first and last record."""
        self.append_packed(stream, packed_frame(self._packer, raw, num_records, *times))

    def append_packed(self, stream: Stream, frame: bytes) -> tuple[int, int]:
        """Write what packed_frame made; returns its segment and offset."""
        name, file, end = self._file(stream)
        if file.tell() != end:  # an error cut a frame short
            file.seek(end)
            file.truncate()
        file.write(frame)
        file.flush()
        self._open[stream] = name, file, end + len(frame)
        return name.segment, end

    def force_to_disk(self) -> None:
        """Wait until what was written would survive a power cut."""
        if not self._open:
            return
        for _, file, _ in self._open.values():
            os.fsync(file.fileno())
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def close(self) -> None:
        for _, file, _ in self._open.values():
            with suppress(OSError):
                file.close()
        self._open.clear()

    def _file(self, stream: Stream) -> tuple[SegmentName, IO[bytes], int]:
        self._begin_life()
        if stream in self._open:
            name, file, end = self._open[stream]
            is_there = (self._directory / name.file).exists()  # or somebody has deleted the log
            if is_there and end < min(_SEGMENT_BYTES[stream], self._most_bytes // 8):
                return name, file, end
            if is_there:
                os.fsync(file.fileno())
            with suppress(OSError):
                file.close()
            del self._open[stream]
            self._next[stream] = name.segment + 1  # also if it cannot be opened yet
        self._directory.mkdir(parents=True, exist_ok=True)
        self._make_room()
        name = SegmentName(self._life, self._next.get(stream, 1), stream)
        self._open[stream] = name, (self._directory / name.file).open("xb"), 0
        return self._open[stream]

    def _begin_life(self) -> None:
        """Take the next number that no other process has taken, by making its first file."""
        if self._life:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        life = max((name.life for name in segments(self._directory)), default=0)
        while True:
            life += 1
            name = SegmentName(life, 1, "events")
            with suppress(FileExistsError):
                self._open["events"] = name, (self._directory / name.file).open("xb"), 0
                self._life = life
                return

    def _make_room(self) -> None:
        """Delete the oldest segments, tokens before calls before events, until the rest fits. Open ones stay."""
        sizes = {name: (self._directory / name.file).stat().st_size for name in segments(self._directory)}
        total, are_open = sum(sizes.values()), {name for name, _, _ in self._open.values()}
        for stream in reversed(STREAMS):
            for name in sizes:
                if total <= self._most_bytes * 7 // 8:
                    return
                if name.stream == stream and name not in are_open:
                    (self._directory / name.file).unlink(missing_ok=True)
                    total -= sizes[name]

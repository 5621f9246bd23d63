"""EventLog: writes the records of a run to run_dir/events, on a thread of its own.

    emit, keep (any thread, nobody waits) --> two queues --every half second--> frames --> segments, old ones deleted

It never stops or slows the run: what cannot be written, or comes faster than it can be, is dropped and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, TypeVar
from zlib import crc32

import msgspec
import numpy as np

from arl.api.config import EventsConfig
from arl.api.events import Event, KeptTokens, Lost, RunEnded, TokensKept, Warned
from arl.api.types import Trajectory
from arl.eventlog.segments import (
    STREAMS,
    SegmentName,
    Stream,
    TokenRow,
    new_packer,
    pack_tokens,
    packed_frame,
    segments,
)

log = logging.getLogger(__name__)

_Item = TypeVar("_Item")

_EVERY_S = 0.5
_MOST_EVENTS = 500_000
"""More records than this do not wait to be written."""
_MOST_TOKENS = 20_000_000
"""Nor do more tokens: some 800 MB."""
_FRAME_TOKENS = 1_000_000
"""A frame of tokens ends after the trajectory that makes it this long."""
_SEGMENT_BYTES: dict[Stream, int] = {"events": 16 << 20, "calls": 16 << 20, "tokens": 64 << 20}
_CLOSING_S = 20.0
_QUIET_S = 60.0
"""The log tells of at most one failure in this time."""
_TOKEN_COLUMNS = ("token_ids", "loss_mask", "behavior_logprobs", "versions")


class EventLog:
    """The Events of a run, within `open`. Each `open` is a new life of the log."""

    def __init__(self, run_dir: Path, config: EventsConfig) -> None:
        self.directory = run_dir / "events"
        self._config = config
        self._events: deque[Event] = deque()
        self._calls: deque[Event] = deque()
        self._tokens: deque[KeptTokens] = deque()
        self._num_tokens = 0
        """Of those that wait. `_counting` is held while it changes."""
        self._counting = threading.Lock()
        self._lost = _Losses()
        self._choice = _Choice(config)
        self._is_over = threading.Event()
        self._wake = threading.Event()

    def emit(self, event: Event) -> None:
        queue = self._calls if event.is_call else self._events
        if len(queue) >= _MOST_EVENTS:
            self._lost.events += 1
            return
        queue.append(event)

    def keep(self, tokens: KeptTokens) -> None:
        count = _num_tokens(tokens)
        if not self._choice.takes(tokens, count):
            return
        with self._counting:
            if self._num_tokens + count > _MOST_TOKENS:
                self._lost.episodes += len(tokens.rows)
                return
            self._num_tokens += count
        self._tokens.append(tokens)

    @contextmanager
    def open(self) -> Iterator[EventLog]:
        """Write within the block. Its end waits _CLOSING_S at most for what is not yet written."""
        handler = _Warnings(self)
        logging.getLogger("arl").addHandler(handler)
        thread = threading.Thread(target=self._run, name="arl-events", daemon=True)
        thread.start()
        try:
            yield self
        except BaseException as error:
            self._events.append(RunEnded(how=type(error).__name__, why=str(error)))
            raise
        else:
            self._events.append(RunEnded(how="finished"))
        finally:
            logging.getLogger("arl").removeHandler(handler)
            self._is_over.set()
            self._wake.set()
            thread.join(_CLOSING_S)
            if thread.is_alive():
                log.warning("%s did not take the last records in %g s", self.directory, _CLOSING_S)

    def _run(self) -> None:
        files = _Segments(self.directory, int(self._config.max_gb * 1e9))
        told_at = -_QUIET_S
        try:
            while True:
                self._wake.wait(_EVERY_S)
                is_over = self._is_over.is_set()
                try:
                    self._write(files)
                except Exception as error:  # noqa: BLE001 (nothing here may end the run)
                    self._lost.why = f"{type(error).__name__}: {error}"
                    if time.monotonic() - told_at >= _QUIET_S:
                        told_at = time.monotonic()
                        log.warning("%s cannot be written, and the run goes on without: %s", self.directory, error)
                if is_over:
                    return
        finally:
            files.close()

    def _write(self, files: _Segments) -> None:
        """Write all that waits. What an error leaves unwritten is counted as lost."""
        tokens = _all_of(self._tokens)
        with self._counting:
            self._num_tokens -= sum(map(_num_tokens, tokens))
        now = time.time()
        with self._counted(episodes=sum(len(block.rows) for block in tokens)):
            for part in _frames(tokens):
                segment, offset = files.append("tokens", part.raw(), len(part.rows), (now, now))
                rows = [(episode, number) for episode, number, _ in part.rows]
                self._events.append(TokensKept(segment=segment, offset=offset, rows=rows))
        self._append(files, "calls", _all_of(self._calls))
        events = _all_of(self._events)
        if lost := self._lost.told():
            events.append(lost)
        self._append(files, "events", events)

    def _append(self, files: _Segments, stream: Stream, records: Sequence[Event]) -> None:
        with self._counted(events=len(records)):
            if records:
                times = min(map(_TIME, records)), max(map(_TIME, records))
                files.append(stream, _lines(records), len(records), times)

    @contextmanager
    def _counted(self, *, events: int = 0, episodes: int = 0) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._lost.events += events
            self._lost.episodes += episodes
            raise


_ENCODER = msgspec.json.Encoder(enc_hook=repr)


def _lines(records: Sequence[Event]) -> bytes:
    try:
        return _ENCODER.encode_lines(records)
    except UnicodeEncodeError:  # half of a character, which no JSON file can hold, becomes a question mark
        return b"".join(
            _ENCODER.encode(_encodable(msgspec.to_builtins(record, enc_hook=repr))) + b"\n" for record in records
        )


def _encodable(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="replace").decode()
        case dict():
            return {_encodable(name): _encodable(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_encodable(inner) for inner in value]
        case _:
            return value


_TIME = attrgetter("t")


def _all_of(queue: deque[_Item]) -> list[_Item]:
    """Takes what is in it now."""
    return [queue.popleft() for _ in range(len(queue))]


class _Choice:
    """Whose tokens to keep, of episodes that are in no batch: failed, rejected, held-out ones."""

    def __init__(self, config: EventsConfig) -> None:
        self._config = config
        self._num_tokens = self._num_failed = 0
        """Since the last batch."""

    def takes(self, tokens: KeptTokens, count: int) -> bool:
        if tokens.is_chosen:
            self._num_tokens = self._num_failed = 0
            return True
        self._num_tokens += count
        keeps = self._config.keeps(self._num_tokens)
        if keeps != "some":
            return keeps == "all"
        episode, number, _ = tokens.rows[0]
        if number < 0:
            self._num_failed += 1
            return self._num_failed <= self._config.notable
        group = episode.partition(".")[0]
        return self._config.has_in_share(int(group) if group.isdecimal() else crc32(episode.encode()))


class _Losses:
    def __init__(self) -> None:
        self.events = self.episodes = 0
        self.why = ""

    def told(self) -> Lost | None:
        """A record of what was lost since the last one."""
        if not (self.events or self.episodes):
            return None
        why = self.why or "more came than could be written"
        lost = Lost(num_events=self.events, num_episodes=self.episodes, why=why)
        self.events = self.episodes = 0
        self.why = ""
        return lost


class _Warnings(logging.Handler):
    def __init__(self, events: EventLog) -> None:
        super().__init__(logging.WARNING)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):
            self._events.emit(Warned(level=record.levelname.lower(), logger=record.name, text=self.format(record)))


class _Segments:
    """The files of one life. Keeps all of `directory` below `most_bytes` by deleting old segments, tokens first."""

    def __init__(self, directory: Path, most_bytes: int) -> None:
        self._directory = directory
        self._most_bytes = most_bytes
        self._life = 0
        self._packer = new_packer()
        self._open: dict[Stream, tuple[SegmentName, IO[bytes], int]] = {}
        """The name, the file, and where its last whole frame ends."""

    def append(self, stream: Stream, raw: bytes, num_records: int, times: tuple[float, float]) -> tuple[int, int]:
        """Write a frame; returns its segment and offset. times: of its first and last record."""
        frame = packed_frame(self._packer, raw, num_records, *times)
        name, file, end = self._file(stream)
        file.seek(end)
        file.truncate()  # a frame that an error cut short
        file.write(frame)
        file.flush()
        self._open[stream] = name, file, end + len(frame)
        return name.segment, end

    def close(self) -> None:
        for _, file, _ in self._open.values():
            with suppress(OSError):
                file.close()
        self._open.clear()

    def _file(self, stream: Stream) -> tuple[SegmentName, IO[bytes], int]:
        self._begin_life()
        if stream in self._open:
            name, file, end = self._open[stream]
            if end < min(_SEGMENT_BYTES[stream], self._most_bytes // 8):
                return name, file, end
            file.close()
            del self._open[stream]
            name = name._replace(segment=name.segment + 1)
        else:
            name = SegmentName(self._life, 1, stream)
        self._make_room()
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


def _frames(blocks: Iterable[KeptTokens]) -> Iterator[_TokenFrame]:
    """The blocks in frames of some _FRAME_TOKENS tokens, each with the same columns."""
    frame = _TokenFrame()
    for part in (part for block in blocks for part in _parts(block)):
        if frame.parts and not frame.takes(part):
            yield frame
            frame = _TokenFrame()
        frame.add(part)
    if frame.parts:
        yield frame


def _parts(block: KeptTokens) -> Iterator[KeptTokens]:
    """The block in parts of no more tokens than that."""
    if _num_tokens(block) <= _FRAME_TOKENS:
        yield block
        return
    start = 0
    for row in block.rows:
        stop = start + row[2].num_trained_tokens
        trained = {name: column[start:stop] for name, column in block.trained.items()}
        yield KeptTokens(rows=[row], trained=trained)
        start = stop


def _num_tokens(block: KeptTokens) -> int:
    return sum(len(trajectory.token_ids) for _, _, trajectory in block.rows)


class _TokenFrame:
    def __init__(self) -> None:
        self.parts: list[KeptTokens] = []
        self._num_tokens = 0

    @property
    def rows(self) -> list[tuple[str, int, Trajectory]]:
        return [row for part in self.parts for row in part.rows]

    def takes(self, part: KeptTokens) -> bool:
        is_alike = self.parts[0].trained.keys() == part.trained.keys()
        return is_alike and self._num_tokens + _num_tokens(part) <= _FRAME_TOKENS

    def add(self, part: KeptTokens) -> None:
        self.parts.append(part)
        self._num_tokens += _num_tokens(part)

    def raw(self) -> bytes:
        rows, names = self.rows, self.parts[0].trained
        members = [trajectory for _, _, trajectory in rows]
        columns = {name: np.concatenate([getattr(t, name) for t in members]) for name in _TOKEN_COLUMNS}
        if any(t.token_rewards is not None for t in members):
            zeros = (np.zeros(len(t.token_ids)) if t.token_rewards is None else t.token_rewards for t in members)
            columns["token_rewards"] = np.concatenate([*zeros]).astype(np.float32)
        columns |= {name: np.concatenate([part.trained[name] for part in self.parts]) for name in names}
        return pack_tokens([_token_row(*row, is_trained=bool(names)) for row in rows], columns)


def _token_row(episode: str, number: int, trajectory: Trajectory, *, is_trained: bool) -> TokenRow:
    return TokenRow(
        episode=episode,
        number=number,
        tokens=len(trajectory.token_ids),
        trained=trajectory.num_trained_tokens if is_trained else 0,
        role=trajectory.role,
        reward=trajectory.reward,
        rewards=dict(trajectory.rewards),
        metrics=dict(trajectory.metrics),
        turns=[(turn.start, turn.stop, turn.reward) for turn in trajectory.turns],
        temperature=trajectory.temperature,
        is_truncated=trajectory.is_truncated,
    )

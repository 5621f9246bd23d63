"""EventLog: writes the records of a run to run_dir/events, and images that they name, on a thread of its own; and
CpuWatch, which reads the CPU time of a run's processes for it.

    emit, keep (any thread, nobody waits) --> three queues --every half second--> batches --> segments, old ones deleted
    flush (a checkpoint waits)            --> at once, and to the disk

emit makes JSON of a record at once, while it lies in the CPU's cache: half a second later that takes several times as
long.

It never stops or slows the run. What cannot be written waits for a minute; then it is dropped and counted, as is what
comes faster than it can be written. pyarrow is loaded on the thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from zlib import crc32

import msgspec

from arl.api.events import FLUSH_S, CpuUsed, Event, KeptTokens, Lost, RunEnded, TokenFrame, TokensKept, Warned
from arl.api.settings.run import NUM_NOTABLE, EventsConfig, is_sampled
from arl.observe.events.image_store import ImageStore

if TYPE_CHECKING:
    from arl.observe.events.files import SegmentFiles

log = logging.getLogger(__name__)

_Item = TypeVar("_Item")
_EVERY_S = 0.5
_GATHER_S, _MANY_CALLS, _MANY_TOKENS = 2.0, 1000, 100_000
"""Calls and tokens are written after so long, or when so many wait: a batch of them takes some kB however small it is.
"""
_WATCH_S, _WATCH_SHARE = (0.45, 60.0), 0.01
"""How often `watch` is asked, at most and at least, and after which share of the log's age: many hours need no more
records than the first minutes."""
_MOST_EVENTS = 500_000
"""More records than this do not wait to be written."""
_MOST_TOKENS = 20_000_000
"""Nor do more tokens: some 800 MB."""
_CLOSING_S = 20.0
_PATIENCE_S = 60.0
"""How long the log cannot be written before what waits is dropped."""
_QUIET_S = 60.0
"""The log tells of at most one failure in this time."""
_LONGEST = 20_000
"""Characters of a warning that the event log holds."""


class EventLog:
    """The Events of a run, within `open`. Each `open` is a new life of the log."""

    def __init__(self, run_dir: Path, config: EventsConfig, watch: Callable[[], Event | None] = lambda: None) -> None:
        """watch: asked for a record now and then, and at the end, on the log's thread: twice a second at first."""
        self.directory = run_dir / "events"
        self._images = ImageStore(run_dir)
        self._watch = watch
        self._began = self._watched_at = -math.inf
        self._config = config
        self._events: deque[bytes] = deque()
        """JSON."""
        self._calls: deque[bytes] = deque()
        self._gathered_at = -math.inf
        self._tokens: deque[KeptTokens | TokenFrame] = deque()
        self._num_tokens = 0
        """The number of waiting tokens. `_counting` is held while it changes."""
        self._counting = threading.Lock()
        self._lost_events = self._lost_episodes = 0
        """Of which no record tells yet; episodes: those whose tokens were lost."""
        self._why = ""
        """The error because of which something cannot be written."""
        self._num_chosen = self._num_failed = 0
        """Tokens, and failed episodes, since the last batch."""
        self._is_over = threading.Event()
        self._wake = threading.Event()
        self._flushes: deque[Future[bool]] = deque()
        self._thread: threading.Thread | None = None
        self._failing_since: float | None = None
        self._told_at = -_QUIET_S

    def emit(self, event: Event) -> None:
        queue = self._calls if event.is_call else self._events
        if len(queue) < _MOST_EVENTS and (json := _json(event)):
            queue.append(json)
        else:
            self._lost_events += 1

    def keep(self, tokens: KeptTokens | TokenFrame) -> None:
        count = tokens.num_tokens
        if not self._takes(tokens, count):
            return
        with self._counting:
            if self._num_tokens + count > _MOST_TOKENS:
                self._lost_episodes += len(tokens.rows)
                return
            self._num_tokens += count
        self._tokens.append(tokens)

    def _takes(self, tokens: KeptTokens | TokenFrame, count: int) -> bool:
        """Also of episodes that are in no batch (failed, rejected, held-out ones), whose tokens the settings choose."""
        if isinstance(tokens, TokenFrame):
            self._num_chosen = self._num_failed = 0
            return True
        self._num_chosen += count
        keeps = self._config.keeps(self._num_chosen)
        if keeps != "sampled":
            return keeps == "all"
        episode, number, _ = tokens.rows[0]
        if number < 0:
            self._num_failed += 1
            return self._num_failed <= NUM_NOTABLE
        group = episode.partition(".")[0]
        return is_sampled(int(group) if group.isdecimal() else crc32(episode.encode()))

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        if self._thread is None or not self._thread.is_alive():
            return False
        flushed: Future[bool] = Future()
        self._flushes.append(flushed)
        self._wake.set()
        try:
            return flushed.result(timeout_s)
        except TimeoutError:
            log.warning("%s did not take the records of a checkpoint in %g s", self.directory, timeout_s)
            return False

    @contextmanager
    def open(self) -> Iterator[EventLog]:
        """Write within the block. Its end waits _CLOSING_S at most for what is not yet written."""
        handler = _Warnings(self)
        logging.getLogger("arl").addHandler(handler)
        self._began = time.monotonic()
        self._thread = thread = threading.Thread(target=self._run, name="arl-events", daemon=True)
        thread.start()
        try:
            yield self
        except BaseException as error:
            is_stop, why = isinstance(error, asyncio.CancelledError | KeyboardInterrupt), ""
            with suppress(Exception):  # an error of a user's own may have no text
                why = str(error)[:_LONGEST]
            self._put(RunEnded(how="interrupted" if is_stop else type(error).__name__, why=why))
            raise
        else:
            self._put(RunEnded(how="finished"))
        finally:
            logging.getLogger("arl").removeHandler(handler)
            self._is_over.set()
            self._wake.set()
            thread.join(_CLOSING_S)
            if thread.is_alive():
                log.warning("%s did not take the last records in %g s", self.directory, _CLOSING_S)

    def _run(self) -> None:
        from arl.observe.events.files import SegmentFiles

        files = SegmentFiles(self.directory, int(self._config.max_gb * 1e9))
        is_over = False
        try:
            while not is_over:
                self._wake.wait(_EVERY_S)
                self._wake.clear()
                is_over, now = self._is_over.is_set(), time.monotonic()
                every_s = min(max(_WATCH_SHARE * (now - self._began), _WATCH_S[0]), _WATCH_S[1])
                if is_over or now - self._watched_at >= every_s:
                    self._watched_at = now
                    with suppress(Exception):
                        if seen := self._watch():
                            self.emit(seen)
                flushes = _all_of(self._flushes)  # before what they wait for
                is_written = self._tried(files, to_disk=bool(flushes), is_all=is_over)
                if is_written is None:
                    self._flushes.extendleft(flushes)
                else:
                    for flushed in flushes:
                        flushed.set_result(is_written)
        finally:
            files.close()
            for flushed in _all_of(self._flushes):
                flushed.set_result(False)

    def _tried(self, files: SegmentFiles, *, to_disk: bool, is_all: bool) -> bool | None:
        """Whether all that waited is written; None if it still waits."""
        try:
            self._write(files, is_all=is_all or to_disk)
            if to_disk:
                files.force_to_disk()
        except Exception as error:  # noqa: BLE001 (nothing here may end the run)
            now = time.monotonic()
            self._failing_since = now if self._failing_since is None else self._failing_since
            self._why = f"{type(error).__name__}: {error}"
            if now - self._told_at >= _QUIET_S:
                self._told_at = now
                log.warning("%s cannot be written, and the run goes on without: %s", self.directory, error)
            if isinstance(error, OSError):
                if now - self._failing_since < _PATIENCE_S:
                    return None
                self._lost_events += len(_all_of(self._events)) + len(_all_of(self._calls))
                self._forget_tokens(_all_of(self._tokens))
            return False
        self._failing_since, self._why = None, ""
        return True

    def _write(self, files: SegmentFiles, *, is_all: bool = True) -> None:
        """Write what waits. Of what it cannot write it raises the first error, and an OSError leaves it waiting.

        is_all: also calls and tokens that are few, and do not wait for long.
        """
        errors: list[Exception] = []
        steps, now = [self._write_events], time.monotonic()
        are_many = len(self._calls) >= _MANY_CALLS or self._num_tokens >= _MANY_TOKENS
        if is_all or are_many or now - self._gathered_at >= _GATHER_S:
            self._gathered_at = now
            steps = [self._write_tokens, partial(self._write_lines, "calls", self._calls), self._write_events]
        for write in steps:
            try:
                write(files)
            except Exception as error:  # noqa: BLE001 (raised below)
                errors.append(error)
        if errors:
            raise errors[0]

    def _write_tokens(self, files: SegmentFiles) -> None:
        from arl.observe.events.batches import frames_of, renamed

        waiting = deque(_all_of(self._tokens))
        try:
            waiting = deque(frames_of(waiting))
            while waiting:
                frame = waiting[0]
                self._images.keep(frame.images)
                segment, offset = files.append("tokens", renamed(frame) if frame.is_renamed else frame.frame)
                self._put(TokensKept(segment=segment, offset=offset, rows=frame.rows))
                with self._counting:
                    self._num_tokens -= waiting.popleft().num_tokens
        except OSError:
            self._tokens.extendleft(reversed(waiting))
            raise
        except BaseException:
            self._forget_tokens(waiting)
            raise

    def _put(self, record: Event) -> None:
        """Also when many records wait."""
        if json := _json(record):
            self._events.append(json)

    def _write_events(self, files: SegmentFiles) -> None:
        """With a record of what was lost before."""
        events, episodes = self._lost_events, self._lost_episodes
        why = self._why or "more came than could be written"
        lost = Lost(num_events=events, num_episodes=episodes, why=why) if events or episodes else None
        self._write_lines("events", self._events, files, *([_json(lost)] if lost else ()))
        self._lost_events -= events
        self._lost_episodes -= episodes

    def _write_lines(
        self, table: Literal["events", "calls"], queue: deque[bytes], files: SegmentFiles, *more: bytes
    ) -> None:
        from arl.observe.events.batches import packed, records_batch

        waited = _all_of(queue)
        try:
            if lines := [*waited, *more]:
                files.append(table, packed(records_batch(table, lines)))
        except OSError:
            queue.extendleft(reversed(waited))
            raise
        except BaseException:
            self._lost_events += len(waited)
            raise

    def _forget_tokens(self, blocks: Collection[KeptTokens | TokenFrame]) -> None:
        with self._counting:
            self._num_tokens -= sum(block.num_tokens for block in blocks)
        self._lost_episodes += sum(len(block.rows) for block in blocks)


def _plain(value: Any) -> object:
    """For what msgspec does not know, such as numpy's numbers."""
    match value:
        case Integral():
            return int(value)
        case Real():
            return float(value)
        case str():
            return str.__str__(value)
        case _:
            return repr(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)


def encodable(value: Any) -> Any:
    """What msgspec's JSON can hold of plain values: half a character becomes a question mark, a huge integer None."""
    match value:
        case str():
            return value.encode(errors="replace").decode()
        case dict():
            return {encodable(name): encodable(inner) for name, inner in value.items()}
        case list():
            return [encodable(inner) for inner in value]
        case tuple():
            return tuple(map(encodable, value))
        case int() if value.bit_length() > 63:
            return None
        case _:
            return value


def _json(record: Event) -> bytes:
    """Empty for a record that JSON cannot hold."""
    try:
        return _ENCODER.encode(record)
    except Exception:  # noqa: BLE001 (half a character, a number of thousands of digits, a value of somebody's own)
        with suppress(Exception):
            return _ENCODER.encode(encodable(msgspec.to_builtins(record, enc_hook=_plain)))
    return b""


def _all_of(queue: deque[_Item]) -> list[_Item]:
    """Takes what is in it now."""
    return [queue.popleft() for _ in range(len(queue))]


class _Warnings(logging.Handler):
    """Writes warnings into the log. It does not count as somebody who shows them: see `_goes_unheard`."""

    def __init__(self, events: EventLog) -> None:
        super().__init__(logging.WARNING)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):
            text = self.format(record)[:_LONGEST]
            self._events.emit(Warned(level=record.levelname.lower(), logger=record.name, text=text))
        if logging.lastResort and self._goes_unheard(record):
            logging.lastResort.handle(record)

    def _goes_unheard(self, record: logging.LogRecord) -> bool:
        """Python prints a warning to stderr if no handler takes it, and takes this one for such a handler."""
        handlers, logger = list[logging.Handler](), logging.getLogger(record.name)
        while logger is not None:
            handlers += logger.handlers
            logger = logger.parent if logger.propagate else None
        return handlers[:1] == [self] and all(isinstance(handler, _Warnings) for handler in handlers)


# CPU

_PROC = Path("/proc")
OTHERS = "others"


class CpuWatch:
    """Reads the CPU time of this process, and of those that it started. Make it on the thread of the event loop.

    Each read costs about a millisecond, on the caller's thread. Linux tells; elsewhere there are no records.
    """

    def __init__(self) -> None:
        self._loop_clock: int | None = None
        with suppress(AttributeError, OSError):  # not every system has it
            self._loop_clock = time.pthread_getcpuclockid(threading.get_ident())
        self._names: dict[int, str] = {}
        """The names of the processes that this one started, by process id."""

    def read(self) -> CpuUsed | None:
        """None where /proc says nothing."""
        if not (children := _children("self")) and not (_PROC / "self" / "task").is_dir():
            return None
        self._names = {pid: self._names.get(pid) or _name(pid) for pid in children}
        used = dict.fromkeys(self._names.values(), 0.0)
        for pid, name in self._names.items():
            used[name] += _cpu_s(pid)
        loop = 0.0
        with suppress(OSError):  # the thread has ended
            loop = time.clock_gettime(self._loop_clock) if self._loop_clock is not None else 0.0
        return CpuUsed(controller=time.process_time(), loop=loop, processes=used)


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0


def _children(pid: int | str) -> list[int]:
    """The children of each of its threads. Empty for a process that has ended, and if /proc does not list them."""
    found: list[int] = []
    for listed in (_PROC / str(pid) / "task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found += map(int, listed.read_text().split())
    return found


def _cpu_s(pid: int) -> float:
    """The CPU seconds of a process and of all processes that it started."""
    seconds = 0.0
    with suppress(OSError):  # it has ended
        seconds = time.clock_gettime(((~pid) << 3) | 2)  # as clock_getcpuclockid(3) makes a process's clock
    return seconds + sum(map(_cpu_s, _children(pid)))


def _name(pid: int) -> str:
    """The process's name, from its command line: a server has a port, and arl's other processes have a log."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return OTHERS
    if "--port" in words[:-1]:
        return f"http://127.0.0.1:{words[words.index('--port') + 1]}"
    return next((Path(word).stem for word in words if word.endswith(".log")), OTHERS)

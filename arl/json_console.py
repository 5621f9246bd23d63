"""One JSON object for each line on stdout and stderr, for machines that collect logs (`log.format: json`).

Each object has `time` (ISO 8601, UTC), `level`, `kind`, `logger` and `message`, and what its kind adds: a log record
its traceback, a step its numbers. What others print becomes objects of the kind `output`.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO


class _JsonLines:
    """The console of this process while it is JSON. Any thread may write; a line is never torn."""

    def __init__(self) -> None:
        self.depth = 0
        """How many blocks of json_console are open."""
        self.copies: list[Callable[[str], None]] = []
        self._lock = threading.RLock()
        self._streams: tuple[TextIO, TextIO] = sys.stdout, sys.stderr
        self._handler = _Handler(self)
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._removed: list[logging.Handler] = []

    def open(self) -> None:
        out, err = self._streams = sys.stdout, sys.stderr
        wrapped = sys.stdout, sys.stderr = _Output(self, out, "stdout"), _Output(self, err, "stderr")
        for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
            for handler in list(getattr(logger, "handlers", ())):
                if isinstance(handler, logging.StreamHandler) and handler.stream in self._streams:
                    self._take_over(logger, handler, wrapped[self._streams.index(handler.stream)])
        logging.root.addHandler(self._handler)
        logging.captureWarnings(True)

    def _take_over(self, logger: Any, handler: logging.StreamHandler[Any], stream: _Output) -> None:
        """The root logger's text would repeat what is written here; other loggers may not pass their records on."""
        if logger is logging.root:
            logging.root.removeHandler(handler)
            self._removed.append(handler)
        else:
            self._moved.append((handler, handler.stream))
            handler.setStream(stream)

    def close(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _Output):
                stream.end_line()
        sys.stdout, sys.stderr = self._streams
        logging.captureWarnings(False)
        logging.root.removeHandler(self._handler)
        for handler in self._removed:
            logging.root.addHandler(handler)
        for handler, stream in self._moved:
            handler.setStream(stream)
        self._removed, self._moved = [], []

    def write(self, stream: TextIO, level: str, kind: str, logger: str, message: str, **more: Any) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = _dumped({"time": now, "level": level, "kind": kind, "logger": logger, "message": message, **more})
        with self._lock:
            stream.write(line + "\n")
            stream.flush()  # else a part of a line may reach a pipe that both streams share
            for copy in tuple(self.copies):
                copy(line)

    def tell(self, level: str, kind: str, message: str, **more: Any) -> None:
        self.write(self._streams[1] if level == "error" else self._streams[0], level, kind, "arl", message, **more)

    def log(self, record: logging.LogRecord, message: str, traces: str | None) -> None:
        more = {} if traces is None else {"traceback": traces}
        self.write(self._streams[1], record.levelname.lower(), "log", record.name, message, **more)


class _Handler(logging.Handler):
    def __init__(self, lines: _JsonLines) -> None:
        super().__init__()
        self._lines = lines
        self._formatter = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            traces = self._formatter.formatException(record.exc_info) if record.exc_info else record.exc_text
            self._lines.log(record, record.getMessage(), traces or record.stack_info)
        except Exception:  # noqa: BLE001 - as logging's own handlers do
            self.handleError(record)


class _Output:
    """Stands in for stdout or stderr. Everything but writing is the stream's own."""

    def __init__(self, lines: _JsonLines, stream: TextIO, name: str) -> None:
        self._lines = lines
        self._stream = stream
        self._name = name
        self._begun = threading.local()
        """The line that a thread has begun."""

    def write(self, text: str) -> int:
        if not self._lines.depth:  # somebody kept it past the end of the run
            return self._stream.write(text)
        *whole, rest = (getattr(self._begun, "text", "") + text).split("\n")
        self._begun.text = rest
        for line in whole:
            self._say(line)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def end_line(self) -> None:
        """Write what this thread has begun."""
        self._say(getattr(self._begun, "text", ""))
        self._begun.text = ""

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _say(self, line: str) -> None:
        message = line.rpartition("\r")[2] if not line.endswith("\r") else line.strip("\r").rpartition("\r")[2]
        if message.strip():
            self._lines.write(self._stream, "info", "output", self._name, message)


_LINES = _JsonLines()


@contextmanager
def json_console(is_wanted: bool) -> Iterator[None]:
    """Within the block, each line on stdout and stderr is a JSON object, if that is wanted. Blocks may be nested.

    An error that leaves the block, and that nobody catches, is an object, too. Not for output of C code and of other
    processes.
    """
    if not is_wanted:
        yield
        return
    if not _LINES.depth:
        _LINES.open()
    _LINES.depth += 1
    try:
        yield
    except Exception:
        sys.excepthook = _tell_uncaught
        raise
    finally:
        _LINES.depth -= 1
        if not _LINES.depth:
            _LINES.close()


def is_json() -> bool:
    """Whether the console is JSON now."""
    return _LINES.depth > 0


def copy_lines(to: Callable[[str], None]) -> None:
    """Hand each line of the JSON console to this function, too."""
    _LINES.copies.append(to)


def stop_copying(to: Callable[[str], None]) -> None:
    """Does nothing if it got no copies."""
    if to in _LINES.copies:
        _LINES.copies.remove(to)


def tell(kind: str, message: str, *, level: str = "info", **more: Any) -> None:
    """Write an object: errors to stderr, everything else to stdout. more: what its kind adds."""
    _LINES.tell(level, kind, message, **more)


def _tell_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    shown = "".join(traceback.format_exception(kind, error, trace))
    _LINES.write(sys.stderr, "error", "error", "arl", f"{kind.__name__}: {error}", traceback=shown)


def _dumped(content: dict[str, Any]) -> str:
    try:
        return json.dumps(content, allow_nan=False, default=str)
    except ValueError:  # JSON has no NaN
        return json.dumps(_finite(content), allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

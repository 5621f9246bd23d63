"""What a run writes to its console: JSON lines for machines that collect logs, and a copy in logs/console.log.

Each object has `time` (ISO 8601, UTC), `level`, `kind`, `logger` and `message`, and what its kind adds: a log record
its traceback, a step its numbers. What others print stays text.

ConsoleLog copies every line that the process writes as plain text. A display that draws over itself hands over the
lines between its frames; the frames stay on the terminal.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from queue import Full, Queue
from types import TracebackType
from typing import IO, Any, TextIO

from rich.console import Console, ConsoleRenderable, RenderHook
from rich.control import Control

_CONSOLE = logging.getLogger("arl.console")
_OPEN: list[logging.Handler] = []


class JsonFormatter(logging.Formatter):
    """One object in one line. A record may have `kind`, and `more`: what its kind adds."""

    def format(self, record: logging.LogRecord) -> str:
        traces = self.formatException(record.exc_info) if record.exc_info else record.exc_text or record.stack_info
        kind = getattr(record, "kind", "log")
        content = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "kind": kind,
            "logger": record.name if kind == "log" else "arl",
            "message": record.getMessage(),
            **getattr(record, "more", {}),
            **({"traceback": traces} if traces else {}),
        }
        try:
            return json.dumps(content, allow_nan=False, default=str)
        except ValueError:  # JSON has no NaN
            return json.dumps(_finite(content), allow_nan=False, default=str)


@contextmanager
def json_console(is_wanted: bool) -> Iterator[None]:
    """Within the block, arl and Python's logging write JSON to stdout and stderr, if that is wanted. Blocks may be
    nested. An error that leaves the block, and that nobody catches, is an object, too."""
    if not is_wanted or is_json():
        yield
        return
    formatter, streams = JsonFormatter(), (sys.stdout, sys.stderr)
    out, err, all_records = (logging.StreamHandler(stream) for stream in (sys.stdout, sys.stderr, sys.stderr))
    out.addFilter(lambda record: record.levelno < logging.ERROR)
    err.setLevel(logging.ERROR)
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers: list[Any] = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    others = {handler: handler.formatter for handler in handlers if vars(handler).get("stream") in streams}
    for handler in (out, err, all_records, *others):
        handler.setFormatter(formatter)
    if not any(handler in others for handler in logging.root.handlers):
        logging.root.addHandler(all_records)
    _CONSOLE.propagate = False
    for handler in (out, err):
        _CONSOLE.addHandler(handler)
        _OPEN.append(handler)
    logging.captureWarnings(True)
    try:
        yield
    except Exception:
        sys.excepthook = _tell_uncaught
        raise
    finally:
        logging.captureWarnings(False)
        logging.root.removeHandler(all_records)
        while _OPEN:
            _CONSOLE.removeHandler(_OPEN.pop())
        for handler, before in others.items():
            handler.setFormatter(before)


def is_json() -> bool:
    return bool(_OPEN)


def tell(kind: str, message: str, *, level: str = "info", **more: Any) -> None:
    """Write an object: errors to stderr, everything else to stdout. more: what its kind adds."""
    record = {"name": "arl", "msg": message, "levelname": level, "levelno": getattr(logging, level.upper())}
    _CONSOLE.handle(logging.makeLogRecord({**record, "kind": kind, "more": more}))


def _tell_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    record = {"name": "arl", "msg": f"{kind.__name__}: {error}", "levelname": "error", "kind": "error"}
    sys.stderr.write(JsonFormatter().format(logging.makeLogRecord({**record, "exc_info": (kind, error, trace)})) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


log = logging.getLogger(__name__)

CONSOLE_LOG = "console.log"
_CONTROL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
"""What a terminal acts on: colours, movements of the cursor, links, titles."""
_MOST_WAITING = 10_000
"""Lines that wait for the disk; later ones are lost."""
_LEAVING_S = 5.0
_OPEN_LOGS: list[ConsoleLog] = []


class ConsoleLog:
    """Copies the lines of stdout and stderr to a file between `open` and `close`, as they end.

    A thread writes them, so that no print waits for the disk. A kill loses what was printed within the last moment.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: Queue[str | None] = Queue(_MOST_WAITING)
        self._writing = threading.Thread(target=self._write, name="arl-console", daemon=True)
        self._num_lost = 0
        self._copied: list[_Copied] = []
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []

    def open(self) -> None:
        self._writing.start()
        self.line(time.strftime("--- started at %Y-%m-%d %H:%M:%S"))
        _OPEN_LOGS.append(self)
        self._copied = [_Copied(stream, self) for stream in (sys.stdout, sys.stderr)]
        for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
            for handler in getattr(logger, "handlers", ()):
                for copied in self._copied:
                    if vars(handler).get("stream") is copied.stream:  # some look at sys.stderr themselves
                        self._moved.append((handler, handler.stream))
                        handler.setStream(copied)
        sys.stdout, sys.stderr = self._copied

    def close(self) -> None:
        """Waits some seconds for the disk. Does nothing if it is not open."""
        if self not in _OPEN_LOGS:
            return
        _OPEN_LOGS.remove(self)
        for copied in self._copied:
            copied.end_line()
            copied.is_open = False
        for name in ("stdout", "stderr"):  # the stream below those that stand in for it no more
            stream: Any = getattr(sys, name)
            while isinstance(stream, _Copied) and not stream.is_open:
                stream = stream.stream
            setattr(sys, name, stream)
        for handler, stream in self._moved:
            handler.setStream(stream)
        if self._num_lost:
            log.warning("%s lacks %d lines: its disk was too slow for them", self._path, self._num_lost)
        with suppress(Full):
            self._lines.put(None, timeout=_LEAVING_S)
            self._writing.join(_LEAVING_S)

    def line(self, text: str) -> None:
        """Returns at once, on any thread. Of a line that was drawn anew, the last state counts."""
        message = _CONTROL.sub("", text.rstrip("\r\n").rpartition("\r")[2])
        try:
            self._lines.put_nowait(message)
        except Full:
            self._num_lost += 1

    def _write(self) -> None:
        """On the thread. If the file cannot be written, the console says so, and later lines are dropped."""
        file: IO[bytes] | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = self._path.open("ab", buffering=0)
            while (line := self._lines.get()) is not None:
                file.write(line.encode(errors="backslashreplace") + b"\n")
        except OSError as error:
            log.warning("%s has no lines from here on: %s", self._path, error.strerror or error)
            while self._lines.get() is not None:
                continue
        finally:
            if file is not None:
                file.close()


class _Copied:
    """Stands in for stdout or stderr. Everything but writing is the stream's own."""

    def __init__(self, stream: TextIO | Any, target: ConsoleLog) -> None:
        self.stream = stream
        self.is_open = True
        self._target = target
        self._begun = threading.local()

    def write(self, text: str) -> int:
        if self.is_open:  # else somebody kept it past the end of the run
            *whole, self._begun.text = (getattr(self._begun, "text", "") + text).split("\n")
            for line in whole:
                self._target.line(line)
        return self.stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def end_line(self) -> None:
        if text := getattr(self._begun, "text", ""):
            self._target.line(text)
            self._begun.text = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _forget_logs() -> None:
    """In a forked process, which has no thread that writes, and may find the queue locked for ever."""
    for one in _OPEN_LOGS:
        for copied in one._copied:
            copied.is_open = False
    _OPEN_LOGS.clear()


os.register_at_fork(after_in_child=_forget_logs)


def copy_line(text: str) -> None:
    """Write a line to the console logs that are open, and to nothing else."""
    for one in tuple(_OPEN_LOGS):
        one.line(text)


def copy_prints(console: Console) -> None:
    """Let a console that draws on a terminal write past the logs, and copy what it prints, its frames left out."""
    stream: Any = console.file
    while isinstance(stream, _Copied):
        stream = stream.stream
    console.file = stream
    console.push_render_hook(_Prints())


class _Prints(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        said = [one for one in renderables if not isinstance(one, Control)]
        if said and _OPEN_LOGS:
            text = StringIO()
            Console(file=text, width=1000, color_system=None, force_jupyter=False).print(*said, soft_wrap=True)
            for line in text.getvalue().splitlines():
                copy_line(line.rstrip())
        return renderables

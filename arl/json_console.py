"""Console lines as JSON objects, for machines that collect logs (`log.format: json`): a logging.Formatter.

Each object has `time` (ISO 8601, UTC), `level`, `kind`, `logger` and `message`, and what its kind adds: a log record
its traceback, a step its numbers. What others print stays text.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

_CONSOLE = logging.getLogger("arl.console")
"""arl's own objects."""
_OPEN: list[logging.Handler] = []
"""Its handlers, while the console is JSON."""


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
    """Whether the console is JSON now."""
    return bool(_OPEN)


def tell(kind: str, message: str, *, level: str = "info", **more: Any) -> None:
    """Write an object: errors to stderr, everything else to stdout. more: what its kind adds."""
    record = {"name": "arl", "msg": message, "levelname": level, "levelno": getattr(logging, level.upper())}
    _CONSOLE.handle(logging.makeLogRecord({**record, "kind": kind, "more": more}))


def _tell_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    record = {"name": "arl", "msg": f"{kind.__name__}: {error}", "levelname": "error", "kind": "error"}
    line = JsonFormatter().format(logging.makeLogRecord({**record, "exc_info": (kind, error, trace)}))
    sys.stderr.write(line + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

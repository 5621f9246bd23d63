"""Failed episodes: one line for each attempt, tracebacks in a file, and an end of the run when they are too many."""

from __future__ import annotations

import logging
import traceback
from collections import Counter, deque
from pathlib import Path

from arl.api.errors import ArlError, FailureBudgetError, RunFileError

log = logging.getLogger(__name__)

_SHOWN = 3
"""Tracebacks of an unknown kind that the log shows."""
_LINES = 20
"""Attempts that get a line each, for each type of error; after these, one of every `_LINES` attempts does."""
_KEPT = 1000
"""Tracebacks of a kind that the file keeps."""
_LONGEST = 500
"""Characters of an error's message that a line holds."""


class FailureLog:
    """Logs failed attempts, and keeps their tracebacks in the file `path`; None: in no file.

    Each attempt gets a line, until `_LINES` have failed with errors of one type; then only some do.

    The message of an ArlError says what was wrong. Any other error is one in the user's code, so the log shows the
    first tracebacks of its type.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._counts: Counter[str] = Counter()

    def note(self, error: Exception, which: str, what_next: str) -> None:
        """Record a failure. which: of what, such as `episode 1 (attempt 1 of 2)`. Raises RunFileError."""
        kind = type(error).__name__
        self._counts[kind] += 1
        line = f"{which} failed with {kind}: {_in_one_line(error)}; {what_next}"
        if self._path is not None and self._counts[kind] <= _KEPT:
            _append(self._path, f"{line}\n{''.join(traceback.format_exception(error))}\n")
        if self._counts[kind] > _LINES and self._counts[kind] % _LINES:
            return
        is_shown = not isinstance(error, ArlError) and self._counts[kind] <= _SHOWN
        is_silent = isinstance(error, ArlError) or is_shown or self._path is None
        where = "" if is_silent else f" (traceback in {self._path})"
        log.warning("%s%s", line, where, exc_info=error if is_shown else None)
        if self._counts[kind] == _LINES:
            log.warning("from here on, one line for every %d attempts that fail with %s", _LINES, kind)

    def sum_up(self) -> None:
        """Log how many attempts failed, by the type of their error, where any did."""
        if not self._counts:
            return
        kinds = ", ".join(f"{number} with {kind}" for kind, number in self._counts.most_common())
        where = f"; their tracebacks are in {self._path}" if self._path else ""
        log.warning("attempts at episodes that failed: %s%s", kinds, where)


class FailureBudget:
    """Ends the run when too many of the last `window` episodes failed."""

    def __init__(self, max_failure_rate: float, window: int = 64) -> None:
        self._max_failure_rate = max_failure_rate
        self._recent: deque[Exception | None] = deque(maxlen=window)

    def record(self, error: Exception | None) -> None:
        """Count an episode, which failed with `error` or did not. Raises FailureBudgetError from the window's first."""
        self._recent.append(error)
        if len(self._recent) != self._recent.maxlen:
            return
        failures = [error for error in self._recent if error is not None]
        if len(failures) > self._max_failure_rate * len(self._recent):
            first = failures[0]
            raise FailureBudgetError(
                f"{len(failures)} of the last {len(self._recent)} episodes failed, and rollout.max_failure_rate is "
                f"{self._max_failure_rate:g}. The first failed with {type(first).__name__}: {first}"
            ) from first


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _append(path: Path, text: str) -> None:
    """Blocks the event loop for the time of a small write, as logging does."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        raise RunFileError(f"{path}, which keeps the tracebacks of episodes, cannot be written: {error}") from error

"""FailureLog: tells each kind of failure of episodes once, and from then on how often it came."""

from __future__ import annotations

import logging
import re
import sysconfig
import traceback
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from arl.api.errors import ArlError, RunFileError

log = logging.getLogger(__name__)

_EVERY = 10
"""A failure is logged when it first occurs, and again each time its count has grown by this factor. So in a run of any
length it takes a handful of lines."""
_LONGEST = 500
"""Characters of an error's message that a line holds."""
_FRAME = re.compile(r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+), in ', re.MULTILINE)
"""In a traceback that another process sent as text."""

Kind = tuple[str, str]
"""The class of an error, and the place in the user's code."""


class FailureLog:
    """Logs failed attempts, and keeps their tracebacks in the file `path`, if there is one.

    Equal failures are those with errors of one class from one place in the user's code, whatever their messages say.
    The log gets the first one of them whole, then a line when there are 10, 100, ... of them. The file gets the same
    with tracebacks. Errors that are not ArlErrors come from the user's code: the log shows their traceback, too.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._counts: Counter[Kind] = Counter()
        self._told: dict[Kind, int] = {}
        """The count of each kind when it was last logged."""

    def note(self, error: Exception, which: str, what_next: str) -> None:
        """Record a failure. which: of what, such as `episode 1 (attempt 1 of 2)`. Raises RunFileError."""
        kind = type(error).__name__, place_of_error(error)
        self._counts[kind] += 1
        number, told = self._counts[kind], self._told.get(kind, 0)
        if told and number < told * _EVERY:
            return
        self._told[kind] = number
        text = " ".join(str(error).split())
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
        line = f"{which} failed with {kind[0]}: {text}; {what_next}"
        if told:
            line = f"the same failure {number - told:,} more times, {number:,} in all; the last one: {line}"
        if self._path is not None:
            _append(self._path, f"{line}\n{''.join(traceback.format_exception(error))}\n")
        is_shown = not told and not isinstance(error, ArlError)
        where = f" (traceback in {self._path})" if told and self._path is not None else ""
        log.warning("%s%s", line, where, exc_info=error if is_shown else None)

    def sum_up(self) -> None:
        """Log how many attempts failed, by the kind of their failure, where any did."""
        if not self._counts:
            return
        kinds = ", ".join(
            f"{number:,} with {name}" + f" at {place}" * bool(place)
            for (name, place), number in self._counts.most_common()
        )
        where = f"; tracebacks are in {self._path}" if self._path else ""
        log.warning("attempts at episodes that failed: %s%s", kinds, where)


def place_of_error(error: BaseException) -> str:
    """`FILE:LINE` of the innermost frame that is neither arl's nor a library's, else not arl's, else any.

    Empty for an error that was not raised. One of another process has the frames of that process, in its cause.
    """
    cause = error.__cause__
    is_of_other_process = cause is not None and cause.__traceback__ is None  # its text is the traceback there
    sent = _FRAME.findall(str(cause)) if is_of_other_process else []
    frames = sent or [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    not_arls = [frame for frame in frames if not _is_in(frame[0], (str(Path(__file__).parents[1]),))]
    own = [frame for frame in not_arls if not _is_in(frame[0], _libraries())]
    file, line = next(iter((own or not_arls or frames)[-1:]), ("", 0))
    return f"{Path(file).name}:{line}" if file else ""


def _is_in(file: str, directories: Sequence[str]) -> bool:
    """Code that was made at run time, such as a dataclass's methods, counts as a library's."""
    return file.startswith(("<frozen ", "<string>", *(f"{directory}/" for directory in directories)))


@cache
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def _append(path: Path, text: str) -> None:
    """Like logging, this blocks the event loop for a small write."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        raise RunFileError(f"{path}, which keeps the tracebacks of episodes, cannot be written: {error}") from error

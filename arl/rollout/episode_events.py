"""What is told of episodes: EpisodeReport to the event log, FailureLog to people, and FirstFailures to trackers."""

from __future__ import annotations

import logging
import re
import sys
import sysconfig
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from arl.api.errors import (
    ArlError,
    EpisodeTimeoutError,
    ImageError,
    PromptTooLongError,
    RefusedRequestError,
    RunFileError,
    TrajectoryError,
)
from arl.api.events import (
    EPISODE,
    LONGEST_NAME,
    NOWHERE,
    AttemptFailed,
    EpisodeBegan,
    EpisodeContext,
    EpisodeEnded,
    Events,
    Fate,
    KeptTokens,
    TrajectorySummary,
    TurnEnded,
    short,
    short_names,
    timestamp,
)
from arl.api.images import Image
from arl.api.types import NOT_SAMPLED, Example, ModelRequest, ModelResponse, Trajectory
from arl.rollout.token_ledger import TokenLedger

log = logging.getLogger(__name__)

LAST_SEEN = -1
"""The number of a trajectory made of the last request: what the model last saw and said."""


_REFUSALS = (PromptTooLongError, RefusedRequestError, TrajectoryError, ImageError)
"""Errors of requests for which no server generated anything."""
_LONGEST = 2000
"""Characters of an example's column, or of an error's message, that the event log holds."""
_LONGEST_EXAMPLE = 20_000
"""Characters of all its columns."""
_MORE_COLUMNS = "..."
"""Beside the columns of an example that `shown` gives: it has more."""


def shown(example: Any) -> dict[str, Any]:
    """The example as JSON values. Long ones are cut, and columns left out after _LONGEST_EXAMPLE characters."""
    if not isinstance(example, Mapping):  # a workflow may take it all the same
        return {"": _shown(example)}
    columns, found, room = cast("Example", example), dict[str, Any](), _LONGEST_EXAMPLE
    for name, value in columns.items():
        if room <= 0:
            found[_MORE_COLUMNS] = f"{len(columns) - len(found)} more columns"
            break
        found[short(str(name))] = told = _shown(value)
        room -= len(str(told)) + min(len(str(name)), LONGEST_NAME)
    return found


def told(error: Exception) -> str:
    """`CLASS: message`, with a long message cut."""
    return f"{type(error).__name__}: {_cut(str(error))}"


def _cut(text: str) -> str:
    """Text that trackers can encode: half a surrogate pair becomes a question mark."""
    return short(text, _LONGEST).encode(errors="replace").decode()


def _shown(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int) and abs(value) < 1 << 63:
        return int(value)
    try:
        beginning = _beginning(value, iter(range(_LONGEST)))
        text = str(beginning) if isinstance(value, str) else repr(beginning)
    except Exception as error:  # noqa: BLE001 (a repr of users' own)
        text = f"{type(value).__name__}, whose repr raised {type(error).__name__}"
    return _cut(text)


@dataclass(frozen=True)
class _ImageMark:
    """Stands for an image in an example."""

    what: str

    def __repr__(self) -> str:
        return f"<image {self.what}>"


def _beginning(value: Any, left: Iterator[int]) -> Any:
    """As much of a large value as is shown, because the event loop waits for its repr. left: ends what it contains."""
    if isinstance(value, Image):
        return _ImageMark(f"{value.width}x{value.height}, {len(value.data):,} bytes")
    if "PIL.Image" in sys.modules and isinstance(value, sys.modules["PIL.Image"].Image):  # it is not loaded for this
        return _ImageMark(f"{value.width}x{value.height}")
    if isinstance(value, bytes | bytearray) and (
        value.startswith((b"\x89PNG", b"\xff\xd8\xff")) or (value[:4], value[8:12]) == (b"RIFF", b"WEBP")
    ):
        return _ImageMark(f"{len(value):,} bytes")
    if isinstance(value, str | bytes | bytearray):
        return value[: _LONGEST + 1]
    if type(value) is dict:
        items = cast("dict[Any, Any]", value).items()
        return {key: _beginning(item, left) for (key, item), _ in zip(items, left, strict=False)}
    if type(value) in (list, tuple):
        return type(value)(_beginning(item, left) for item, _ in zip(value, left, strict=False))
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The example of a held-out episode; that of another one is in its group's record."""

    example: Example
    row: int
    """Its index."""
    task: str = ""


class EpisodeReport:
    """Reports one episode to `events` and `tokens`, under the name `episode`. is_evaluation: it is not trained.

    The fate of its tokens, once it has ended, is the caller's to say.
    """

    def __init__(
        self,
        events: Events = NOWHERE,
        episode: str = "",
        *,
        is_evaluation: bool = False,
        held_out: HeldOut | None = None,
        tokens: TokenLedger | None = None,
    ) -> None:
        self.episode = episode
        self._tokens = tokens or TokenLedger()
        self._held_out = held_out
        self._is_evaluation = is_evaluation or held_out is not None
        self._events = events
        self._began = 0.0
        self._last: tuple[ModelRequest, ModelResponse] | None = None
        self.seen: Trajectory | None = None
        """For an episode without a trajectory: what the model last saw and said, if it is known."""

    def begin(self) -> None:
        """Tools and rewards that run in the calling task, or in tasks that it makes, report as this episode's."""
        self._began = timestamp()
        EPISODE.set(EpisodeContext(self.episode, self._events, self._is_evaluation))
        if self._events is not NOWHERE:
            one = self._held_out
            about: dict[str, Any] = {}
            if one is not None:
                about = {"example": shown(one.example), "task": one.task, "row": one.row}
            self._events.emit(EpisodeBegan(t=self._began, episode=self.episode, **about))

    def answered(self, request: ModelRequest, response: ModelResponse, seconds: float) -> None:
        self._last = request, response
        self._tokens.answered(self.episode, len(response.output_ids), response.server_s)
        if self._events is NOWHERE:
            return
        versions = response.output_versions
        self._events.emit(
            TurnEnded(
                episode=self.episode,
                rid=request.rid,
                server=response.server,
                queued_s=response.queued_s,
                server_s=response.server_s,
                seconds=seconds,
                prompt=len(request.input_ids),
                output=len(versions),
                cached=response.cached_tokens,
                oldest=min(versions, default=None),
                newest=max(versions, default=None),
                sends=response.sends,
                stop=response.stop_reason,
            )
        )

    def unanswered(self, request: ModelRequest, error: BaseException, seconds: float) -> None:
        if not isinstance(error, _REFUSALS):
            self._tokens.unanswered(request.sampling.max_new_tokens)
        prompt, stop = len(request.input_ids), type(error).__name__
        self._events.emit(
            TurnEnded(episode=self.episode, rid=request.rid, seconds=seconds, prompt=prompt, output=0, stop=stop)
        )

    def attempt_failed(self, attempt: int, error: Exception, *, is_last: bool) -> None:
        if not is_last:
            self._tokens.settle(self.episode, Fate.RETRIED)
        self._events.emit(
            AttemptFailed(
                episode=self.episode,
                attempt=attempt,
                error=type(error).__name__,
                message=short(str(error), _LONGEST),
                runs_again=not is_last,
            )
        )

    def end(
        self, trajectories: Sequence[Trajectory], reward: float | None, attempts: int, error: Exception | None
    ) -> None:
        if not trajectories and self._last is not None:
            try:
                self.seen = _seen(*self._last)
            except Exception as failure:  # noqa: BLE001 (numbers that are no trajectory may be why the episode failed)
                log.debug("what episode %s last saw is not kept: %s", self.episode, failure)
        if self._events is NOWHERE:
            return
        how = "finished" if trajectories else "rejected"
        if error is not None:
            how = "timed_out" if isinstance(error, EpisodeTimeoutError) else "failed"
        self._events.emit(
            EpisodeEnded(
                episode=self.episode,
                how=how,
                began=self._began,
                attempts=attempts,
                reward=reward,
                error=type(error).__name__ if error else "",
                message=short(str(error), _LONGEST) if error else "",
                trajectories=[_summary(trajectory) for trajectory in trajectories],
            )
        )
        if self.seen is not None:
            self._events.keep(KeptTokens(rows=[(self.episode, LAST_SEEN, self.seen)]))

    def cancelled(self, how: str) -> None:
        """how: overtaken, straggler or stopped."""
        self._events.emit(EpisodeEnded(episode=self.episode, how=how, began=self._began))


def _summary(trajectory: Trajectory) -> TrajectorySummary:
    return TrajectorySummary(
        role=short(trajectory.role),
        reward=trajectory.total_reward,
        rewards=short_names(trajectory.rewards),
        metrics=short_names(trajectory.metrics),
        tokens=len(trajectory.token_ids),
        trained=trajectory.num_trained_tokens,
        turns=len(trajectory.turns),
        oldest=trajectory.oldest_version,
        newest=trajectory.newest_version,
        is_truncated=trajectory.is_truncated,
    )


def _seen(request: ModelRequest, response: ModelResponse) -> Trajectory:
    import numpy as np

    given, said = np.asarray(request.input_ids, dtype=np.int32), len(response.output_ids)
    none = np.zeros(len(given))
    return Trajectory(
        token_ids=np.concatenate([given, np.array(response.output_ids, dtype=np.int32)]),
        loss_mask=np.zeros(len(given) + said, dtype=np.bool_),
        behavior_logprobs=np.concatenate([none, response.output_logprobs]),
        versions=np.concatenate([none.astype(np.int32) + NOT_SAMPLED, np.array(response.output_versions, np.int32)]),
        reward=0.0,
        temperature=response.temperature,
        images=request.images,
        arrays={
            name: np.concatenate([request.arrays[name], rows])
            for name, rows in response.arrays.items()
            if name in request.arrays
        },
    )


_MOST = 16
"""The most classes of errors that are distinguished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A trajectory, or a failed episode, that trackers may get."""

    name: str
    """The episode's name in the event log."""
    example_id: tuple[int, int]
    """(epoch, index in the dataset); of a held-out one (0, index in eval_dataset)."""
    task: str = ""
    """The name of its task; "" in a run without tasks."""
    example: Mapping[str, Any]
    """The example, in the form of `report.shown`."""
    group_id: int | None = None
    """None for a held-out one."""
    index: int = 0
    """The episode's index in its group."""
    trajectory: Trajectory | None
    """For a failed episode: what the model last saw and said; None if it said nothing."""
    advantage: float | None = None
    distance: float = 0.0
    """Between its reward and the mean of its group and role."""
    error: str = ""
    """For a failed episode: `CLASS: message`."""


class FirstFailures:
    """The first failed episode of each class of error since the last `take`."""

    def __init__(self) -> None:
        self._first: dict[str, Candidate] = {}

    def note(self, failed: Candidate) -> None:
        if len(self._first) < _MOST:
            self._first.setdefault(failed.error.partition(":")[0], failed)

    def take(self) -> list[Candidate]:
        taken, self._first = self._first, {}
        return [*taken.values()]


_EVERY = 10
"""A failure is logged when it first occurs, and again each time its count has grown by this factor. So in a run of any
length it takes a handful of lines."""
_LONGEST_LINE = 500
"""Characters of an error's message that a line holds."""
_FRAME = re.compile(r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+), in ', re.MULTILINE)
"""In a traceback that another process sent as text."""

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
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
        text = text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}..."
        line = f"{which} failed with {kind[0]}: {text}; {what_next}"
        if told:
            line = f"the same failure {number - told:,} more times, {number:,} in all; the last one: {line}"
        if self._path is not None:
            try:  # like logging, this blocks the event loop for a small write
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(f"{line}\n{''.join(traceback.format_exception(error))}\n")
            except OSError as failure:
                raise RunFileError(
                    f"{self._path}, which keeps the tracebacks of episodes, cannot be written: {failure}"
                ) from failure
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
    own = [frame for frame in not_arls if not _is_in(frame[0], _LIBRARIES)]
    file, line = next(iter((own or not_arls or frames)[-1:]), ("", 0))
    return f"{Path(file).name}:{line}" if file else ""


def _is_in(file: str, directories: Sequence[str]) -> bool:
    """Code that was made at run time, such as a dataclass's methods, counts as a library's."""
    return file.startswith(("<frozen ", "<string>", *(f"{directory}/" for directory in directories)))

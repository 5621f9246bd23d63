"""How a run ended: END.json in its directory says how, why, and what to do next.

    OpenRun enters --lock, remove END.json--> the run --any end--> END.json --> the lock is released

Without END.json, run.lock tells the rest: locked, the run goes on; not locked but with a name in it, it was killed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
import traceback
from asyncio import CancelledError
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from arl.api import errors
from arl.api.errors import StalledError
from arl.api.settings.engines import RunningServersConfig
from arl.api.settings.run import Config
from arl.api.types import Evaluation
from arl.runtime.console import CONSOLE_LOG, ConsoleLog
from arl.runtime.stopping import SCRIPT_END, ScriptEnd, show_briefly
from arl.runtime.threads import finished, offload
from arl.training.display import display_of
from arl.training.evaluator import with_error
from arl.training.run_dir import LOCK, THIS_ONE, RunLock, holder_of, is_locked, newest_checkpoint, record_start

if TYPE_CHECKING:
    from arl.training.trainer import Trainer

log = logging.getLogger(__name__)

END = "END.json"
_SCAN_S = 5.0
"""Longest time to look at the sizes of files."""
_HARD_END_S = 2.0
"""Longest time that a process which must end now waits for the disk."""
_TRACEBACK = 20_000
"""Characters of a traceback that are kept: its end."""
_LOGS: tuple[tuple[tuple[type[Exception], ...], tuple[str, ...]], ...] = (
    ((errors.TrainingError, errors.ModelError), ("trainer.log",)),
    ((errors.ServerError, errors.TransportError), ("server-*.log", "sglang-*.log", "vllm-*.log")),
    ((errors.WorkerError,), ("worker-*.log",)),
    ((errors.FailureBudgetError, errors.StarvedError, errors.RewardError), ("episodes.log",)),
    ((StalledError,), ("trainer.log", "server-*.log", "sglang-*.log", "vllm-*.log", "worker-*.log")),
)
"""Error -> the files of run_dir/logs that may say more."""

_OF_PLACEMENT = [kind.__name__ for kind in (errors.ServerError, errors.TransportError, errors.TrainingError)]
"""Errors that a mistake in what runs where may cause."""

How = Literal["finished", "interrupted", "failed", "stalled", "running", "killed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended, or that it goes on. The fields are those of END.json."""

    how: How
    """The last two stand in no file: END.json is missing, and the run's lock is held, or was not released."""
    why: str
    what_next: str = ""
    """For the user: the command or call that continues, the checkpoint, the logs to read."""
    signal: str | None = None
    """The signal that asked the run to end, such as SIGTERM."""
    error: str | None = None
    """The class of the error that ended it."""
    traceback: str = ""
    """The traceback of an error in code that is not arl's, or of its cause."""
    began: str = ""
    """The time of this start, ISO 8601 in UTC."""
    ended: str = ""
    process: str = ""
    """The run's process: its id, its host, and its start."""
    version: int | None = None
    """Batches trained, resumes included; None if the run ended before it knew."""
    steps: int | None = None
    """Batches to train."""
    checkpoint: str | None = None
    """The directory from which a rerun continues."""
    logs: tuple[str, ...] = ()
    """Files that may say more about the error."""
    totals: Mapping[str, float] = field(default_factory=dict[str, float])
    """As in summary.json: training time, throughput, staleness, episodes."""
    evaluations: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    """`best` and `last`, each with version, reward and (of several examples) its standard error; empty if there were
    none."""
    remarks: tuple[str, ...] = ()
    """Remarks about the run as a whole."""
    disk: Mapping[str, int] = field(default_factory=dict[str, int])
    """Bytes of each directory in run_dir, and of the `files` beside them."""

    def lines(self, run_dir: Path) -> list[str]:
        """For the terminal: how it ended, what to do next, and the disk it uses."""
        how = {"interrupted": f"was interrupted ({self.signal})" if self.signal else "was interrupted"}.get(self.how)
        how = how or (f"{self.how} ({self.error})" if self.error else self.how)
        numbers = [] if self.version is None else [f"{self.version} of {self.steps} steps are trained"]
        numbers += [f"{self.totals['wall_s']:.0f} s"] if self.version and self.totals else []
        best, last = self.evaluations.get("best"), self.evaluations.get("last")
        if best and last:
            told, told_best = (
                f"{with_error(one['reward'], one.get('standard_error'))} at version {one['version']}"
                for one in (last, best)
            )
            is_best = round(best["reward"], 3) <= round(last["reward"], 3)
            numbers.append(f"held-out reward {told}" + ("" if is_best else f", best {told_best}"))
        return [
            f"the run {how}" + (": " if numbers else "") + ", ".join(numbers),
            f"next: {self.what_next}" if self.what_next else "",
            *self.remarks,
            f"{run_dir} uses {size_text(sum(self.disk.values()))}: "
            + ", ".join(f"{name} {size_text(size)}" for name, size in self.disk.items()),
        ]


def how_it_ended(run_dir: str | Path) -> RunEnd | None:
    """How the last run in `run_dir` ended, or that it still trains; None if no file tells of a run.

    Reads two small files, and disturbs no run. If this machine does not see the other machine's lock, a run there looks
    killed.
    """
    run_dir = Path(run_dir)
    process = holder_of(run_dir / LOCK).removesuffix(THIS_ONE)
    if process and is_locked(run_dir / LOCK):
        return RunEnd(how="running", why=f"{process} trains", process=process)
    end = _written(run_dir / END)
    if not process or (end and end.process == process):  # else it is the end of an earlier start
        return end
    checkpoint = newest_checkpoint(run_dir)
    return RunEnd(
        how="killed",
        why=f"{process} ended without saying how",
        what_next="the same command " + (f"continues from {checkpoint}" if checkpoint else "starts over"),
        process=process,
        checkpoint=_path(checkpoint),
    )


def _written(path: Path) -> RunEnd | None:
    """Reads END.json; None if it is missing or incomplete. Fields of other versions of arl are left out."""
    try:
        said = json.loads(path.read_text())
        known = {one.name: said[one.name] for one in fields(RunEnd) if one.name in said}
        return RunEnd(**{**known, **{name: tuple(known.get(name, ())) for name in ("logs", "remarks")}})
    except (OSError, ValueError, TypeError):
        return None


class OpenRun:
    """This process trains in run_dir within `async with`: it holds the lock, and leaves END.json, whatever ends it.

    Entering raises ConfigError (run_dir), RunFileError if another run holds the lock. Leaving raises nothing of its
    own: without room for END.json, the log says so.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lock = RunLock(config.run_dir)
        self._began = _now()
        self._trainer: Trainer | None = None
        self._first_version = 0
        self._before: RunEnd | None = None
        """How the last start ended, if it was not killed."""
        self._script: ScriptEnd | None = None
        self._console = ConsoleLog(config.run_dir / "logs" / CONSOLE_LOG)

    async def __aenter__(self) -> Self:
        try:
            await offload(self._lock.take)
            await offload(self._begin)
            self._console.open()
        except BaseException:
            self._lock.release()
            raise
        self._script = SCRIPT_END.get()
        if self._script:
            self._script.last_words.append(self._interrupted_now)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await finished(offload(self._leave, error))
        except CancelledError:
            if error is None:
                raise
        finally:
            if self._script:
                self._script.last_words.remove(self._interrupted_now)
            self._console.close()
            self._lock.release()

    def trains_with(self, trainer: Trainer) -> None:
        """Take the numbers from this trainer at the end."""
        self._trainer, self._first_version = trainer, trainer.version

    def stalled_now(self, reason: str) -> None:
        """Write that the run stalled, on any thread, before its process ends at once. Returns within seconds."""
        self._write_soon(StalledError(reason))

    def _interrupted_now(self, reason: str) -> None:
        self._write_soon(CancelledError(reason))

    def _write_soon(self, error: BaseException) -> None:
        """On a thread of its own, because a disk that hangs must not keep the process from ending."""
        writing = threading.Thread(target=lambda: self._write(self._end(error)), name="arl-end", daemon=True)
        with suppress(RuntimeError):  # no more threads can be started
            writing.start()
            writing.join(_HARD_END_S)

    def _leave(self, error: BaseException | None) -> None:
        try:
            end = replace(self._end(error), disk=disk_use(self._config.run_dir))
            before, is_refused = self._before, end.how == "failed" and self._trainer is None
            # A finished run stays finished if a start that trained nothing fails.
            has_finished = before and before.how == "finished" and (before.version or 0) >= self._config.steps
            self._write(replace(before, process=end.process) if before and has_finished and is_refused else end)
            lines = end.lines(self._config.run_dir)
            display_of(self._config.log).tell("end", "\n".join(filter(None, lines)), **asdict(end))
            if self._script:
                self._script.is_told = self._config.log.console
            for text in [f"{end.error}: {end.why}", end.traceback] if end.error else []:
                self._console.line(text)  # the console shows it when the run's blocks are left
            if isinstance(error, CancelledError | KeyboardInterrupt):
                show_briefly(error, "interrupted" if self._config.log.console else "\n".join(lines[:2]))
        except Exception as failure:  # the run's own error must not be hidden
            log.warning("cannot say how the run ended: %s", failure, exc_info=True)

    def _begin(self) -> None:
        path = self._config.run_dir / END
        self._before = _written(path)
        with suppress(OSError):
            path.unlink(missing_ok=True)
        record_start(self._config, self._config.steps)

    def _write(self, end: RunEnd) -> None:
        path = self._config.run_dir / END
        aside = path.with_name(f"{END}.{threading.get_ident()}.tmp")
        try:
            aside.write_text(json.dumps(asdict(end), indent=2, default=str) + "\n")
            aside.replace(path)
        except OSError as failure:
            log.warning("%s, which says how the run ended, cannot be written: %s", path, failure.strerror or failure)
            with suppress(OSError):
                aside.unlink(missing_ok=True)

    def _end(self, error: BaseException | None) -> RunEnd:
        config, trainer = self._config, self._trainer
        number = self._script.signal if self._script else None
        if number is None and isinstance(error, KeyboardInterrupt):
            number = signal.SIGINT
        name = None if number is None else signal.Signals(number).name
        patterns = next((patterns for kinds, patterns in _LOGS if isinstance(error, kinds)), ())
        logs = [path for pattern in patterns for path in sorted((config.run_dir / "logs").glob(pattern))]
        end = RunEnd(
            how=_how(error),
            why=self._why(error, name),
            signal=name,
            error=type(error).__name__ if isinstance(error, Exception) else None,
            traceback=_traceback(error),
            began=self._began,
            ended=_now(),
            process=holder_of(config.run_dir / LOCK).removesuffix(THIS_ONE),
            steps=config.steps,
            checkpoint=_path(newest_checkpoint(config.run_dir)),
            logs=tuple(map(str, logs)),
        )
        end = end if trainer is None else replace(end, version=trainer.version, **_numbers(trainer))
        return replace(end, what_next=self._what_next(end))

    def _why(self, error: BaseException | None, signal_name: str | None) -> str:
        trained = self._trainer.version if self._trainer else 0
        match error:
            case None if self._first_version >= self._config.steps:
                return f"there was nothing left to train: steps is {self._config.steps}, and {trained} are trained"
            case None if trained >= self._config.steps:
                return f"all {self._config.steps} steps are trained"
            case None:
                return f"its script ended it after {trained} of {self._config.steps} steps"
            case SystemExit():
                return f"its script called sys.exit({error.code!r})"
            case CancelledError() | KeyboardInterrupt() | GeneratorExit() if not str(error):
                return f"{signal_name} asked it to end" if signal_name else "its task was cancelled"
            case _:
                return str(error) or repr(error)

    def _what_next(self, end: RunEnd) -> str:
        if end.how == "finished" and end.version is not None and end.version >= self._config.steps:
            model = self._config.run_dir / "trained"
            what = "trained models are in" if self._config.policies else "trained model is"
            there = f"; the {what} {model}" if model.is_dir() else ""
            return f"set steps above {end.version} to train further{there}"
        read = f"read {', '.join(end.logs)}; " if end.logs else ""
        is_spread = self._config.train.ray_address is not None or isinstance(self._config.engine, RunningServersConfig)
        if end.how == "failed" and end.error in _OF_PLACEMENT and is_spread:
            read += "--dry-run looks for mistakes in what runs where, and starts nothing; "
        fixed = "once the cause is fixed, " if end.how == "failed" else ""
        again = self._script.again if self._script else "the same call"
        starts = f"continues from {end.checkpoint}" if end.checkpoint else "starts over: there is no checkpoint"
        return f"{read}{fixed}{again} {starts}"


def disk_use(run_dir: Path, within_s: float = _SCAN_S) -> dict[str, int]:
    """Bytes of each directory in run_dir, the largest first, and of the `files` beside them; at least what it can see
    in `within_s`."""
    until, parts = time.monotonic() + within_s, dict[str, int]()
    for directory, _, names in os.walk(run_dir):
        inside = Path(directory).relative_to(run_dir).parts
        part = inside[0] if inside else "files"
        for name in names:
            with suppress(OSError):  # it may be gone by now
                parts[part] = parts.get(part, 0) + os.lstat(os.path.join(directory, name)).st_size
        if time.monotonic() > until:
            break
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def _how(error: BaseException | None) -> How:
    match error:
        case None:
            return "finished"
        case SystemExit():
            return "failed" if error.code else "finished"
        case StalledError():
            return "stalled"
        case CancelledError() | KeyboardInterrupt() | GeneratorExit():
            return "interrupted"
        case _:
            return "failed"


def _numbers(trainer: Trainer) -> dict[str, Any]:
    def reward(evaluation: Evaluation) -> dict[str, float]:
        error = evaluation.standard_error
        own = {} if error is None else {"standard_error": error}
        return {"version": evaluation.version, "reward": evaluation.reward, **own}

    evaluations = dict[str, dict[str, float]]()
    if done := list(trainer.evaluations.values()):
        evaluations["best"] = reward(max(done, key=lambda one: one.reward))
        evaluations["last"] = reward(max(done, key=lambda one: one.version))
    bias = trainer.rollout.lengths.bias()
    remark = bias.remark() if bias else None
    return {"totals": trainer.summary(), "evaluations": evaluations, "remarks": (remark,) if remark else ()}


def _traceback(error: BaseException | None) -> str:
    """The traceback that a developer needs: of an error that is not arl's, or of one that caused arl's."""
    shown = error.__cause__ if isinstance(error, errors.FailureBudgetError | errors.HookError) else error
    if not isinstance(shown, Exception) or isinstance(shown, errors.ArlError):
        return ""
    return "".join(traceback.format_exception(shown))[-_TRACEBACK:]


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def size_text(num_bytes: int) -> str:
    """Bytes, for people."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"

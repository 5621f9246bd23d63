"""The files of a run: RunLog writes JSONL, and plot_run draws it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import IO, Any

import msgspec
from rich.console import Console

from arl.api.events import TokensCounted
from arl.api.settings.run import LogConfig
from arl.api.tracking import Tracker
from arl.api.types import Evaluation, Group, StepStats
from arl.api.version import install_command
from arl.observe.health.line import HealthLine
from arl.rollout.episode import Episode
from arl.rollout.episode_events import Candidate
from arl.runtime.threads import force_to_disk
from arl.training.display import Display
from arl.training.run_dir import usable
from arl.training.tracker_samples import of_evaluation, of_step

log = logging.getLogger(__name__)

_TRACKED_EVERY = 10
"""Trackers get trajectories of the first step, and then each time this many versions were trained."""


class RunLog:
    """Writes a run's files, and shows its steps and evaluations. One thread writes. Raises RunFileError.

    A resumed run moves the rows after the checkpoint's version to NAME.undone.jsonl, so each version has one line.
    """

    def __init__(
        self,
        run_dir: Path,
        config: LogConfig,
        *,
        display: Display | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        tracker: Tracker | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """display: None shows nothing. tracker: gets steps and evaluations, too, once they are written. decode: token
        ids -> text, for the tracker; None: it gets trajectories without text.
        settings: the run's, section by section, for remarks about its health.
        """
        with usable(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
        self._paths = {name: run_dir / f"{name}.jsonl" for name in ("metrics", "evaluations")}
        self._tokens = run_dir / "tokens.json"
        self._ends = {name: path.stat().st_size if path.exists() else 0 for name, path in self._paths.items()}
        self._version = 0
        """The last step whose row is there."""
        self._begun: dict[str, int] = {}
        """Where the next row begins, in files in which an error may have left a part of it."""
        self._config = config
        self._decode = decode
        self._tracker = tracker
        self.health = HealthLine(settings)
        self.display = display or Display(console=Console(quiet=True))

    def positions(self) -> dict[str, int]:
        """The length in bytes of the file that grows with each step, up to the last whole step. Any thread may ask."""
        return {"metrics": self._ends["metrics"]}

    def sync(self) -> None:
        """Force the files to the disk, on any thread, before a checkpoint refers to their rows."""
        for path in (*self._paths.values(), self._paths["metrics"].parent):
            with usable(path), suppress(FileNotFoundError):
                force_to_disk(path)

    def resume(self, version: int, positions: Mapping[str, int]) -> None:
        """Move rows of later versions to NAME.undone.jsonl, and say how many; delete torn lines.

        positions: from the checkpoint of `version`. A file without one is read whole, as evaluations always are: they
        are few, and may end after later checkpoints.
        """
        self._version = version
        for name, path in self._paths.items():
            with usable(path):
                if path.exists():
                    position = 0 if version == 0 and name != "evaluations" else positions.get(name)
                    num_undone = cut_rows(path, version, position)
                    self._ends[name] = path.stat().st_size
                    if num_undone:
                        rows = f"{num_undone} row{'s' * (num_undone > 1)}"
                        undone = _undone(path).name
                        self.display.say(f"{path.name}: {rows} after version {version} moved to {undone}")
        if version and self._paths["metrics"].exists():
            steps = _first_and_last_rows(self._paths["metrics"])
            self.health.resume(steps, map(asdict, self.evaluations().values()))

    def evaluations(self) -> dict[int, Evaluation]:
        """Version -> evaluation."""
        needed = [field.name for field in fields(Evaluation) if field.default is MISSING]
        path = self._paths["evaluations"]
        rows = (row for _, row in _rows(path, needed)) if path.exists() else ()
        return {row["version"]: _evaluation(row) for row in rows}

    def tracks(self, version: int) -> bool:
        """Whether trackers get trajectories with the step that leads to `version`."""
        config = self._config
        return bool(self._tracker and config.track_trajectories and (version - 1) % _TRACKED_EVERY == 0)

    def step(
        self,
        stats: StepStats,
        groups: Sequence[Group],
        advantages: Sequence[float | None],
        failed: Sequence[Candidate] = (),
    ) -> None:
        """Write the step's row once. A call after an error that left a part of it replaces this.

        advantages: each trajectory's mean over its trained tokens; None without trained tokens. failed: episodes for
        trackers.
        """
        if stats.version <= self._version:
            return
        self._append("metrics", {**stats.metrics, **({"remark": stats.remark} if stats.remark else {})})
        self._version = stats.version
        self.display.step(stats)
        if self._tracker is not None:
            number = self._config.track_trajectories
            is_tracked = self.tracks(stats.version)
            chosen = of_step(groups, advantages, failed, number, self._decode) if is_tracked else []
            self._tracker.step(stats, chosen)

    def tokens(self, counted: TokensCounted) -> None:
        """Note what became of all tokens so far. It is for people, so a full disk does not end the run."""
        with suppress(OSError):
            write_atomically(self._tokens, msgspec.json.format(msgspec.json.encode(counted)).decode() + "\n")

    def counted(self) -> TokensCounted:
        """The token ledger when the run last noted it, in whichever start; without numbers if it never did."""
        try:
            return msgspec.json.decode(self._tokens.read_bytes(), type=TokensCounted)
        except (OSError, msgspec.MsgspecError):
            return TokensCounted(received=0)

    def evaluation(self, evaluation: Evaluation, episodes: Sequence[Episode] = ()) -> None:
        """episodes: those of the evaluation, in the order of the examples, for trackers."""
        self._append("evaluations", asdict(evaluation))
        self.health.evaluated(asdict(evaluation))
        self.display.evaluation(evaluation)
        if self._tracker is not None:
            self._tracker.evaluation(evaluation)
            if chosen := of_evaluation(episodes, self._config.track_trajectories, self._decode):
                self._tracker.held_out(evaluation, chosen)

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        """Write a row at the end, in place of any part of it that an error left there."""
        with usable(self._paths[name]), self._paths[name].open("ab") as file:
            file.truncate(min(self._begun.setdefault(name, file.tell()), file.tell()))
            file.write(json.dumps(dict(row)).encode() + b"\n")
            end = file.tell()
        self._ends[name] = end
        del self._begun[name]


def _undone(path: Path) -> Path:
    """Where the rows of steps go that are trained again."""
    return path.with_suffix(".undone.jsonl")


def cut_rows(path: Path, version: int, position: int | None) -> int:
    """Cut the file at `position`, if the rows of later versions begin there; else keep the rows up to `version`.

    Returns how many rows it appended to the file of undone rows: before it cuts, so that a kill loses none.
    """
    if position is not None:
        with path.open("r+b") as file:
            if _is_end_of(file, version, position):
                file.seek(position)
                undone = [line for line in file if _row(line) is not None]
                _append_rows(_undone(path), undone)
                file.truncate(position)
                return len(undone)
        log.warning("%s is not as the checkpoint of version %d left it: reading all of it", path, version)
    aside, undone = path.with_name(path.name + ".tmp"), list[bytes]()
    with aside.open("wb") as kept:
        for line, row in _rows(path):
            if isinstance(row.get("version"), int) and row["version"] <= version:
                kept.write(line.rstrip(b"\n") + b"\n")
            else:
                undone.append(line)
    force_to_disk(aside)
    _append_rows(_undone(path), undone)
    aside.replace(path)
    return len(undone)


def _append_rows(path: Path, lines: Sequence[bytes]) -> None:
    if not lines:
        return
    with path.open("ab") as file:
        file.writelines(line.rstrip(b"\n") + b"\n" for line in lines)
    force_to_disk(path)


def _is_end_of(file: IO[bytes], version: int, position: int) -> bool:
    """Whether a row ends at `position`, and no row of `version` or an earlier one begins there."""
    if file.seek(0, os.SEEK_END) < position:
        return False
    file.seek(max(position - 1, 0))
    if position and file.read(1) != b"\n":
        return False
    row = _row(file.readline())
    return row is None or not isinstance(row.get("version"), int) or row["version"] > version


def _evaluation(row: Mapping[str, Any]) -> Evaluation:
    known = {field.name: row[field.name] for field in fields(Evaluation) if field.name in row}
    parts = {name: _evaluation(part) for name, part in (known.get("by_name") or {}).items()}
    return Evaluation(**{**known, "by_name": parts or None})


_HEAD, _TAIL = 1 << 16, 1 << 18
"""Bytes: some 20 and 80 rows."""


def _first_and_last_rows(path: Path) -> list[dict[str, Any]]:
    """All of a short file. A long one is not read whole, as a run may be long."""
    with path.open("rb") as file:
        parts = [file.read(_HEAD)]
        file.seek(max(file.seek(0, os.SEEK_END) - _TAIL, len(parts[0])))
        parts.append(file.read(_TAIL))
    return [row for line in b"".join(parts).splitlines() if (row := _row(line)) is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _rows(path: Path, names: Sequence[str] = ()) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line that is a JSON object with these names, and the object.

    Warns of other lines, except a last one that a kill cut short.
    """
    bad: list[int] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            row = _row(line)
            if row is not None and row.keys() >= set(names):
                yield line, row
            elif line.endswith(b"\n") and line.strip():
                bad.append(number)
    if bad:
        numbers = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        log.warning("%s: left out %d lines that are not rows of this file (lines %s)", path, len(bad), numbers)


def read_jsonl(path: Path, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The rows of `path`; with names, those numbers of each row alone, as a long run has millions of others.

    A warning names lines that are not rows, or lack a name. A missing file has no rows.
    """
    rows = (row for _, row in _rows(path, names)) if path.exists() else iter(())
    return [{name: row[name] for name in names} if names else row for row in rows]


def write_atomically(path: Path, text: str) -> None:
    """Replace the file's text in one step: a reader, or a rerun after a kill, finds the whole old or new file."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(text)
    aside.replace(path)


def plot_run(run_dir: Path) -> Path:
    """Draw reward, staleness and throughput over wall time from metrics.jsonl into reward.png; return its path.

    Raises ImportError without matplotlib, and names the extra to install.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(f"plot_run draws with matplotlib; {install_command('examples')}") from None
    drawn = ("version", "time_s", "reward", "staleness/max", "staleness/mean", "samples_per_s")
    rows = read_jsonl(run_dir / "metrics.jsonl", drawn)
    evaluations = read_jsonl(run_dir / "evaluations.jsonl", ("version", "reward"))
    seconds_by_version = {0: 0.0, **{row["version"]: row["time_s"] for row in rows}}
    seconds = [row["time_s"] for row in rows]
    figure = Figure(figsize=(8, 9), layout="constrained")
    reward, staleness, throughput = figure.subplots(3, 1, sharex=True)
    reward.plot(seconds, [row["reward"] for row in rows], label="training batch")
    at = [seconds_by_version.get(row["version"], 0.0) for row in evaluations]
    reward.plot(at, [row["reward"] for row in evaluations], "o", label="held out")
    shown = [row["reward"] for row in (*rows, *evaluations)]
    if shown and min(shown) >= 0 and max(shown) <= 1:
        reward.set(ylim=(-0.02, 1.02))
    reward.set(ylabel="reward", title="arl: reward, staleness and throughput over wall time")
    reward.legend(loc="lower right")
    staleness.plot(seconds, [row["staleness/max"] for row in rows], label="oldest token")
    staleness.plot(seconds, [row["staleness/mean"] for row in rows], label="mean")
    staleness.set(ylabel="staleness (versions)", ylim=(-0.1, None))
    staleness.legend(loc="lower right")
    throughput.plot(seconds, [row["samples_per_s"] for row in rows])
    throughput.set(ylabel="episodes trained per second", xlabel="wall time (s)", ylim=(0, None))
    path = run_dir / "reward.png"
    figure.savefig(path, dpi=120)
    return path

"""What a run writes for its users: RunLog writes JSONL and chooses what trackers get, and plot_run draws it."""

from __future__ import annotations

import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from rich.console import Console

from arl.api.events import TokensCounted
from arl.api.images import text_with_marks
from arl.api.settings.run import LogConfig
from arl.api.tracking import TrackedTrajectory, Tracker, expected_column
from arl.api.types import Evaluation, Group, StepStats, Trajectory
from arl.api.version import install_command
from arl.observe.health.rules import HealthLine
from arl.rollout.episode import Episode
from arl.rollout.episode_events import Candidate, FirstFailures, shown, told
from arl.rollout.group import episode_name
from arl.runtime.threads import force_to_disk
from arl.training.display import Display
from arl.training.run_dir import usable, write_atomically

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
        self._version = 0
        """The last step whose row is there."""
        self._begun: dict[str, int] = {}
        """Where the next row begins, in files in which an error may have left a part of it."""
        self._config = config
        self._decode = decode
        self._tracker = tracker
        self.health = HealthLine(settings)
        self.display = display or Display(console=Console(quiet=True))

    def sync(self) -> None:
        """Force the files to the disk, on any thread, before a checkpoint refers to their rows."""
        for path in (*self._paths.values(), self._paths["metrics"].parent):
            with usable(path), suppress(FileNotFoundError):
                force_to_disk(path)

    def resume(self, version: int) -> None:
        """Move rows of later versions to NAME.undone.jsonl, and say how many; delete torn lines."""
        self._version = version
        for path in self._paths.values():
            with usable(path):
                if path.exists() and (num_undone := cut_rows(path, version)):
                    rows, undone = f"{num_undone} row{'s' * (num_undone > 1)}", _undone(path).name
                    self.display.say(f"{path.name}: {rows} after version {version} moved to {undone}")
        if version and self._paths["metrics"].exists():
            with self._paths["metrics"].open("rb") as file:  # not all of the file, which may be long
                text = file.read(_HEAD)
                file.seek(max(file.seek(0, os.SEEK_END) - _TAIL, len(text)))
                text += file.read(_TAIL)
            steps = [row for line in text.splitlines() if (row := _row(line)) is not None]
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
        del self._begun[name]


def _undone(path: Path) -> Path:
    """Where the rows of steps go that are trained again."""
    return path.with_suffix(".undone.jsonl")


class _Versioned(msgspec.Struct):
    version: int


def cut_rows(path: Path, version: int) -> int:
    """Keep the rows up to `version`.

    Returns how many rows it appended to the file of undone rows: before it cuts, so that a kill loses none.
    """
    with path.open("rb") as file, suppress(msgspec.MsgspecError):  # most often nothing is to be cut
        rows = ((line, msgspec.json.decode(line, type=_Versioned)) for line in file)
        if all(line.endswith(b"\n") and row.version <= version for line, row in rows):
            return 0
    aside, undone = path.with_name(path.name + ".tmp"), list[bytes]()
    with aside.open("wb") as kept:
        for line, row in _rows(path):
            is_kept = isinstance(row.get("version"), int) and row["version"] <= version
            whole = line.rstrip(b"\n") + b"\n"
            if is_kept:
                kept.write(whole)
            else:
                undone.append(whole)
    force_to_disk(aside)
    if undone:
        with _undone(path).open("ab") as file:
            file.writelines(undone)
        force_to_disk(_undone(path))
    aside.replace(path)
    return len(undone)


def _evaluation(row: Mapping[str, Any]) -> Evaluation:
    known = {field.name: row[field.name] for field in fields(Evaluation) if field.name in row}
    parts = {name: _evaluation(part) for name, part in (known.get("by_name") or {}).items()}
    return Evaluation(**{**known, "by_name": parts or None})


_HEAD, _TAIL = 1 << 16, 1 << 18
"""Bytes: some 20 and 80 rows."""


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


Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""
_REASONS: tuple[tuple[str, Callable[[tuple[Candidate, Trajectory]], tuple[float, ...]]], ...] = (
    ("highest reward", lambda one: (one[1].total_reward, one[0].distance)),
    ("lowest reward", lambda one: (-one[1].total_reward, one[0].distance)),
    ("longest", lambda one: (len(one[1].token_ids),)),
    ("least like its group", lambda one: (one[0].distance,)),
)
"""Why one is chosen, and what then is largest. Rewards that tie are decided by the second number."""
_ANY, _FAILED = "any", "failed"


def choose(candidates: Sequence[Candidate], number: int) -> list[tuple[Candidate, str]]:
    """Up to `number` finished candidates of different examples, each with why it was chosen.

    The reasons take turns; of candidates that tie, the first one is chosen. A reason is passed over where the best
    candidate left is no better than the worst of all. Once all reasons are, the first ones left are chosen, for "any".
    """
    everyone = [(one, one.trajectory) for one in candidates if one.trajectory is not None]
    least = {why: min((key(one)[0] for one in everyone), default=0.0) for why, key in _REASONS}
    chosen: list[tuple[Candidate, str]] = []
    left, turns = everyone, [*_REASONS]
    while left and len(chosen) < number:
        why, key = turns.pop(0) if turns else (_ANY, lambda one: (0.0,))
        best = max(left, key=key)
        if why != _ANY:
            if key(best)[0] == least[why]:
                continue
            turns.append((why, key))
        chosen.append((best[0], why))
        left = [one for one in left if (one[0].task, one[0].example_id) != (best[0].task, best[0].example_id)]
    return chosen


def of_step(
    groups: Sequence[Group],
    advantages: Sequence[float | None],
    failed: Sequence[Candidate],
    number: int,
    decode: Decode | None,
) -> list[TrackedTrajectory]:
    """Up to `number` of a batch's trajectories, and of the episodes that failed. advantages: of the trajectories."""
    candidates = [*_candidates(groups, advantages)]
    chosen = [*choose(candidates, number), *((one, _FAILED) for one in failed[:number])]
    return [_tracked(one, why, decode) for one, why in chosen]


def of_evaluation(episodes: Sequence[Episode], number: int, decode: Decode | None) -> list[TrackedTrajectory]:
    """Up to `number` of an evaluation's trajectories, and of its failed episodes. episodes: in the examples' order."""
    finished, failures = list[Candidate](), FirstFailures()
    for index, episode in enumerate(episodes):
        one = Candidate(name=episode.name, example_id=(0, index), example={}, trajectory=episode.seen)
        finished += [replace(one, trajectory=trajectory) for trajectory in episode.trajectories]
        if episode.error is not None:
            failures.note(replace(one, error=told(episode.error)))
    chosen = [*choose(finished, number), *((one, _FAILED) for one in failures.take()[:number])]
    examples = (shown(episodes[one.example_id[1]].example) for one, _ in chosen)
    return [
        _tracked(replace(one, example=example), why, decode)
        for (one, why), example in zip(chosen, examples, strict=True)
    ]


def _candidates(groups: Sequence[Group], advantages: Sequence[float | None]) -> Iterator[Candidate]:
    left = iter(advantages)
    for group in groups:
        rewards = defaultdict[str, list[float]](list)
        for trajectory in group.trajectories:
            rewards[trajectory.role].append(trajectory.total_reward)
        means = {role: fmean(own) if len({*own}) > 1 else own[0] for role, own in rewards.items()}  # equal: exactly
        for index, trajectory in zip(group.episode_indices, group.trajectories, strict=True):
            yield Candidate(
                name=episode_name(group.group_id, index),
                example_id=group.example_id,
                task=group.task,
                example=group.example,
                group_id=group.group_id,
                index=index,
                trajectory=trajectory,
                advantage=next(left),
                distance=abs(trajectory.total_reward - means[trajectory.role]),
            )


def _tracked(one: Candidate, why: str, decode: Decode | None) -> TrackedTrajectory:
    trajectory, column = one.trajectory, expected_column(one.example)
    text = ""
    if decode and trajectory is not None:
        text = text_with_marks(trajectory.token_ids.tolist(), trajectory.images, decode)
    return TrackedTrajectory(
        why=why,
        name=one.name,
        example_id=one.example_id,
        task=one.task,
        group_id=one.group_id,
        episode=one.index,
        role=trajectory.role if trajectory else "",
        reward=None if trajectory is None or one.error else trajectory.total_reward,
        rewards=trajectory.rewards if trajectory else {},
        metrics=trajectory.metrics if trajectory else {},
        advantage=one.advantage,
        num_tokens=len(trajectory.token_ids) if trajectory else 0,
        num_trained_tokens=trajectory.num_trained_tokens if trajectory else 0,
        oldest_version=trajectory.oldest_version if trajectory else None,
        newest_version=trajectory.newest_version if trajectory else None,
        is_truncated=bool(trajectory and trajectory.is_truncated),
        error=one.error,
        example=one.example,
        expected="" if column is None else str(one.example[column]),
        text=text,
    )

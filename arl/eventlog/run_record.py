"""RunRecord: what is known of a run, from its event log and its JSONL files; it grows with a live run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from arl.api import events
from arl.api.errors import RunFileError
from arl.api.events import Event, TrainedSummary, TrajectorySummary
from arl.eventlog.reading import LogFiles
from arl.eventlog.segments import TokenRow

Place = tuple[int, int, int, int]
"""Of a trajectory's tokens: life, segment, offset of the frame, row in it."""


@dataclass(slots=True, eq=False)
class GroupRecord:
    """The episodes of one example."""

    life: int
    group: int
    epoch: int
    row: int
    stamp: int
    admitted: float
    example: dict[str, Any]
    episodes: list[EpisodeRecord] = field(default_factory=list["EpisodeRecord"])
    outcome: str = ""
    """kept, rejected, dropped; "" while it runs."""
    reason: str = ""
    detail: str = ""
    ended: float | None = None
    step: int | None = None
    """The version that its training made."""
    taken: float | None = None


@dataclass(slots=True, eq=False)
class EpisodeRecord:
    """One episode, of training or of an evaluation."""

    life: int
    episode: str
    began: float
    group: GroupRecord | None = None
    """None in an evaluation."""
    how: str = "running"
    ended: float | None = None
    attempts: int = 1
    reward: float | None = None
    error: str = ""
    message: str = ""
    trajectories: Sequence[TrajectorySummary] = ()
    trained: list[TrainedSummary] = field(default_factory=list[TrainedSummary])
    places: dict[int, Place] = field(default_factory=dict[int, Place])
    """Where the tokens of each trajectory lie. -1: what a failed episode last saw."""
    is_undone: bool = False
    """The run went back to a checkpoint from before this episode was trained."""

    @property
    def step(self) -> int | None:
        return self.group.step if self.group else None

    @property
    def num_tokens(self) -> int:
        return sum(part.tokens for part in self.trajectories)

    @property
    def num_turns(self) -> int:
        return sum(part.turns for part in self.trajectories)

    @property
    def oldest(self) -> int | None:
        return min((part.oldest for part in self.trajectories if part.oldest is not None), default=None)

    @property
    def newest(self) -> int | None:
        return max((part.newest for part in self.trajectories if part.newest is not None), default=None)

    @property
    def staleness(self) -> int | None:
        """When its batch was taken: versions since the oldest trained token."""
        oldest, step = self.oldest, self.step
        return None if step is None or oldest is None else step - 1 - oldest


@dataclass(slots=True, eq=False)
class TokenRecord:
    """A trajectory, token by token. Columns have length T = number of tokens."""

    row: TokenRow
    columns: dict[str, np.ndarray]
    """token_ids, loss_mask, behavior_logprobs, versions; and what training computed, nan at tokens it did not train."""


class RunRecord:
    """A run, read from `run_dir`. `update` reads what has come since; nothing else looks at the files' ends."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.began: list[events.RunBegan] = []
        """Each life's first record, if it has come that far."""
        self.episodes: list[EpisodeRecord] = []
        """In the order in which they began."""
        self.groups: list[GroupRecord] = []
        self.system: list[tuple[int, Event]] = []
        """(life, record): everything but groups and episodes."""
        self.files = LogFiles(run_dir / "events")
        self._episodes: dict[str, EpisodeRecord] = {}
        self._groups: dict[int, GroupRecord] = {}
        """The newest of each name: a life takes names again that an earlier one used after its last checkpoint."""

    @property
    def problems(self) -> list[str]:
        """What could not be read, in sentences."""
        return list(self.files.problems)

    @property
    def settings(self) -> dict[str, Any]:
        """Of the last life."""
        return self.began[-1].settings if self.began else {}

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The metrics of each step."""
        return _rows(self.run_dir / "metrics.jsonl")

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return _rows(self.run_dir / "evaluations.jsonl")

    def update(self) -> int:
        """Read what is new; returns the number of records."""
        number = 0
        for life, record in self.files.new_records():
            self._add(life, record)
            number += 1
        return number

    def episode(self, life: int, name: str) -> EpisodeRecord:
        """Raises RunFileError if there is none."""
        known = self._episodes.get(name)
        if known is None or known.life != life:
            known = next((e for e in self.episodes if e.life == life and e.episode == name), None)
        if known is None:
            raise RunFileError(f"{self.run_dir} has no episode {name} in its life {life}")
        return known

    def calls(self, first: float, last: float) -> Iterator[Event]:
        """The turns, tool calls and rewards that ended within these times, in seconds since 1970."""
        return self.files.calls(first, last)

    def calls_of(self, episode: EpisodeRecord) -> list[Event]:
        last = episode.ended if episode.ended is not None else float("inf")
        found = self.files.calls(episode.began, last + 1.0, episode.life)
        return [call for call in found if getattr(call, "episode", None) == episode.episode]

    def tokens(self, episode: EpisodeRecord) -> list[TokenRecord]:
        """Its trajectories, as far as their tokens are kept. Raises RunFileError if they were deleted."""
        found: list[TokenRecord] = []
        for _, (life, segment, offset, place) in sorted(episode.places.items()):
            rows, columns = self.files.tokens(life, segment, offset)
            found.append(_token_record(rows, columns, place))
        return found

    def _add(self, life: int, record: Event) -> None:
        match record:
            case events.EpisodeBegan():
                self._begin(life, record.episode, record.t)
            case events.EpisodeEnded():
                self._end(life, record)
            case events.GroupAdmitted():
                self._admit(life, record)
            case events.GroupEnded():
                if group := self._groups.get(record.group):
                    group.outcome, group.reason, group.detail = record.outcome, record.reason, record.detail
                    group.ended = record.t
            case events.TokensKept():
                for place, (name, number) in enumerate(record.rows):
                    if episode := self._episodes.get(name):
                        episode.places[number] = (life, record.segment, record.offset, place)
            case events.AttemptFailed():
                self._note_attempt(record)
                self.system.append((life, record))
            case _:
                self._note(life, record)
                self.system.append((life, record))

    def _note(self, life: int, record: Event) -> None:
        match record:
            case events.RunBegan():
                self.began.append(record)
                self._go_back(record.version)
            case events.BatchTaken():
                for number in record.groups:
                    if group := self._groups.get(number):
                        group.taken = record.t
            case events.BatchTrained():
                self._train(record)
            case _:
                pass

    def _admit(self, life: int, record: events.GroupAdmitted) -> None:
        group = GroupRecord(life, record.group, record.epoch, record.row, record.stamp, record.t, record.example)
        self.groups.append(group)
        self._groups[record.group] = group

    def _begin(self, life: int, name: str, t: float) -> EpisodeRecord:
        episode = EpisodeRecord(life, name, t, _group_of(name, self._groups))
        if episode.group is not None:
            episode.group.episodes.append(episode)
        self.episodes.append(episode)
        self._episodes[name] = episode
        return episode

    def _end(self, life: int, record: events.EpisodeEnded) -> None:
        episode = self._episodes.get(record.episode)
        if episode is None or episode.life != life:
            episode = self._begin(life, record.episode, record.began)
        episode.how, episode.ended, episode.attempts = record.how, record.t, record.attempts
        episode.reward, episode.error, episode.message = record.reward, record.error, record.message
        episode.trajectories = record.trajectories

    def _note_attempt(self, record: events.AttemptFailed) -> None:
        if episode := self._episodes.get(record.episode):
            episode.attempts = record.attempt
            episode.error, episode.message = record.error, record.message

    def _train(self, record: events.BatchTrained) -> None:
        for number in record.groups:
            if group := self._groups.get(number):
                group.step = record.version
                for episode in group.episodes:
                    episode.is_undone = False
        for part in record.trajectories:
            if episode := self._episodes.get(part.episode):
                episode.trained.append(part)

    def _go_back(self, version: int) -> None:
        """A life continues from the checkpoint of this version: later steps are undone, and what ran was lost."""
        for group in self._groups.values():
            if group.step is not None and group.step <= version:
                continue
            group.step = None
            for episode in group.episodes:
                episode.is_undone = True
                episode.trained.clear()
                if episode.ended is None:
                    episode.how = "lost"


def read_run(run_dir: str | Path) -> RunRecord:
    """What is known of the run in `run_dir`: its episodes, groups, steps, evaluations, tokens and events.

    It may still run; `update()` reads on. `problems` names what could not be read: a log of a newer arl, a damaged
    file. Raises RunFileError if there is no run at all.
    """
    run_dir = Path(run_dir)
    known = ("events", "metrics.jsonl", "evaluations.jsonl", "run.lock")
    if not any((run_dir / name).exists() for name in known):
        raise RunFileError(f"{run_dir} holds no run: there is none of {', '.join(known)} in it")
    run = RunRecord(run_dir)
    run.update()
    return run


def _group_of(name: str, groups: dict[int, GroupRecord]) -> GroupRecord | None:
    number = name.partition(".")[0]
    return groups.get(int(number)) if number.isdecimal() else None


def _token_record(rows: list[TokenRow], columns: dict[str, np.ndarray], place: int) -> TokenRecord:
    start = sum(row.tokens for row in rows[:place])
    row = rows[place]
    per_token = {name: column[start : start + row.tokens] for name, column in columns.items() if name in _PER_TOKEN}
    mask = per_token["loss_mask"]
    begin = sum(row.trained for row in rows[:place])
    for name, column in columns.items():
        if name not in _PER_TOKEN and row.trained:
            whole = np.full(row.tokens, np.nan, dtype=np.float32)
            whole[mask] = column[begin : begin + row.trained]
            per_token[name] = whole
    return TokenRecord(row, per_token)


_PER_TOKEN = ("token_ids", "loss_mask", "behavior_logprobs", "versions", "token_rewards")


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; torn or strange lines are left out."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("version"), int):
            rows.append(row)
    return rows

"""RunRecord: what is known of a run, from its event log and its JSONL files; it grows with a live run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import pyarrow as pa

from arl.api import events
from arl.api.errors import RunFileError
from arl.api.events import Event
from arl.api.html import run_html
from arl.api.version import install_command
from arl.observe.events.batches import FIELDS, records_in, token_row
from arl.observe.events.files import LogFiles
from arl.observe.events.image_store import ImageStore
from arl.observe.events.records import (
    EPISODE_COLUMNS,
    GROUP_COLUMNS,
    EpisodeRecord,
    GroupRecord,
    TokenRecord,
    json_text,
    logged_images,
    mean_of,
    table_of,
    table_of_rows,
)

if TYPE_CHECKING:
    import pandas as pd

Table = Literal["episodes", "groups", "steps", "evaluations", "calls", "events"]
_LIFE = pa.field("life", pa.int64())
_EVENTS = pa.schema([_LIFE, ("t", pa.float64()), ("event", pa.string()), ("record", pa.string())])
_CALLS = pa.schema([_LIFE, *FIELDS["calls"].items(), ("parts", pa.string())])


class RunRecord:
    """A run, read from `run_dir`. Only `update` reads what was added since."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.lives: dict[int, events.RunBegan] = {}
        """Each life's first record, if it has come that far."""
        self.episodes: list[EpisodeRecord] = []
        """Episodes in the order of their beginning."""
        self.groups: list[GroupRecord] = []
        self.system: list[tuple[int, Event]] = []
        """(life, record): everything but groups and episodes."""
        self.files = LogFiles(run_dir / "events")
        self.images = ImageStore(run_dir)
        """The images that its trajectories name."""
        self.last: float | None = None
        """The time of the newest record."""
        self._episodes: dict[tuple[int, str], EpisodeRecord] = {}
        self._groups: dict[tuple[int, int], GroupRecord] = {}
        """(life, name) -> group: a life uses names again that an earlier life used after its last checkpoint."""
        self._changed: set[int] = set()
        self._saved: dict[int, tuple[int, float]] = {}
        """The life that made each version, and when it copied the state of the version's checkpoint."""
        self._taken: dict[int, events.BatchTaken] = {}
        """The last of each life."""
        self._evaluated: dict[tuple[int, str], int] = {}
        """The version of each evaluation that has ended, by life and what its episodes' names begin with."""
        self._held_out: dict[str, dict[str, Any]] = {}
        """The example of each index in evaluations: one object for all of them, as there are many."""
        self._steps = _Rows(run_dir / "metrics.jsonl")
        self._evaluations = _Rows(run_dir / "evaluations.jsonl")

    @property
    def problems(self) -> list[str]:
        """Sentences that say what could not be read."""
        for rows in (self._steps, self._evaluations):
            rows.read()
        return [*self.files.problems, *(rows.problem for rows in (self._steps, self._evaluations) if rows.problem)]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the last life."""
        return self.lives[max(self.lives)].settings if self.lives else {}

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The metrics of each step."""
        return self._steps.read()

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return self._evaluations.read()

    def update(self, most: int | None = None) -> int:
        """Read what is new; returns the number of records.

        most: stop soon after so many; `files.num_bytes_waiting` says how much is left for the next call.
        """
        number = 0
        for life, record in self.files.new_records(most):
            self._add(life, record)
            self.last = record.t if self.last is None else max(self.last, record.t)
            number += 1
        return number

    def take_changed(self) -> set[int]:
        """Indices of the episodes that began or changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def episode(self, life: int, name: str) -> EpisodeRecord:
        """Raises RunFileError if there is none."""
        known = self._episodes.get((life, name))
        if known is None:
            raise RunFileError(f"{self.run_dir} has no episode {name} in its life {life}")
        return known

    def group(self, life: int, number: int) -> GroupRecord:
        """Raises RunFileError if there is none."""
        known = self._groups.get((life, number))
        if known is None:
            raise RunFileError(f"{self.run_dir} has no group {number} in its life {life}")
        return known

    def calls(self, first: float, last: float) -> Iterator[Event]:
        """The turns, tool calls and rewards that ended within these times, in seconds since 1970."""
        return self.files.calls(first, last)

    def calls_of(self, episode: EpisodeRecord) -> list[Event]:
        last = episode.ended if episode.ended is not None else float("inf")
        return list(self.files.calls(episode.began, last + 1.0, episode.life, episode=episode.episode))

    def tokens(self, episode: EpisodeRecord) -> list[TokenRecord]:
        """Its trajectories, as far as their tokens are kept. Raises RunFileError if they were deleted."""
        found: list[TokenRecord] = []
        for _, (life, segment, offset, place) in sorted(episode.places.items()):
            batch = self.files.tokens(life, segment, offset)
            try:
                row, columns = token_row(batch, place)
                found.append(TokenRecord(row, columns, logged_images(row, self.images)))
            except (ValueError, TypeError, LookupError) as error:
                raise RunFileError(f"the tokens of episode {episode.episode} are damaged: {error}") from error
        return found

    def __repr__(self) -> str:
        return f"RunRecord({str(self.run_dir)!r}, {len(self.steps)} steps, {len(self.episodes)} episodes)"

    def _repr_html_(self) -> str:
        """For a notebook. `arl.show` shows an episode."""
        newest = max(self.lives, default=0)
        ended = next((r for life, r in self.system if life == newest and isinstance(r, events.RunEnded)), None)
        facts = {
            "run_dir": self.run_dir,
            "workflow": next((began.workflow for began in self.lives.values()), None),
            "steps": len(self.steps),
            "episodes": len(self.episodes),
            "failed episodes": sum(episode.how in ("failed", "timed_out") for episode in self.episodes),
            "ended": f"{ended.how} {ended.why}".strip() if ended else None,
            "unreadable": "; ".join(self.problems) or None,
        }
        return run_html("Run", facts, self.steps, self.evaluations)

    def to_pandas(self, table: Table) -> pd.DataFrame:
        """A table as a DataFrame. Raises as `to_arrow` does, and ImportError without pandas."""
        try:
            import pandas as pd
        except ImportError:
            raise ImportError(f"to_pandas needs pandas: {install_command('examples')}") from None
        whole = {pa.int64(): pd.Int64Dtype()}  # pandas' own integers cannot be missing: they would become floats
        return self.to_arrow(table).to_pandas(types_mapper=whole.get)

    def to_arrow(self, table: Table) -> pa.Table:
        """A table. Raises ValueError for an unknown one."""
        match table:
            case "episodes":
                columns = dict(EPISODE_COLUMNS)
                for kind in ("rewards", "metrics"):
                    parts = (part for e in self.episodes for part in e.trajectories)
                    for name in dict.fromkeys(name for part in parts for name in getattr(part, kind)):
                        columns[f"{kind}/{name}"] = ("float64", mean_of(kind, name))
                return table_of(columns, self.episodes)
            case "groups":
                return table_of(GROUP_COLUMNS, self.groups)
            case "steps":
                return table_of_rows(self.steps)
            case "evaluations":
                return table_of_rows(self._evaluation_rows())
            case "calls":
                batches = []
                for name, batch in self.files.call_batches():
                    parts = [json_text(getattr(call, "parts", None) or None) for call in records_in(batch)[0]]
                    columns = [batch.column(column) for column in FIELDS["calls"]]
                    columns = [pa.array([name.life] * len(batch), pa.int64()), *columns, pa.array(parts, pa.string())]
                    batches.append(pa.RecordBatch.from_arrays(columns, schema=_CALLS))
                return pa.Table.from_batches(batches, _CALLS)
            case "events":
                told = [(life, record.t, type(record).__name__, json_text(record)) for life, record in self.system]
                columns = [list(column) for column in zip(*told, strict=True)] or [[]] * len(_EVENTS)
                return pa.table(dict(zip(_EVENTS.names, columns, strict=True)), schema=_EVENTS)
            case _:
                raise ValueError(f"there is no table {table}; give one of {', '.join(get_args(Table))}")

    def _evaluation_rows(self) -> list[dict[str, Any]]:
        """A row for each evaluation, and one with a `name` for each named dataset of it."""
        rows: list[dict[str, Any]] = []
        for row in self.evaluations:
            named = row.get("by_name")
            parts = named.items() if isinstance(named, dict) else ()
            rows += [row, *({"name": name, **part} for name, part in parts if isinstance(part, dict))]
        rows = [{**row["metrics"], **row} if isinstance(row.get("metrics"), dict) else row for row in rows]
        return [{name: row[name] for name in row if name not in ("metrics", "by_name")} for row in rows]

    def _add(self, life: int, record: Event) -> None:
        match record:
            case events.EpisodeBegan():
                self._begin(life, record.episode, record.t, record)
            case events.EpisodeEnded():
                self._end(life, record)
            case events.GroupAdmitted():
                self._admit(life, record)
            case events.GroupEnded():
                if group := self._group(life, record.group):
                    group.outcome, group.reason, group.detail = record.outcome, record.reason, record.detail
                    group.ended = record.t
                    self._touch(group)
            case events.TokensKept():
                for place, (name, number) in enumerate(record.rows):
                    if episode := self._episode(life, name):
                        episode.places[number] = (life, record.segment, record.offset, place)
                        self._changed.add(episode.index)
            case events.AttemptFailed():
                if episode := self._episodes.get((life, record.episode)):
                    episode.attempts = record.attempt
                    episode.error, episode.message = record.error, record.message
                    self._changed.add(episode.index)
                self.system.append((life, record))
            case _:
                self._note(life, record)
                self.system.append((life, record))

    def _note(self, life: int, record: Event) -> None:
        match record:
            case events.RunBegan():
                self.lives[life] = record
                self._go_back(life, record)
            case events.BatchTaken():
                self._taken[life] = record
                for number in record.groups:
                    if group := self._group(life, number):
                        group.taken = record.t
            case events.BatchTrained():
                self._train(life, record)
            case events.CheckpointWritten(error=""):
                self._saved[record.version] = life, record.t - record.seconds
            case events.EvaluationEnded():
                self._evaluated[life, f"e{record.number}"] = record.version
            case _:
                pass

    def _episode(self, life: int, name: str) -> EpisodeRecord | None:
        """The newest of this name that a life up to this one began."""
        return next((known for n in range(life, 0, -1) if (known := self._episodes.get((n, name)))), None)

    def _group(self, life: int, number: int) -> GroupRecord | None:
        return next((known for n in range(life, 0, -1) if (known := self._groups.get((n, number)))), None)

    def _touch(self, group: GroupRecord) -> None:
        self._changed.update(episode.index for episode in group.episodes)

    def _admit(self, life: int, record: events.GroupAdmitted) -> None:
        place = (life, record.group, record.epoch, record.row, record.stamp, record.t)
        group = GroupRecord(*place, record.example, record.task)
        self.groups.append(group)
        self._groups[life, record.group] = group

    def _begin(self, life: int, name: str, t: float, began: events.EpisodeBegan | None = None) -> EpisodeRecord:
        number, _, index = name.partition(".")
        group = self._group(life, int(number)) if number.isdecimal() else None
        episode = EpisodeRecord(len(self.episodes), life, name, t, group)
        if group is not None:
            episode.example = group.example
            episode.task = group.task
            group.episodes.append(episode)
        elif began:
            episode.row = began.row
            known = self._held_out.setdefault(index if began.row is None else str(began.row), began.example)
            episode.example = known if known == began.example else began.example
            episode.task = began.task
        self.episodes.append(episode)
        self._episodes[life, name] = episode
        self._changed.add(episode.index)
        return episode

    def _end(self, life: int, record: events.EpisodeEnded) -> None:
        episode = self._episodes.get((life, record.episode)) or self._begin(life, record.episode, record.began)
        episode.how, episode.ended, episode.attempts = record.how, record.t, record.attempts
        episode.reward, episode.error, episode.message = record.reward, record.error, record.message
        episode.trajectories = record.trajectories
        self._changed.add(episode.index)

    def _train(self, life: int, record: events.BatchTrained) -> None:
        self._saved[record.version] = life, record.t  # or later, if a record says when
        if (taken := self._taken.get(life)) and taken.version == record.version - 1:
            for number in taken.replayed:
                if group := self._group(life, number):
                    group.replayed.append(record.version)
        for number in record.groups:
            if group := self._group(life, number):
                group.step = record.version
                for episode in group.episodes:
                    episode.is_undone = False
                self._touch(group)
        for part in record.trajectories:
            if episode := self._episode(life, part.episode):
                episode.trained.append(part)
                self._changed.add(episode.index)

    def _go_back(self, life: int, began: events.RunBegan) -> None:
        """A life continues from a checkpoint: later steps are undone, and what ran was lost.

        Groups that wait in the checkpoint, or gave nothing to train on before it, are not.
        """
        saved = self._saved.get(began.version, (0, 0.0))
        waiting = {self._group(life - 1, number) for number in began.waiting}
        for group in self.groups:
            if group.life >= life:
                continue
            group.replayed = [version for version in group.replayed if version <= began.version]
            if group.step is not None and group.step <= began.version:
                continue
            has_nothing = group.outcome in ("rejected", "dropped") and group.ended is not None
            if has_nothing and (group.life, group.ended) <= saved:
                continue
            group.step = group.taken = None
            for episode in group.episodes:
                episode.is_undone = group not in waiting
                episode.trained.clear()
            self._touch(group)
        for episode in self.episodes:
            if episode.life < life:
                self._leave_behind(episode, began.version)

    def _leave_behind(self, episode: EpisodeRecord, version: int) -> None:
        """An episode of an earlier life than one that continues from this version."""
        is_lost = episode.ended is None and episode.how == "running"  # also a late one of a trained group
        evaluation = episode.episode.partition(".")[0]
        is_undone = evaluation[0] == "e" and self._evaluated.get((episode.life, evaluation), math.inf) > version
        if is_lost or is_undone:
            episode.how = "lost" if is_lost else episode.how
            episode.is_undone = episode.is_undone or is_undone
            self._changed.add(episode.index)


def read_run(run_dir: str | Path) -> RunRecord:
    """Read what the run in `run_dir` recorded: its episodes, groups, steps, evaluations, tokens and events.

    The run may still train; `update()` reads what was added since. `problems` lists what could not be read: a log of a
    newer arl, a damaged file. Raises RunFileError if there is no run at all.
    """
    run_dir = Path(run_dir)
    known = ("events", "metrics.jsonl", "evaluations.jsonl", "run.lock")
    if not any((run_dir / name).exists() for name in known):
        raise RunFileError(f"{run_dir} holds no run: it has none of {', '.join(known)}")
    run = RunRecord(run_dir)
    run.update()
    return run


class _Rows:
    """The rows of a JSONL file, which is read again when it has changed; torn or strange lines are left out."""

    def __init__(self, path: Path) -> None:
        self.problem = ""
        """A sentence that says what could not be read."""
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._rows: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        try:
            now = self._path.stat()
            if (now.st_size, now.st_mtime_ns) == self._seen:
                return self._rows
            lines = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            self.problem = f"{self._path} cannot be read: {error.strerror}"
            return []
        self._seen = now.st_size, now.st_mtime_ns
        found = [_row(line) for line in lines]
        self._rows = [row for row in found if row is not None]
        strange = sum(row is None and bool(line.strip()) for row, line in zip(found[:-1], lines, strict=False))
        self.problem = f"damaged lines of {self._path} are left out: {strange}" if strange else ""
        return self._rows


def _row(line: bytes) -> dict[str, Any] | None:
    """None also for the last line, which may be being written."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("version"), int) else None

"""The records of a run as tables of Arrow and pandas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import msgspec
import numpy as np
import pyarrow as pa

from arl.api.errors import RunFileError
from arl.api.events import Event
from arl.api.version import install_command
from arl.observe.events.batches import COMPUTED, FIELDS, PER_TOKEN, records_in
from arl.observe.events.files import LogFiles
from arl.observe.events.records import EpisodeRecord, GroupRecord

if TYPE_CHECKING:
    import pandas as pd

Table = Literal["episodes", "groups", "steps", "evaluations", "calls", "events", "tokens"]

_MOST_ROWS = 50_000
"""Rows of events in one piece."""


class Recorded(Protocol):
    """What a table is made of. A RunRecord is one."""

    @property
    def episodes(self) -> Sequence[EpisodeRecord]: ...
    @property
    def groups(self) -> Sequence[GroupRecord]: ...
    @property
    def system(self) -> Sequence[tuple[int, Event]]: ...
    @property
    def steps(self) -> list[dict[str, Any]]: ...
    @property
    def evaluations(self) -> list[dict[str, Any]]: ...
    @property
    def files(self) -> LogFiles: ...


def to_pandas(run: Recorded, table: Table) -> pd.DataFrame:
    try:
        import pandas as pd
    except ImportError:
        raise ImportError(f"to_pandas needs pandas: {install_command('examples')}") from None
    whole = {pa.int64(): pd.Int64Dtype()}  # pandas' own integers cannot be missing: they would become floats
    return to_arrow(run, table).to_pandas(types_mapper=whole.get)


def to_arrow(run: Recorded, table: Table) -> pa.Table:
    return pa.Table.from_batches(batches(run, table))


def batches(run: Recorded, table: Table) -> Iterator[pa.RecordBatch]:
    """One piece at least, if only an empty one. Its schema is that of all pieces."""
    match table:
        case "episodes":
            return iter([_from_records(_episode_columns(run), run.episodes)])
        case "groups":
            return iter([_from_records(_GROUP, run.groups)])
        case "steps":
            return iter([_from_rows(run.steps)])
        case "evaluations":
            return iter([_evaluations(run)])
        case "calls":
            return _or_empty(_CALLS, _calls(run))
        case "events":
            return _or_empty(_EVENTS, _events(run))
        case "tokens":
            return _tokens(run)
        case _:
            raise ValueError(f"there is no table {table}; give one of {', '.join(get_args(Table))}")


def _or_empty(schema: pa.Schema, pieces: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    is_empty = True
    for piece in pieces:
        is_empty = False
        yield piece
    if is_empty:
        yield pa.RecordBatch.from_pylist([], schema=schema)


def _array(values: Sequence[Any]) -> pa.Array:
    """Its type is that of the values; of values without a common one, their texts."""
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError):
        return pa.array([None if value is None else str(value) for value in values])


# Each table

_Column = tuple[str, Callable[[Any], Any]]

_EPISODE: dict[str, _Column] = {
    "life": ("int64", attrgetter("life")),
    "episode": ("string", attrgetter("episode")),
    "group": ("int64", lambda e: e.group.group if e.group else None),
    "task": ("string", attrgetter("task")),
    "epoch": ("int64", lambda e: e.group.epoch if e.group else None),
    "row": ("int64", lambda e: e.group.row if e.group else None),
    "step": ("int64", attrgetter("step")),
    "how": ("string", attrgetter("how")),
    "outcome": ("string", lambda e: e.group.outcome if e.group else None),
    "reward": ("float64", attrgetter("reward")),
    "began": ("float64", attrgetter("began")),
    "ended": ("float64", attrgetter("ended")),
    "attempts": ("int64", attrgetter("attempts")),
    "error": ("string", attrgetter("error")),
    "message": ("string", attrgetter("message")),
    "trajectories": ("int64", lambda e: len(e.trajectories)),
    "tokens": ("int64", attrgetter("num_tokens")),
    "trained_tokens": ("int64", lambda e: sum(part.trained for part in e.trajectories)),
    "turns": ("int64", attrgetter("num_turns")),
    "oldest": ("int64", attrgetter("oldest")),
    "newest": ("int64", attrgetter("newest")),
    "staleness": ("int64", attrgetter("staleness")),
    "advantage": ("float64", lambda e: _mean(part.advantage for part in e.trained)),
    "entropy": ("float64", lambda e: _mean(part.entropy for part in e.trained)),
    "is_undone": ("bool", attrgetter("is_undone")),
    "example": ("string", lambda e: None if e.group else _json(e.example)),
}

_GROUP: dict[str, _Column] = {
    **{name: ("int64", attrgetter(name)) for name in ("life", "group", "epoch", "row", "stamp", "step")},
    **{name: ("float64", attrgetter(name)) for name in ("admitted", "ended", "taken")},
    **{name: ("string", attrgetter(name)) for name in ("outcome", "reason", "detail")},
    "episodes": ("int64", lambda group: len(group.episodes)),
    "replayed": ("int64", lambda group: len(group.replayed)),
    "reward": ("float64", lambda group: _mean(e.reward for e in group.episodes if e.reward is not None)),
    "example": ("string", lambda group: _json(group.example)),
}


def _episode_columns(run: Recorded) -> dict[str, _Column]:
    columns = dict(_EPISODE)
    for kind in ("rewards", "metrics"):
        for name in dict.fromkeys(
            name for e in run.episodes for part in e.trajectories for name in getattr(part, kind)
        ):
            columns[f"{kind}/{name}"] = ("float64", _mean_of(kind, name))
    return columns


def _mean_of(kind: str, name: str) -> Callable[[EpisodeRecord], float | None]:
    """Over the trajectories that have it."""
    return lambda e: _mean(getattr(part, kind)[name] for part in e.trajectories if name in getattr(part, kind))


def _from_records(columns: Mapping[str, _Column], records: Sequence[Any]) -> pa.RecordBatch:
    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, (kind, _) in columns.items()])
    return pa.RecordBatch.from_pydict(
        {name: [get(record) for record in records] for name, (_, get) in columns.items()}, schema=schema
    )


def _evaluations(run: Recorded) -> pa.RecordBatch:
    """A row for each evaluation, and one with a `name` for each named dataset of it."""
    rows = [named for row in run.evaluations for named in (row, *_named(row))]
    rows = [{**row["metrics"], **row} if isinstance(row.get("metrics"), dict) else row for row in rows]
    return _from_rows([{name: row[name] for name in row if name not in ("metrics", "by_name")} for row in rows])


def _named(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    parts = row.get("by_name")
    if not isinstance(parts, dict):
        return []
    return [{"name": name, **part} for name, part in parts.items() if isinstance(part, dict)]


def _from_rows(rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    names = dict.fromkeys(["version", *(name for row in rows for name in row)])
    return pa.RecordBatch.from_pydict({name: _array([row.get(name) for row in rows]) for name in names})


_LIFE = pa.field("life", pa.int64())
_EVENTS = pa.schema([_LIFE, ("t", pa.float64()), ("event", pa.string()), ("record", pa.string())])
_CALLS = pa.schema([_LIFE, *FIELDS["calls"].items(), ("parts", pa.string())])


def _events(run: Recorded) -> Iterator[pa.RecordBatch]:
    rows = iter(run.system)
    while piece := list(islice(rows, _MOST_ROWS)):
        told = [(life, record.t, type(record).__name__, _json(record)) for life, record in piece]
        yield pa.RecordBatch.from_pydict(dict(zip(_EVENTS.names, zip(*told, strict=True), strict=True)), schema=_EVENTS)


def _calls(run: Recorded) -> Iterator[pa.RecordBatch]:
    for name, batch in run.files.call_batches():
        parts = [_json(getattr(call, "parts", None) or None) for call in records_in(batch)[0]]
        columns = {name: batch.column(name) for name in FIELDS["calls"]}
        yield pa.RecordBatch.from_pydict({"life": [name.life] * len(batch), **columns, "parts": parts}, schema=_CALLS)


def _tokens(run: Recorded) -> Iterator[pa.RecordBatch]:
    """A row for each token."""
    places: defaultdict[tuple[int, int, int], list[tuple[EpisodeRecord, int, int]]] = defaultdict(list)
    for episode in run.episodes:
        for number, (life, segment, offset, row) in episode.places.items():
            places[life, segment, offset].append((episode, number, row))
    names = dict.fromkeys(name for place in places if (batch := _batch_of(run, place)) for name in _computed(batch))
    lists = {**PER_TOKEN, **dict.fromkeys(names, pa.float32())}
    about = {"life": pa.int64(), "episode": pa.string(), "trajectory": pa.int64(), "role": pa.string()}
    schema = pa.schema([*about.items(), ("position", pa.int64()), *lists.items()])
    pieces = (_exploded(run, place, rows, schema) for place, rows in sorted(places.items()))
    return _or_empty(schema, (piece for piece in pieces if piece is not None))


def _batch_of(run: Recorded, place: tuple[int, int, int]) -> pa.RecordBatch | None:
    """None for one that was deleted or is damaged: run.problems says so."""
    try:
        return run.files.tokens(*place)
    except RunFileError as error:
        run.files.problems[str(error)] = None
        return None


def _computed(batch: pa.RecordBatch) -> list[str]:
    """The columns that training computed for any trajectory of the batch."""
    names = batch.schema.names[batch.schema.get_field_index(COMPUTED[0]) :]
    return [name for name in names if batch.column(name).null_count < len(batch)]


def _exploded(
    run: Recorded, place: tuple[int, int, int], rows: Sequence[tuple[EpisodeRecord, int, int]], schema: pa.Schema
) -> pa.RecordBatch | None:
    """The tokens of these trajectories: for each its episode, its number there, and its row of the batch."""
    if (batch := _batch_of(run, place)) is None:
        return None
    part = batch.take([row for _, _, row in rows])
    sizes = part.column("token_ids").value_lengths().to_numpy()
    owners = np.repeat(np.arange(len(part)), sizes)
    columns: dict[str, Any] = {
        "life": np.array([episode.life for episode, _, _ in rows])[owners],
        "episode": pa.array([episode.episode for episode, _, _ in rows]).take(owners),
        "trajectory": np.array([number for _, number, _ in rows])[owners],
        "role": part.column("role").take(owners),
        "position": np.arange(len(owners)) - np.repeat(sizes.cumsum() - sizes, sizes),
    }
    for field in list(schema)[len(columns) :]:
        is_there = field.name in part.schema.names
        column = part.column(field.name) if is_there else pa.nulls(len(part), pa.list_(field.type))
        has = np.repeat(column.is_valid().to_numpy(zero_copy_only=False), sizes)
        flat = column.flatten()  # leaves out trajectories that lack it
        if len(flat) != has.sum():
            raise ValueError(f"{field.name} has {len(flat)} entries for {has.sum()} tokens")
        columns[field.name] = flat.take(pa.array(has.cumsum() - 1, mask=~has))
    return pa.RecordBatch.from_pydict(columns, schema=schema)


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None


def _json(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()

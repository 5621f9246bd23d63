"""The records of a run as tables of pyarrow and pandas, which are loaded when a table is asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import msgspec
import numpy as np

from arl.api.errors import RunFileError
from arl.api.events import CALLS, Event
from arl.api.installing import install_command
from arl.eventlog.reading import LogFiles
from arl.eventlog.records import PER_TOKEN, EpisodeRecord, GroupRecord, TokenRecord, token_record
from arl.eventlog.segments import UnpackedTokens

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

Table = Literal["episodes", "groups", "steps", "evaluations", "calls", "events", "tokens"]
Values = Mapping[str, Any]
"""Name -> the values of a column: a list, or numpy's array."""

_MOST_ROWS = 50_000
"""Rows of calls and events in one piece."""
_PER_TOKEN_TYPES = ("int32", "bool", "float32", "int32", "float64")


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
    pd, pa = _load("pandas", "to_pandas"), _load("pyarrow", "to_pandas")
    whole = {pa.int64(): pd.Int64Dtype()}  # pandas' own integers cannot be missing: they would become floats
    return to_arrow(run, table).to_pandas(types_mapper=whole.get)


def to_arrow(run: Recorded, table: Table) -> pa.Table:
    pa = _load("pyarrow", "to_arrow")
    first, *rest = batches(run, table)
    return pa.Table.from_batches([first, *rest])


def batches(run: Recorded, table: Table) -> Iterator[pa.RecordBatch]:
    """One piece at least, if only an empty one. Its schema is that of all pieces."""
    if table not in get_args(Table):
        raise ValueError(f"there is no table {table}; give one of {', '.join(get_args(Table))}")
    pa = _load("pyarrow", "batches")
    types, pieces = _TABLES[table](run)
    if types is None:
        (values,) = pieces
        return iter([pa.RecordBatch.from_pydict({name: _array(pa, column) for name, column in values.items()})])
    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in types.items()])
    return _with_schema(pa, schema, pieces)


def _with_schema(pa: Any, schema: pa.Schema, pieces: Iterator[Values]) -> Iterator[pa.RecordBatch]:
    is_empty = True
    for values in pieces:
        is_empty = False
        yield pa.RecordBatch.from_pydict(dict(values), schema=schema)
    if is_empty:
        yield pa.RecordBatch.from_pydict({name: [] for name in schema.names}, schema=schema)


def _load(package: str, what: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise ImportError(f"{what} needs {package}: {install_command('examples')}") from None


def _array(pa: Any, values: Sequence[Any]) -> Any:
    """Its type is that of the values; of values without a common one, their texts."""
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError):
        return pa.array([None if value is None else str(value) for value in values])


# Each table: the types of its columns, or None for whatever its values are; and its pieces

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

_CALL_TYPES = {
    "life": "int64", "event": "string", "t": "float64", "episode": "string", "seconds": "float64",
    "rid": "string", "session": "string", "server": "string", "queued_s": "float64", "server_s": "float64",
    "prompt": "int64", "output": "int64", "cached": "int64", "oldest": "int64", "newest": "int64",
    "sends": "int64", "stop": "string",
    "tool": "string", "failure": "string",
    "reward": "string", "value": "float64", "parts": "string", "error": "string",
}  # fmt: skip
_FIELDS = {kind: set(kind.__struct_fields__) for kind in CALLS}

_Pieces = tuple[Mapping[str, str] | None, Iterator[Values]]


def _episodes(run: Recorded) -> _Pieces:
    columns = dict(_EPISODE)
    for kind in ("rewards", "metrics"):
        for name in dict.fromkeys(
            name for e in run.episodes for part in e.trajectories for name in getattr(part, kind)
        ):
            columns[f"{kind}/{name}"] = ("float64", _mean_of(kind, name))
    return _from_records(columns, run.episodes)


def _groups(run: Recorded) -> _Pieces:
    return _from_records(_GROUP, run.groups)


def _from_records(columns: Mapping[str, _Column], records: Sequence[Any]) -> _Pieces:
    values = {name: [get(record) for record in records] for name, (_, get) in columns.items()}
    return {name: kind for name, (kind, _) in columns.items()}, iter([values])


def _mean_of(kind: str, name: str) -> Callable[[EpisodeRecord], float | None]:
    """Over the trajectories that have it."""
    return lambda e: _mean(getattr(part, kind)[name] for part in e.trajectories if name in getattr(part, kind))


def _steps(run: Recorded) -> _Pieces:
    return None, iter([_from_rows(run.steps)])


def _evaluations(run: Recorded) -> _Pieces:
    """A row for each evaluation, and one with a `name` for each named dataset of it."""
    rows = [named for row in run.evaluations for named in (row, *_named(row))]
    rows = [{**row["metrics"], **row} if isinstance(row.get("metrics"), dict) else row for row in rows]
    shown = [{name: row[name] for name in row if name not in ("metrics", "by_name")} for row in rows]
    return None, iter([_from_rows(shown)])


def _named(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    parts = row.get("by_name")
    if not isinstance(parts, dict):
        return []
    return [{"name": name, **part} for name, part in parts.items() if isinstance(part, dict)]


def _from_rows(rows: Sequence[Mapping[str, Any]]) -> Values:
    names = dict.fromkeys(["version", *(name for row in rows for name in row)])
    return {name: [row.get(name) for row in rows] for name in names}


def _events(run: Recorded) -> _Pieces:
    rows = ((life, record.t, type(record).__name__, _json(record)) for life, record in run.system)
    types = {"life": "int64", "t": "float64", "event": "string", "record": "string"}
    return types, (dict(zip(types, zip(*piece, strict=True), strict=True)) for piece in _cut(rows))


def _calls(run: Recorded) -> _Pieces:
    calls = ((life, call) for life in run.files.lives() for call in run.files.calls(-np.inf, np.inf, life))
    return _CALL_TYPES, (_call_columns(piece) for piece in _cut(calls))


def _call_columns(calls: list[tuple[int, Event]]) -> Values:
    known: dict[str, Callable[[Event], Any]] = {
        "event": lambda call: type(call).__name__,
        "parts": lambda call: _json(getattr(call, "parts", None) or None),
    }
    fields = {name: known.get(name) or _field(name) for name in _CALL_TYPES if name != "life"}
    columns = {name: [get(call) for _, call in calls] for name, get in fields.items()}
    return {"life": [life for life, _ in calls], **columns}


def _field(name: str) -> Callable[[Event], Any]:
    return lambda call: getattr(call, name, None)


def _cut(rows: Iterable[Any]) -> Iterator[list[Any]]:
    rows = iter(rows)
    while piece := list(islice(rows, _MOST_ROWS)):
        yield piece


def _tokens(run: Recorded) -> _Pieces:
    frames: defaultdict[tuple[int, int, int], list[tuple[EpisodeRecord, int]]] = defaultdict(list)
    for episode in run.episodes:
        for number, place in episode.places.items():
            frames[place[:3]].append((episode, number))
    names = (name for place in frames if (frame := _frame(run, place)) for name in frame.columns)
    computed = dict.fromkeys(name for name in names if name not in PER_TOKEN)
    types = {
        "life": "int64", "episode": "string", "trajectory": "int64", "role": "string", "position": "int64",
        **dict(zip(PER_TOKEN, _PER_TOKEN_TYPES, strict=True)),
        **dict.fromkeys(computed, "float32"),
    }  # fmt: skip
    return types, (
        values for place, wanted in sorted(frames.items()) if (values := _tokens_in(run, place, wanted, types))
    )


def _frame(run: Recorded, place: tuple[int, int, int]) -> UnpackedTokens | None:
    """None for one that was deleted or is damaged: run.problems says so."""
    try:
        return run.files.tokens(*place)
    except RunFileError as error:
        run.files.problems[str(error)] = None
        return None


def _tokens_in(
    run: Recorded, place: tuple[int, int, int], wanted: Sequence[tuple[EpisodeRecord, int]], types: Mapping[str, str]
) -> Values | None:
    """The columns of the wanted trajectories in one frame; None without any."""
    if (frame := _frame(run, place)) is None:
        return None
    parts: list[tuple[EpisodeRecord, int, TokenRecord]] = []
    for episode, number in wanted:
        try:
            parts.append((episode, number, token_record(frame, episode.places[number][3])))
        except (ValueError, TypeError, LookupError) as error:
            run.files.problems[f"the tokens of episode {episode.episode} are damaged: {error}"] = None
    if not parts:
        return None
    sizes = [part.row.tokens for _, _, part in parts]
    found: dict[str, Any] = {
        "life": np.repeat([episode.life for episode, _, _ in parts], sizes),
        "episode": np.repeat(np.array([episode.episode for episode, _, _ in parts], object), sizes),
        "trajectory": np.repeat([number for _, number, _ in parts], sizes),
        "role": np.repeat(np.array([part.row.role for _, _, part in parts], object), sizes),
        "position": np.concatenate([np.arange(size) for size in sizes]),
    }
    for name in types.keys() - found.keys():
        if any(name in part.columns for _, _, part in parts):
            found[name] = np.concatenate([_column(part, name, types[name]) for _, _, part in parts])
        else:
            found[name] = [None] * sum(sizes)
    return {name: found[name] for name in types}


def _column(part: TokenRecord, name: str, kind: str) -> np.ndarray:
    known = part.columns.get(name)
    return np.full(part.row.tokens, np.nan, np.float32) if known is None else known.astype(kind, copy=False)


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None


def _json(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


_TABLES: dict[str, Callable[[Recorded], _Pieces]] = {
    "episodes": _episodes,
    "groups": _groups,
    "steps": _steps,
    "evaluations": _evaluations,
    "calls": _calls,
    "events": _events,
    "tokens": _tokens,
}

"""Records and tokens as Arrow record batches, and back.

table     a row for each
events    record that is not of a call: fields to select by, and all of it as JSON
calls     turn, tool call and reward: its fields, and all of it as JSON
tokens    trajectory whose tokens are kept: lists with an entry for each of its tokens
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow.json import ParseOptions, ReadOptions, read_json

from arl.api.events import DECODER, SCHEMA, Event, KeptTokens, TokenFrame, short, short_names
from arl.api.types import Trajectory

TableName = Literal["events", "calls", "tokens"]
TABLES: tuple[TableName, ...] = get_args(TableName)
SCHEMA_KEY = b"arl.schema"
"""The metadata of each file's Arrow schema has SCHEMA under this key."""

_FRAME_TOKENS = 1_000_000
"""A batch of tokens ends after the trajectory that makes it this long."""
_TEXT, _INT, _FLOAT = pa.string(), pa.int64(), pa.float64()
_NUMBERS = pa.map_(_TEXT, _FLOAT)
FIELDS = {
    "events": {"t": _FLOAT, "event": _TEXT, "episode": _TEXT, "group": _INT, "version": _INT, "reward": _FLOAT},
    "calls": {
        "t": _FLOAT, "event": _TEXT, "episode": _TEXT, "seconds": _FLOAT,
        "rid": _TEXT, "server": _TEXT, "queued_s": _FLOAT, "server_s": _FLOAT, "prompt": _INT, "output": _INT,
        "cached": _INT, "oldest": _INT, "newest": _INT, "sends": _INT, "stop": _TEXT,
        "tool": _TEXT, "failure": _TEXT,
        "reward": _TEXT, "value": _FLOAT, "error": _TEXT,
    },
}  # fmt: skip
"""Fields of records that are columns, too; null where a record has no such field."""
PER_TOKEN = {
    "token_ids": pa.int32(), "loss_mask": pa.bool_(), "behavior_logprobs": pa.float32(), "versions": pa.int32(),
    "token_rewards": pa.float32(),
}  # fmt: skip
"""Columns of `tokens` with an entry for each token. All but the last are always there."""
COMPUTED = (
    "proximal_logprobs", "current_logprobs", "advantages", "weights", "clipped", "entropy", "reference_logprobs",
    "values", "returns", "implicit_rewards",
)  # fmt: skip
"""Those that training computes: nan at tokens that it did not train, null for trajectories that were in no batch. An
engine of a user's own may add others."""
_TURN = pa.struct({"start": _INT, "stop": _INT, "reward": _FLOAT, "state": _TEXT})
_IMAGE = pa.struct({"digest": _TEXT, "width": _INT, "height": _INT, "start": _INT, "stop": _INT})
_OF_ROW = {
    "episode": _TEXT, "trajectory": _INT, "role": _TEXT, "reward": _FLOAT, "rewards": _NUMBERS, "metrics": _NUMBERS,
    "temperature": _FLOAT, "is_truncated": pa.bool_(), "turns": pa.list_(_TURN), "images": pa.list_(_IMAGE),
}  # fmt: skip


def _schema(types: Mapping[str, pa.DataType]) -> pa.Schema:
    return pa.schema(list(types.items()), metadata={SCHEMA_KEY: str(SCHEMA)})


def _tokens_schema(others: Iterable[str]) -> pa.Schema:
    """others: what training computed beside COMPUTED."""
    lists = {**PER_TOKEN, **dict.fromkeys((*COMPUTED, *others), pa.float32())}
    return _schema({**_OF_ROW, **{name: pa.list_(kind) for name, kind in lists.items()}})


SCHEMAS: dict[TableName, pa.Schema] = {
    "events": _schema({**FIELDS["events"], "record": _TEXT}),
    "calls": _schema({**FIELDS["calls"], "record": _TEXT}),
    "tokens": _tokens_schema(()),
}
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)


def packed(batch: pa.RecordBatch) -> bytes:
    """An Arrow IPC stream of this batch alone, without an end-of-stream marker."""
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, batch.schema, options=_OPTIONS).write_batch(batch)
    return sink.getvalue().to_pybytes()


def unpacked(stream: bytes) -> pa.RecordBatch:
    return pa.ipc.open_stream(stream).read_next_batch()


# Records


def records_batch(table: Literal["events", "calls"], lines: Sequence[bytes]) -> pa.RecordBatch:
    """lines: records as JSON."""
    text, types = b"\n".join(lines), list(FIELDS[table].items())
    parsing = ParseOptions(explicit_schema=pa.schema(types), unexpected_field_behavior="ignore")
    try:
        read = read_json(pa.BufferReader(text), ReadOptions(False, len(text) + 1), parsing).combine_chunks()
        fields = [read.column(name).chunk(0) for name, _ in types]
    except pa.ArrowInvalid:  # a number that no column holds, for instance; the record has it all the same
        fields = [pa.nulls(len(lines), kind) for _, kind in types]
    return pa.RecordBatch.from_arrays([*fields, _texts(lines)], schema=SCHEMAS[table])


def records_in(batch: pa.RecordBatch) -> tuple[list[Event], list[str]]:
    """The records, and why others are left out: those of kinds that a newer arl added, for instance."""
    lines = batch.column("record").to_pylist()
    try:
        return DECODER.decode_lines("\n".join(lines)), []
    except msgspec.MsgspecError:
        pass
    records, flaws = list[Event](), list[str]()
    for line in lines:
        try:
            records.append(DECODER.decode(line))
        except msgspec.MsgspecError as error:
            flaws.append(str(error))
    return records, flaws


# Tokens


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory in `tokens`, without its tokens."""

    episode: str
    number: int
    """The number of the trajectory in its episode; -1: what a failed episode last saw and said."""
    tokens: int
    """T: entries of each column per token."""
    role: str = "agent"
    reward: float | None = None
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    turns: list[tuple[int, int, float]] = []
    """(start, stop, reward) of each."""
    states: list[str | None] = []
    """The key of the state in which each turn was taken; empty if none has one."""
    temperature: float = 1.0
    is_truncated: bool = False
    images: list[tuple[str, int, int, int, int]] = []
    """(digest, width, height, start, stop) of each: its file in the run's ImageStore, and its placeholders."""


msgspec.json.Decoder(TokenRow)  # threads may read it at once: see events.DECODER


def token_row(batch: pa.RecordBatch, place: int) -> tuple[TokenRow, dict[str, np.ndarray]]:
    """Row `place` of a batch of tokens: its description, and the columns that it has.

    Raises ValueError, LookupError or TypeError for a damaged one.
    """
    row = {name: batch.column(name)[place].as_py() for name in _OF_ROW}
    lists = {name: batch.column(name)[place] for name in batch.schema.names if name not in _OF_ROW}
    columns = {name: one.values.to_numpy(zero_copy_only=False) for name, one in lists.items() if one.is_valid}
    size = len(columns["token_ids"])
    for name in (*list(PER_TOKEN)[:4], *columns):
        if len(columns[name]) != size:
            raise ValueError(f"{name} has {len(columns[name])} entries for {size} tokens")
    states = [turn["state"] for turn in row["turns"]]
    described = {
        **row,
        "number": row["trajectory"],
        "tokens": size,
        "rewards": dict(row["rewards"]),
        "metrics": dict(row["metrics"]),
        "turns": [(turn["start"], turn["stop"], turn["reward"]) for turn in row["turns"]],
        "states": states if any(state is not None for state in states) else [],
        "images": [tuple(image.values()) for image in row["images"]],
    }
    return msgspec.convert(described, TokenRow), columns


class _Row(NamedTuple):
    episode: str
    number: int
    trajectory: Trajectory
    trained: Mapping[str, np.ndarray]
    """As in KeptTokens, for this trajectory; empty if it has no trained token."""


def frames_of(blocks: Iterable[KeptTokens | TokenFrame]) -> Iterator[TokenFrame]:
    """The blocks in frames of some _FRAME_TOKENS tokens; those that are frames as they are."""
    waiting, count = list[_Row](), 0
    for block in blocks:
        if isinstance(block, TokenFrame):
            yield block
            continue
        begin = 0
        for episode, number, trajectory in block.rows:
            end, size = begin + trajectory.num_trained_tokens, len(trajectory.token_ids)
            trained = {name: column[begin:end] for name, column in block.trained.items() if end > begin}
            if waiting and count + size > _FRAME_TOKENS:
                yield _frame(waiting)
                waiting, count = [], 0
            waiting.append(_Row(episode, number, trajectory, trained))
            count, begin = count + size, end
    if waiting:
        yield _frame(waiting)


def renamed(frame: TokenFrame) -> bytes:
    """The frame's bytes, with its `rows` in the columns that name them."""
    batch = unpacked(frame.frame)
    names, numbers = zip(*frame.rows, strict=True)
    for column, values in (("episode", _texts(names)), ("trajectory", _array(numbers, _INT))):
        batch = batch.set_column(batch.schema.get_field_index(column), column, values)
    return packed(batch)


def _frame(rows: Sequence[_Row]) -> TokenFrame:
    members = [row.trajectory for row in rows]
    schema = _tokens_schema(sorted({name for row in rows for name in row.trained} - {*COMPUTED}))
    sizes, mask = [len(t.token_ids) for t in members], np.concatenate([t.loss_mask for t in members])
    turns = [
        [(turn.start, turn.stop, turn.reward, turn.state and short(turn.state)) for turn in t.turns] for t in members
    ]
    images = [[(p.image.digest, p.image.width, p.image.height, p.start, p.stop) for p in t.images] for t in members]
    arrays = {
        "episode": _texts([row.episode for row in rows]),
        "trajectory": _array([row.number for row in rows], _INT),
        "role": _texts([short(t.role) for t in members]),
        "reward": _array([t.reward for t in members], _FLOAT),
        "rewards": _maps([short_names(t.rewards) for t in members]),
        "metrics": _maps([short_names(t.metrics) for t in members]),
        "temperature": _array([t.temperature for t in members], _FLOAT),
        "is_truncated": _array([t.is_truncated for t in members], pa.bool_()),
        "turns": _structs(turns, _TURN),
        "images": _structs(images, _IMAGE),
    }
    for name, kind in PER_TOKEN.items():
        arrays[name] = _token_lists([getattr(t, name) for t in members], sizes, kind)
    for name in schema.names[len(arrays) :]:
        arrays[name] = _token_lists([row.trained.get(name) for row in rows], sizes, pa.float32(), mask)
    return TokenFrame(
        rows=[(row.episode, row.number) for row in rows],
        num_tokens=sum(sizes),
        frame=packed(pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)),
        images=[*{placed.image: None for one in members for placed in one.images}],
    )


# Arrays. pa.array would load pandas wherever that is installed: 0.25 s, and its memory.


def _array(values: Sequence[Any] | np.ndarray, kind: pa.DataType) -> pa.Array:
    """Of numbers or booleans."""
    if kind == pa.bool_():
        data = np.packbits(values, bitorder="little")
    else:
        data = np.ascontiguousarray(values, kind.to_pandas_dtype())
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(data)])


def _texts(values: Sequence[str | bytes | None]) -> pa.Array:
    """Half a character becomes a question mark."""
    texts = [value if isinstance(value, bytes) else (value or "").encode(errors="replace") for value in values]
    has = [value is not None for value in values]
    valid = None if all(has) else _array(has, pa.bool_()).buffers()[1]
    ends = _offsets(map(len, texts)).buffers()[1]
    return pa.StringArray.from_buffers(len(values), ends, pa.py_buffer(b"".join(texts)), valid)


def _offsets(counts: Iterable[int]) -> pa.Array:
    return _array(np.fromiter(accumulate(counts, initial=0), np.int32), pa.int32())


def _structs(rows: Sequence[Sequence[tuple[Any, ...]]], kind: pa.StructType) -> pa.Array:
    """A list of structs for each row."""
    columns = [*zip(*(one for row in rows for one in row), strict=True)] or [()] * kind.num_fields
    own = [
        _texts(values) if field.type == _TEXT else _array(values, field.type)
        for field, values in zip(kind, columns, strict=True)
    ]
    return pa.ListArray.from_arrays(_offsets(map(len, rows)), pa.StructArray.from_arrays(own, fields=list(kind)))


def _maps(rows: Sequence[Mapping[str, float]]) -> pa.Array:
    names, numbers = [name for row in rows for name in row], [number for row in rows for number in row.values()]
    return pa.MapArray.from_arrays(_offsets(map(len, rows)), _texts(names), _array(numbers, _FLOAT))


def _token_lists(
    parts: Sequence[np.ndarray | None], sizes: Sequence[int], kind: pa.DataType, mask: np.ndarray | None = None
) -> pa.Array:
    """A list for each trajectory, null for one without a part. mask: where parts have entries; nan stands elsewhere."""
    has = np.array([part is not None for part in parts])
    if not has.any():
        return pa.nulls(len(parts), pa.list_(kind))
    values = np.concatenate([part for part in parts if part is not None])
    if mask is not None or not has.all():
        places = np.repeat(has, sizes) if mask is None else np.repeat(has, sizes) & mask
        values, among = np.full(len(places), np.nan, np.float32), values
        values[places] = among
    lacks = None if has.all() else _array(~has, pa.bool_())
    return pa.ListArray.from_arrays(_offsets(sizes), _array(values, kind), mask=lacks)

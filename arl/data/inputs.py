"""Datasets that users pass: taken as rows by index, or refused by name, with what to pass instead."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any, cast

from arl.api.errors import DatasetError
from arl.data.lazy_rows import Columns, NamedRows, WithColumns
from arl.data.streamed_rows import StreamedRows

log = logging.getLogger(__name__)

MAX_STREAMED = 1_000_000
"""The most rows of a stream that are read into memory."""
_SPLITS = ("DatasetDict", "IterableDatasetDict")
_RESERVED = ("reward", "episode", "")


def examples_of(name: str, given: Any, columns: Columns = MappingProxyType({}), *, may_stream: bool = False) -> Any:
    """The dataset as rows by index, with these columns too. name: what errors call it.

    Taken are sequences of mappings (a list of dicts, a `datasets.Dataset`, rows of `load_dataset`, a torch Dataset of
    dicts), tables of pandas, polars and pyarrow, and streams of `datasets`, which are read to their end; with
    may_stream they become StreamedRows. Raises DatasetError for anything else.
    """
    if may_stream and _is_stream(given):
        given = StreamedRows(name, given, columns)
    rows = given if isinstance(given, StreamedRows) else _taken(name, given)
    first = next(iter(rows.head(1)), None) if isinstance(rows, StreamedRows) else rows[0] if len(rows) else None
    if first is None:
        raise DatasetError(f"{name} is empty; it needs at least one example")
    if not isinstance(first, Mapping):
        kind = type(first).__name__
        example = {"prompt": first} if isinstance(first, str) else "{'question': ..., 'answer': ...}"
        raise DatasetError(f"{name} has {first!r:.80}, a {kind}, in its first row; each row must be a dict: {example}")
    return WithColumns(rows, columns, name) if columns and not isinstance(rows, StreamedRows) else rows


def held_out_of(given: Any, columns: Columns = MappingProxyType({})) -> Any:
    """The held-out examples as rows by index: NamedRows if they are datasets by name, None if there are none.

    Raises DatasetError.
    """
    if given is None:
        return None
    if isinstance(given, NamedRows):
        return given
    if not isinstance(given, Mapping) or type(given).__name__ in _SPLITS:
        return examples_of("eval_dataset", given, columns)
    named = cast("Mapping[Any, Any]", given)
    if not named:
        raise DatasetError("eval_dataset is an empty dict; name at least one dataset in it")
    if _are_columns(named):
        raise DatasetError(_COLUMNS.format(name="eval_dataset"))
    for name in named:
        if not isinstance(name, str) or name in _RESERVED or "/" in name:
            raise DatasetError(
                f"eval_dataset names a dataset {name!r}; a name is a text without '/', and not 'reward' or 'episode', "
                "because it becomes the metric eval/NAME/reward"
            )
    return NamedRows({name: examples_of(f"eval_dataset[{name!r}]", rows, columns) for name, rows in named.items()})


def first_of_each(held_out: Any) -> list[Any]:
    """The first example of each held-out dataset."""
    places = held_out.places.values() if isinstance(held_out, NamedRows) else [range(1)]
    return [held_out[place[0]] for place in places]


_COLUMNS = "{name} is a dict of columns; give its rows: datasets.Dataset.from_dict({name})"


def _taken(name: str, given: Any) -> Any:
    """Rows by index, or DatasetError with what to give instead."""
    kind, library = type(given).__name__, type(given).__module__.partition(".")[0]
    if isinstance(given, Mapping):
        splits = cast("Mapping[Any, Any]", given)
        if _are_columns(splits):
            raise DatasetError(_COLUMNS.format(name=name))
        of = ", ".join(map(repr, splits))
        raise DatasetError(
            f"{name} is a mapping of {of}; give one of its splits, such as {name}[{next(iter(splits), 0)!r}]"
        )
    if isinstance(given, str | bytes):
        raise DatasetError(f"{name} is a text; load what it names: arl.load_dataset({given!r:.80})")
    match library:
        case "pandas" if hasattr(given, "to_dict"):
            return given.to_dict(orient="records")
        case "polars" if hasattr(given, "to_dicts"):
            return given.to_dicts()
        case "pyarrow" if hasattr(given, "to_pylist"):
            return given.to_pylist()
        case _ if hasattr(given, "__len__") and hasattr(given, "__getitem__"):
            return given
        case "datasets" if hasattr(given, "__iter__"):  # runs need a length and an order to return to
            rows = list(islice(given, MAX_STREAMED + 1))
            if len(rows) <= MAX_STREAMED:
                log.warning("%s is a stream; its %d rows were read into memory", name, len(rows))
                return rows
            raise DatasetError(
                f"{name} is a stream of more than {MAX_STREAMED:,} rows, the most that are read into memory; give the "
                f"first of them, {name}.take({MAX_STREAMED}), or load it without streaming=True, which maps its files"
            )
        case _:
            lacking = "rows by index" if hasattr(given, "__len__") else "length"
            advice = (
                f"if it ends, give its rows: list({name})"
                if hasattr(given, "__iter__")
                else "give a list of dicts, a datasets.Dataset, or a name for arl.load_dataset"
            )
            raise DatasetError(f"{name} is a {kind}, which has no {lacking}; {advice}")


def _is_stream(given: Any) -> bool:
    is_plain = not isinstance(given, Mapping) and hasattr(given, "__iter__") and not hasattr(given, "__len__")
    return is_plain and type(given).__module__.partition(".")[0] == "datasets"


def _are_columns(given: Mapping[Any, Any]) -> bool:
    """Whether it has a list of values for each column. A list of rows has mappings, and a split is no list."""
    columns = [value for value in given.values() if isinstance(value, list | tuple) and value]
    return bool(columns) and not any(isinstance(column[0], Mapping) for column in columns)

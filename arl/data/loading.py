"""Datasets by name, from the Hugging Face hub or from files, and datasets that users pass: checked, as rows by index.

`datasets` reads the hub, parquet, Arrow and what it saved. Rows of text files are decoded here, because its readers
change values: JSON's dates become datetimes, whole numbers among others become floats, and lines of CSV are cut.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import orjson

from arl.api.errors import DatasetError
from arl.api.version import install_command
from arl.data.lazy_rows import Chosen, Columns, Joined, JsonlRows, NamedRows, StreamedRows, WithColumns, stamp_of

if TYPE_CHECKING:
    from arl.api.types import Example

TEXT_FORMATS = (".jsonl", ".json", ".csv", ".tsv")
FORMATS = (*TEXT_FORMATS, *(f"{form}.gz" for form in TEXT_FORMATS), ".parquet", ".arrow")


def load_dataset(
    source: str | Path, *, split: str = "train", subset: str | None = None, columns: Sequence[str] | Columns = ()
) -> Sequence[Example]:
    """The rows of one split, each a mapping from column to value. They are read when they are used, where possible.

    source: a file; a directory, whose files with the split in their name are read in order (train.jsonl,
    data/train-00000-of-00002.parquet), or that `datasets.save_to_disk` wrote; or the name of a dataset on the hub.
    Files are JSONL, JSON, CSV and TSV, with .gz too, parquet and Arrow. `~` is the home directory.
    subset: the configuration of a dataset on the hub. Unset: its only one, or the one called main or default.
    columns: columns that each row must have; or columns that rows get, each by the name of another column or by a
    function of the row: {"question": lambda row: row["problem"].strip(), "answer": "solution"}. Raises DatasetError,
    which names the file and the line or row, and says what to do.
    """
    path = Path(source).expanduser()
    made = columns if isinstance(columns, Mapping) else {}
    required = [other for other in made.values() if isinstance(other, str)] if made else [*columns]
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        datasets = _datasets(f"reading {path}")
        with _readable(path):
            rows = datasets.load_from_disk(str(path))
        if isinstance(rows, Mapping):
            if split not in rows:
                raise DatasetError(f"{path} has no split {split!r}; it has {', '.join(map(repr, rows))}")
            rows = cast("Any", rows[split])
    elif path.exists():
        parts = [_file_rows(file, required) for file in _files(path, split)]
        rows = parts[0] if len(parts) == 1 else Joined(parts)
    elif isinstance(source, Path) or _format_of(path) in FORMATS or str(source).startswith((".", "/", "~")):
        raise DatasetError(f"there is no file {source}; give an existing one, or the name of a dataset on the hub")
    else:
        rows = _from_hub(str(source), split, subset)
    if not len(rows):
        raise DatasetError(f"{source} has no rows in split {split!r}; it needs at least one")
    _check_row(source, 1, rows[0], required)
    return WithColumns(rows, made, source) if made else rows


def load_splits(
    source: str | Path,
    held_out_source: str | Path | None = None,
    *,
    num_held_out: int,
    split: str = "test",
    subset: str | None = None,
    columns: Sequence[str] | Columns = (),
) -> tuple[Sequence[Example], Sequence[Example]]:
    """Rows to train on, and at most `num_held_out` rows to evaluate on: the first rows of `split`.

    held_out_source: where that split is, if not in `source`. Without it, a single file gives its last rows, and the
    others are trained. The rest is as in load_dataset. Raises DatasetError.
    """
    rows = load_dataset(source, subset=subset, columns=columns)
    if held_out_source is None and Path(source).expanduser().is_file():
        return without_last(source, rows, num_held_out)
    held_out = load_dataset(held_out_source or source, split=split, subset=subset, columns=columns)
    return rows, Chosen(held_out, range(min(num_held_out, len(held_out))))


def without_last(
    source: str | Path, rows: Sequence[Example], num_held_out: int
) -> tuple[Sequence[Example], Sequence[Example]]:
    """The rows to train on, and the last ones, which are held out. Raises DatasetError if none is left to train on."""
    num_trained = len(rows) - num_held_out
    if num_trained < 1:
        counts = f"{len(rows)} rows, of which num_held_out={num_held_out} are held out"
        raise DatasetError(f"{source} has {counts}; lower it, or name an eval_dataset")
    return Chosen(rows, range(num_trained)), Chosen(rows, range(num_trained, len(rows)))


def _files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(file for file in path.rglob("*") if _format_of(file) in FORMATS)
    chosen = [file for file in found if split in re.split(r"[^A-Za-z]+", file.name.partition(".")[0])]
    if not chosen:
        names = ", ".join(str(file.relative_to(path)) for file in found[:8]) or f"no {', '.join(FORMATS)} file at all"
        raise DatasetError(
            f"{path} has no file for split {split!r}, such as {split}.jsonl or {split}.parquet (it has {names})"
        )
    return chosen


def _format_of(path: Path) -> str:
    """The ending that tells the format, such as .jsonl.gz; the last one, if the format is unknown."""
    name = path.name.lower()
    return next((form for form in FORMATS if name.endswith(form)), path.suffix)


@contextmanager
def _readable(name: object, advice: str = "") -> Iterator[None]:
    """Turns what a reader raises into a DatasetError about `name`."""
    try:
        yield
    except DatasetError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error.__cause__ or error}"
        raise DatasetError(f"{name} cannot be read: {said}{advice}") from error


def _file_rows(file: Path, required: Sequence[str]) -> Sequence[Example]:
    """A file's rows. JSONL is mapped into memory, and so are parquet and Arrow files, by `datasets`; JSON, CSV and what
    gzip compresses are read. Each row of a text file is decoded once and must have the required columns.
    """
    form = _format_of(file)
    if form not in FORMATS:
        raise DatasetError(f"{file} has an unknown format; its name must end in {', '.join(FORMATS)}")
    with _readable(file):
        if form in (".parquet", ".arrow"):
            dataset = _datasets(f"reading {file}").Dataset
            return dataset.from_file(str(file)) if form == ".arrow" else dataset.from_parquet(str(file))
        if form == ".jsonl":
            return _mapped(file, required)
        text = gzip.decompress(file.read_bytes()) if form.endswith(".gz") else file.read_bytes()
        match form.removesuffix(".gz"):
            case ".jsonl":
                lines = enumerate(text.split(b"\n"), start=1)
                rows = [_object(file, number, line, json.loads) for number, line in lines if line.strip()]
            case ".json":
                rows = json.loads(text.decode("utf-8-sig"))
                if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                    raise DatasetError(f"{file} must hold a list of objects, one for each example")
            case _:
                rows = [*_table(file, text.decode("utf-8-sig"), "," if form.startswith(".csv") else "\t")]
    for number, row in enumerate(rows, start=1):
        _check_row(file, number, row, required)
    return rows


def _mapped(file: Path, required: Sequence[str]) -> Sequence[Example]:
    """Numbers beyond 64 bits are not exact in this pass: JsonlRows decodes a row again when it is read."""
    starts, position = array("q"), 0
    with file.open("rb") as lines:
        stamp = stamp_of(lines.fileno())
        for number, line in enumerate(lines, start=1):
            if line.strip():
                starts.append(position)
                _check_row(file, len(starts), _object(file, number, line, orjson.loads), required)
            position += len(line)
    return JsonlRows(file, starts, stamp) if starts else []


def _object(file: Path, number: int, line: bytes, decode: Any) -> dict[str, Any]:
    """The object of a line. decode: a faster one than the standard library's, which takes what that refuses: NaN."""
    try:
        try:
            row = decode(line)
        except ValueError:
            row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{file}, line {number}, is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DatasetError(f"{file}, line {number}, is not an object; each line must be one, such as {{...}}")
    return row


def _table(file: Path, text: str, delimiter: str) -> Iterator[dict[str, Any]]:
    """Values are text, as they stand in the file. The first line names the columns."""
    limit = csv.field_size_limit(sys.maxsize)  # a solution may be longer than the default of 131,072 characters
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        names = reader.fieldnames or []
        if len(set(names)) < len(names) or "" in names:
            raise DatasetError(f"{file} has the columns {', '.join(map(repr, names))}; each needs a name of its own")
        for row in reader:
            if None in row or None in row.values():
                raise DatasetError(
                    f"{file}, line {reader.line_num}, does not have {len(names)} values, one for each column; put "
                    "values that contain the delimiter or a line's end into double quotes"
                )
            yield row
    except csv.Error as error:
        raise DatasetError(f"{file} is not CSV: {error}") from None
    finally:
        csv.field_size_limit(limit)


def _from_hub(name: str, split: str, subset: str | None) -> Sequence[Example]:
    datasets = _datasets(f"loading {name} from the hub")
    where = f"{name} is not a local file or directory, and as a dataset on the hub its split {split!r}"
    with _readable(where, ". Check the name and the network, or give a local copy"):
        if subset is None:
            subsets = datasets.get_dataset_config_names(name)
            known = [one for one in ("main", "default") if one in subsets]
            if not known and len(subsets) > 1:
                raise DatasetError(f"{name} has the subsets {', '.join(subsets)}; choose one")
            subset = [*known, *subsets][0]
        return datasets.load_dataset(name, subset, split=split)


def _datasets(what_for: str) -> Any:
    """The package `datasets`. Raises DatasetError, which says how to install it."""
    try:
        import datasets
    except ImportError:
        raise DatasetError(f"{what_for} needs datasets: {install_command('examples')}") from None
    return datasets


def _check_row(source: str | Path, number: int, row: Example, required: Iterable[str]) -> None:
    if missing := [column for column in required if row.get(column) is None]:
        raise DatasetError(
            f"row {number} of {source} has no {' and no '.join(map(repr, missing))} (it has "
            f"{', '.join(map(repr, row))}); rename its columns, or compute them, with columns=, or choose another "
            "dataset"
        )


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
    is_stream = not isinstance(given, Mapping) and hasattr(given, "__iter__") and not hasattr(given, "__len__")
    if may_stream and is_stream and type(given).__module__.partition(".")[0] == "datasets":
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


def _are_columns(given: Mapping[Any, Any]) -> bool:
    """Whether it has a list of values for each column. A list of rows has mappings, and a split is no list."""
    columns = [value for value in given.values() if isinstance(value, list | tuple) and value]
    return bool(columns) and not any(isinstance(column[0], Mapping) for column in columns)

"""The rows of one file: JSONL, JSON, CSV, parquet or Arrow, compressed with gzip perhaps."""

from __future__ import annotations

import csv
import gzip
import io
import json
import mmap
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from arl.api.errors import DatasetError
from arl.api.installing import install_command
from arl.api.types import Example
from arl.data.lazy_rows import JsonlRows, stamp_of

TEXT_FORMATS = (".jsonl", ".json", ".csv", ".tsv")
FORMATS = (*TEXT_FORMATS, *(f"{form}.gz" for form in TEXT_FORMATS), ".parquet", ".arrow")

Check = Callable[[int, Example], None]
"""Raises DatasetError for a row that cannot be used. The number is the row's, from 1."""


def format_of(path: Path) -> str:
    """The ending that tells the format, such as .jsonl.gz; the last one, if the format is unknown."""
    name = path.name.lower()
    return next((form for form in FORMATS if name.endswith(form)), path.suffix)


def read_rows(file: Path, check: Check) -> Sequence[Example]:
    """A file's rows. JSONL is mapped into memory, and so are parquet and Arrow files, by `datasets`; JSON, CSV and what
    gzip compresses are read.

    Each row of JSONL, JSON and CSV is decoded once and checked; of parquet and Arrow, which have a schema, the first.
    Raises DatasetError, which names the file and the line or row.
    """
    form = format_of(file)
    try:
        match form.removesuffix(".gz"):
            case ".jsonl" if form == ".jsonl":
                return _mapped(file, check)
            case ".jsonl":
                return list(_checked(_decoded(file, _lines(_text(file).split(b"\n"))), check))
            case ".json":
                return _objects(file, check)
            case ".csv" | ".tsv" as kind:
                return list(_checked(_table(file, "," if kind == ".csv" else "\t"), check))
            case ".parquet" | ".arrow":
                return _from_library(file, form, check)
            case _:
                raise DatasetError(f"{file} has an unknown format; its name must end in {', '.join(FORMATS)}")
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise DatasetError(f"{file} cannot be read: {error}") from None


def _mapped(file: Path, check: Check) -> Sequence[Example]:
    with file.open("rb") as opened:
        stamp = stamp_of(opened.fileno())
        if not stamp[0]:
            return []
        starts = array("q")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for _ in _checked(_decoded(file, _mapped_lines(content, starts)), check):
                pass
    return JsonlRows(file, starts, stamp) if starts else []


def _mapped_lines(content: mmap.mmap, starts: array[int]) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers. Appends where each begins."""
    start = number = 0
    while line := content.readline():
        number += 1
        if line.strip():
            starts.append(start)
            yield number, line
        start += len(line)


def _lines(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _decoded(file: Path, lines: Iterable[tuple[int, bytes]]) -> Iterator[dict[str, Any]]:
    """The lines' objects. Numbers beyond 64 bits are not exact: JsonlRows decodes a row again when it is read."""
    is_read_again = format_of(file) == ".jsonl"
    for number, line in lines:
        try:
            row = _quickly(line) if is_read_again else json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{file}, line {number}, is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise DatasetError(f"{file}, line {number}, is not an object; each line must be one, such as {{...}}")
        yield row


def _quickly(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except ValueError:  # perhaps of what only the standard library takes, such as NaN
        return json.loads(line.decode("utf-8-sig"))


def _objects(file: Path, check: Check) -> list[dict[str, Any]]:
    rows = json.loads(_text(file).decode("utf-8-sig"))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DatasetError(f"{file} must hold a list of objects, one for each example")
    return list(_checked(rows, check))


def _table(file: Path, delimiter: str) -> Iterator[dict[str, Any]]:
    """Values are text, as they stand in the file. The first line names the columns."""
    limit = csv.field_size_limit(sys.maxsize)  # a solution may be longer than the default of 131,072 characters
    try:
        reader = csv.reader(io.StringIO(_text(file).decode("utf-8-sig"), newline=""), delimiter=delimiter, strict=True)
        names = next(reader, [])
        if len(set(names)) < len(names) or "" in names:
            raise DatasetError(f"{file} has the columns {', '.join(map(repr, names))}; each needs a name of its own")
        for values in reader:
            if len(values) == len(names):
                yield dict(zip(names, values, strict=True))
            elif values:
                raise DatasetError(
                    f"{file}, line {reader.line_num}, has {len(values)} values for {len(names)} columns; put values "
                    "that contain the delimiter or a line's end into double quotes"
                )
    except csv.Error as error:
        raise DatasetError(f"{file} is not CSV: {error}") from None
    finally:
        csv.field_size_limit(limit)


def _text(file: Path) -> bytes:
    return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()


def _checked(rows: Iterable[dict[str, Any]], check: Check) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows, start=1):
        check(number, row)
        yield row


def _from_library(file: Path, form: str, check: Check) -> Sequence[Example]:
    library: Any = datasets_library(f"reading {file}")
    try:
        rows = library.Dataset.from_file(str(file)) if form == ".arrow" else library.Dataset.from_parquet(str(file))
    except Exception as error:
        raise DatasetError(f"{file} cannot be read: {type(error).__name__}: {error.__cause__ or error}") from error
    if len(rows):
        check(1, rows[0])
    return rows


def datasets_library(what_for: str) -> Any:
    """The package `datasets`. Raises DatasetError, which says how to install it."""
    try:
        import datasets
    except ImportError:
        raise DatasetError(f"{what_for} needs datasets: {install_command('examples')}") from None
    return datasets

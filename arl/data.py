"""Datasets by name: from the Hugging Face hub, or from JSONL, JSON and parquet files. Checks their columns."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arl.api.errors import DatasetError
from arl.api.installing import install_command

if TYPE_CHECKING:
    from arl.api.types import Example

FORMATS = (".jsonl", ".json", ".parquet")


def load_dataset(
    source: str | Path, *, split: str = "train", subset: str | None = None, columns: Sequence[str] = ()
) -> Sequence[Example]:
    """The rows of one split, each a mapping from column to value.

    source: a file; a directory, whose files with the split in their name are read in order (train.jsonl,
    data/train-00000-of-00002.parquet); or the name of a dataset on the hub.
    subset: the configuration of a dataset on the hub. Unset: its only one, or the one called main or default.
    columns: columns that each row must have. Raises DatasetError, which says what to do.
    """
    path = source if isinstance(source, Path) else Path(source)
    if path.exists():
        rows = [row for file in _files(path, split) for row in _read(file)]
    elif source is path or path.suffix in (*FORMATS, ".csv") or str(source).startswith((".", "/", "~")):
        raise DatasetError(f"there is no file {source}; give an existing one, or the name of a dataset on the hub")
    else:
        rows = _from_hub(str(source), split, subset)
    if len(rows) == 0:
        raise DatasetError(f"{source} has no rows in split {split!r}; it needs at least one")
    _check_columns(rows, source, columns)
    return rows


def load_splits(
    source: str | Path,
    held_out_source: str | Path | None = None,
    *,
    num_held_out: int,
    split: str = "test",
    subset: str | None = None,
    columns: Sequence[str] = (),
) -> tuple[Sequence[Example], Sequence[Example]]:
    """Rows to train on, and at most `num_held_out` rows to evaluate on: the first rows of `split`.

    held_out_source: where that split is, if not in `source`. Without it, a single file gives its last rows, and the
    others are trained. The rest is as in load_dataset. Raises DatasetError.
    """
    rows = load_dataset(source, subset=subset, columns=columns)
    if held_out_source is None and Path(source).is_file():
        if len(rows) <= num_held_out:
            counts = f"{len(rows)} rows, of which num_held_out={num_held_out} are held out"
            raise DatasetError(f"{source} has {counts}; lower it, or name an eval_dataset")
        return rows[:-num_held_out], rows[-num_held_out:]
    held_out = load_dataset(held_out_source or source, split=split, subset=subset, columns=columns)
    return rows, [held_out[i] for i in range(min(num_held_out, len(held_out)))]


def _files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.suffix in FORMATS)
    chosen = [file for file in found if split in re.split(r"[^A-Za-z]+", file.stem)]
    if not chosen:
        names = ", ".join(str(file.relative_to(path)) for file in found[:8]) or f"no {', '.join(FORMATS)} file at all"
        raise DatasetError(
            f"{path} has no file for split {split!r}, such as {split}.jsonl or {split}.parquet (it has {names})"
        )
    return chosen


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        match file.suffix:
            case ".jsonl":
                return _read_jsonl(file)
            case ".json":
                rows = json.loads(file.read_text(encoding="utf-8-sig"))
            case ".parquet":
                rows = _read_parquet(file)
            case _:
                raise DatasetError(f"{file} has an unknown format; its name must end in {', '.join(FORMATS)}")
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"{file} cannot be read: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DatasetError(f"{file} must hold a list of objects, one for each example")
    return rows


def _read_jsonl(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{file}, line {number}, is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise DatasetError(f"{file}, line {number}, is not an object; each line must be one, such as {{...}}")
        rows.append(row)
    return rows


def _read_parquet(file: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise DatasetError(f"reading {file} needs pyarrow: {install_command('examples')}") from None
    return parquet.read_table(file).to_pylist()


def _from_hub(name: str, split: str, subset: str | None) -> Sequence[Example]:
    try:
        import datasets
    except ImportError:
        raise DatasetError(f"loading {name} from the hub needs datasets: {install_command('examples')}") from None
    try:
        subset = subset or _main_subset(name, datasets.get_dataset_config_names(name))
        return datasets.load_dataset(name, subset, split=split)  # pyright: ignore[reportReturnType]
    except DatasetError:
        raise
    except Exception as error:
        raise DatasetError(
            f"{name} is not a local file or directory, and as a dataset on the hub its split {split!r} could not be "
            f"loaded: {type(error).__name__}: {error}. Check the name and the network, or give a local copy"
        ) from error


def _main_subset(name: str, subsets: Sequence[str]) -> str:
    chosen = next((subset for subset in ("main", "default") if subset in subsets), None)
    if chosen is None and len(subsets) == 1:
        chosen = subsets[0]
    if chosen is None:
        raise DatasetError(f"{name} has the subsets {', '.join(subsets)}; choose one")
    return chosen


def _check_columns(rows: Sequence[Example], source: str | Path, columns: Sequence[str]) -> None:
    """Rows of a local file may differ; a dataset of the hub has one schema, so its first row is enough."""
    for number, row in enumerate(rows if isinstance(rows, list) else [rows[0]], start=1):
        if missing := [column for column in columns if row.get(column) is None]:
            raise DatasetError(
                f"row {number} of {source} has no {' and no '.join(map(repr, missing))} (it has "
                f"{', '.join(map(repr, row))}); rename its columns, or choose another dataset"
            )

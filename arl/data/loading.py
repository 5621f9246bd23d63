"""Datasets by name: from the Hugging Face hub, or from files and directories. Checks, renames and computes columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from arl.api.errors import DatasetError
from arl.data.file_rows import FORMATS, datasets_library, format_of, read_rows
from arl.data.lazy_rows import Chosen, Columns, Joined, WithColumns

if TYPE_CHECKING:
    from arl.api.types import Example


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
    which says what to do.
    """
    path = Path(source).expanduser()
    made = columns if isinstance(columns, Mapping) else {}
    required = [other for other in made.values() if isinstance(other, str)] if made else [*columns]
    check = partial(_check_row, source, required)
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        rows = _saved_by_library(path, split)
    elif path.exists():
        parts = [read_rows(file, check) for file in _files(path, split)]
        rows = parts[0] if len(parts) == 1 else Joined(parts)
    elif isinstance(source, Path) or format_of(path) in FORMATS or str(source).startswith((".", "/", "~")):
        raise DatasetError(f"there is no file {source}; give an existing one, or the name of a dataset on the hub")
    else:
        rows = _from_hub(str(source), split, subset)
    if len(rows) == 0:
        raise DatasetError(f"{source} has no rows in split {split!r}; it needs at least one")
    check(1, rows[0])
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
        num_trained = len(rows) - num_held_out
        if num_trained < 1:
            counts = f"{len(rows)} rows, of which num_held_out={num_held_out} are held out"
            raise DatasetError(f"{source} has {counts}; lower it, or name an eval_dataset")
        return Chosen(rows, range(num_trained)), Chosen(rows, range(num_trained, len(rows)))
    held_out = load_dataset(held_out_source or source, split=split, subset=subset, columns=columns)
    return rows, Chosen(held_out, range(min(num_held_out, len(held_out))))


def _files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(file for file in path.rglob("*") if format_of(file) in FORMATS)
    chosen = [file for file in found if split in re.split(r"[^A-Za-z]+", file.name.partition(".")[0])]
    if not chosen:
        names = ", ".join(str(file.relative_to(path)) for file in found[:8]) or f"no {', '.join(FORMATS)} file at all"
        raise DatasetError(
            f"{path} has no file for split {split!r}, such as {split}.jsonl or {split}.parquet (it has {names})"
        )
    return chosen


def _from_hub(name: str, split: str, subset: str | None) -> Sequence[Example]:
    datasets = datasets_library(f"loading {name} from the hub")
    try:
        subset = subset or _main_subset(name, datasets.get_dataset_config_names(name))
        return datasets.load_dataset(name, subset, split=split)
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


def _saved_by_library(path: Path, split: str) -> Sequence[Example]:
    datasets = datasets_library(f"reading {path}")
    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:
        raise DatasetError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(saved, Mapping):
        return saved
    if split not in saved:
        raise DatasetError(f"{path} has no split {split!r}; it has {', '.join(map(repr, saved))}")
    return saved[split]


def _check_row(source: str | Path, required: Sequence[str], number: int, row: Example) -> None:
    if missing := [column for column in required if row.get(column) is None]:
        raise DatasetError(
            f"row {number} of {source} has no {' and no '.join(map(repr, missing))} (it has "
            f"{', '.join(map(repr, row))}); rename its columns, or compute them, with columns=, or choose another "
            "dataset"
        )

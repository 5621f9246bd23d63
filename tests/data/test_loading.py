"""Datasets by name: local files in gsm8k's format are read, and what is wrong with one is said."""

import csv
import gzip
import io
import json
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import torch

from arl.api.errors import DatasetError
from arl.data import loading
from arl.data.lazy_rows import JsonlRows
from arl.data.loading import examples_of, held_out_of, load_dataset, load_splits

ROWS = [
    {"question": "Half of 84?", "answer": "84 / 2 = <<84/2=42>>42\n#### 42"},
    {"question": "Ten thousand\u2028more?", "answer": "#### 10,000"},
]
COLUMNS = ("question", "answer")
GOOD_LINE = '{"question": "?", "answer": "4"}\n'


@pytest.fixture(autouse=True)
def _place_of_the_librarys_files(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.utils.tqdm, "_tqdm_disabled", True, raising=False)


def write(path: Path, rows: list[dict[str, str]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    form = path.name.removesuffix(".gz").rpartition(".")[2]
    if form in ("parquet", "arrow"):
        table = pyarrow.Table.from_pylist(rows)
        if form == "parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_stream(path, table.schema) as stream:
                stream.write_table(table)
        return path
    text = io.StringIO(newline="")
    if form == "jsonl":
        text.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    elif form == "json":
        json.dump(rows, text)
    else:
        table = csv.DictWriter(text, list(rows[0]), delimiter="," if form == "csv" else "\t")
        table.writeheader()
        table.writerows(rows)
    content = text.getvalue().encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


FORMS = ("jsonl", "json", "csv", "tsv", "jsonl.gz", "json.gz", "csv.gz", "parquet", "arrow")


@pytest.mark.parametrize("suffix", FORMS)
def test_a_file_is_read_whole_by_index_slice_and_in_order(tmp_path: Path, suffix: str) -> None:
    rows = load_dataset(str(write(tmp_path / f"rows.{suffix}")), columns=COLUMNS)
    assert [*rows] == ROWS
    assert [rows[0], rows[-1]] == ROWS
    with pytest.raises(IndexError):
        rows[2]


def test_a_path_in_the_home_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "rows.jsonl")
    assert [*load_dataset("~/rows.jsonl")] == ROWS


@pytest.mark.parametrize("split", ["train", "test"])
def test_what_save_to_disk_wrote_is_read_with_splits_or_without(tmp_path: Path, split: str) -> None:
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": saved, "train": saved.select([1])}).save_to_disk(tmp_path / "splits")
    assert [*load_dataset(tmp_path / "one", split=split, columns=COLUMNS)] == ROWS
    assert [*load_dataset(tmp_path / "splits", split=split)] == (ROWS if split == "test" else ROWS[1:])
    with pytest.raises(DatasetError, match="has no split 'dev'; it has 'test', 'train'"):
        load_dataset(tmp_path / "splits", split="dev")


def test_lines_are_decoded_when_they_are_read_exactly_and_in_other_processes_too(tmp_path: Path) -> None:
    """Before that, each is decoded once, to find what is wrong; blank lines are no rows."""
    content = b'\xef\xbb\xbf{"n": 123456789012345678901234567890}\n\n  \n{"n": NaN}\r\n{"n": "\\ud800"}\n{"n": 4}'
    (tmp_path / "rows.jsonl").write_bytes(content)
    rows = load_dataset(tmp_path / "rows.jsonl")
    assert isinstance(rows, JsonlRows)
    for read in (rows, pickle.loads(pickle.dumps(rows))):
        assert [read[0], read[2], read[3]] == [{"n": 123456789012345678901234567890}, {"n": "\ud800"}, {"n": 4}]
        assert read[1]["n"] != read[1]["n"]
    assert len(pickle.dumps(rows[1:])) < 1000
    assert [*rows[::-2]] == [rows[3], rows[1]]
    (tmp_path / "rows.jsonl").write_bytes(content.replace(b"4", b"5 "))
    with pytest.raises(DatasetError, match=r"rows\.jsonl has changed since it was opened; start again"):
        pickle.loads(pickle.dumps(rows))


def test_columns_are_renamed_and_computed_when_a_row_is_read(tmp_path: Path) -> None:
    file, computed = write(tmp_path / "rows.jsonl"), list[str]()

    def final(row: Any) -> str:
        computed.append(row["answer"])
        return row["answer"].rpartition("#### ")[2]

    rows = load_dataset(file, columns={"prompt": "question", "answer": final})
    assert len(computed) == 1  # the first, to find out whether it can be computed
    assert rows[1] == {**ROWS[1], "prompt": ROWS[1]["question"], "answer": "10,000"}
    assert len(computed) == 2
    train, held_out = load_splits(file, num_held_out=1, columns={"answer": final})
    assert [train[0]["answer"], held_out[0]["answer"]] == ["42", "10,000"]


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        (
            {"answer": "solution"},
            r"row 1 of .*jsonl has no 'solution' \(it has 'question', 'answer'\); rename",
        ),
        ({"answer": 7}, r"columns\['answer'\] is 7; give the name of another column, or a function"),
        (
            {"answer": lambda row: row["solution"]},
            r"columns\['answer'\] failed on row 1 of .*jsonl: KeyError: 'solution'",
        ),
    ],
)
def test_a_column_that_cannot_be_made_is_an_error_at_the_start(tmp_path: Path, columns: Any, complaint: str) -> None:
    with pytest.raises(DatasetError, match=complaint):
        load_dataset(write(tmp_path / "rows.jsonl"), columns=columns)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_directory_is_read_by_split_in_the_files_order(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "main" / f"train-00001-of-00002.{suffix}", ROWS[1:])
    write(tmp_path / "main" / f"train-00000-of-00002.{suffix}", ROWS[:1])
    write(tmp_path / "main" / f"test-00000-of-00001.{suffix}", ROWS[1:])
    rows = load_dataset(str(tmp_path), split="train", columns=COLUMNS)
    assert [*rows] == [rows[0], rows[1]] == ROWS
    assert [*load_dataset(str(tmp_path), split="test", columns=COLUMNS)] == ROWS[1:]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("rows.jsonl", "", "has no rows in split 'train'"),
        ("rows.jsonl", '{"question": "?", "answer": "4"}\n{"question', r"rows\.jsonl, line 2, is not JSON"),
        ("rows.jsonl", "[1]\n", "line 1, is not an object"),
        (
            "rows.jsonl",
            '{"question": "?", "answer": "4"}\n{"question": "\udcff"}',
            r"rows\.jsonl, line 2, is not JSON: .*can't decode byte 0xff",
        ),
        (
            "rows.jsonl",
            '{"question": "?", "answer": "4"}\n' + "[" * 10**5,
            r"rows\.jsonl, line 2, is not JSON: maximum recursion depth",
        ),
        ("rows.json", "[" * 10**5, r"rows\.json cannot be read: RecursionError: maximum"),
        ("rows.json", '{"a": 1}', "must hold a list of objects"),
        ("rows.parquet", "not parquet", r"rows\.parquet cannot be read"),
        (
            "rows.jsonl",
            '{"question": "?", "answer": "4"}\n{"question": "?", "solution": "4"}',
            r"row 2 of .*jsonl has no 'answer' \(it has 'question', ",
        ),
        ("test.jsonl", "{}", r"no file for split 'train', such as train\.jsonl.*it has test\.jsonl"),
        ("rows.txt", "question,answer\n", r"has an unknown format; its name must end in \.jsonl, \.json, \.csv"),
        ("rows.csv", "question,answer\n", "has no rows in split 'train'"),
        ("rows.csv", "question,question\n", "has the columns 'question', 'question'; each needs a name of its own"),
        ("rows.csv", 'question,answer\n"a\nb",c\nd,e,f\n', r"rows\.csv, line 4, does not have 2 values, one for each"),
        ("rows.csv", 'question,answer\n"a"b,c\n', r"rows\.csv is not CSV: .*expected after"),
        ("rows.jsonl.gz", "{}", r"rows\.jsonl\.gz cannot be read: BadGzipFile: Not a gzipped"),
        ("rows.arrow", "not arrow", r"rows\.arrow cannot be read"),
    ],
)
def test_a_file_that_lacks_something_is_an_error_that_says_where(
    tmp_path: Path, name: str, content: str, complaint: str
) -> None:
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DatasetError, match=complaint):
        load_dataset(str(tmp_path if name == "test.jsonl" else tmp_path / name), columns=COLUMNS)


@pytest.mark.parametrize(("name", "content"), [("rows.jsonl", '{"n": 1}'), ("rows.json", '[{"n": 1}]')])
def test_a_byte_order_mark_is_read_over(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert [*load_dataset(tmp_path / name)] == [{"n": 1}]


def test_rows_are_held_out_of_the_end_of_a_single_file_and_of_another_split_of_a_directory(tmp_path: Path) -> None:
    rows = [{"n": str(n)} for n in range(5)]
    file, other = str(write(tmp_path / "train.jsonl", rows)), str(write(tmp_path / "test.jsonl", rows[::-1]))
    for given, expected in (
        (load_splits(file, num_held_out=2), (rows[:3], rows[3:])),
        (load_splits(str(tmp_path), num_held_out=2), (rows, rows[:2:-1])),
        (load_splits(file, other, num_held_out=9), (rows, rows[::-1])),
    ):
        assert tuple([*part] for part in given) == expected
    with pytest.raises(DatasetError, match="has 5 rows, of which num_held_out=5 are held out; lower it"):
        load_splits(file, num_held_out=5)


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub() -> None:
    for source in ("./rows", "nowhere.csv", "nowhere.jsonl", Path("nowhere")):
        with pytest.raises(DatasetError, match=f"there is no file {re.escape(str(source))};"):
            load_dataset(source)


class FakeHub:
    """Stands in for `datasets`' two calls."""

    def __init__(self, subsets: list[str]) -> None:
        self.subsets = subsets
        self.loaded: list[tuple[str, str, str]] = []

    def get_dataset_config_names(self, name: str) -> list[str]:
        if name == "not/there":
            raise ConnectionError("no route to the hub")
        return self.subsets

    def load_dataset(self, name: str, subset: str, split: str) -> list[dict[str, str]]:
        self.loaded.append((name, subset, split))
        return ROWS


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.setitem(sys.modules, "datasets", hub := FakeHub(["main", "socratic"]))
    return hub


def test_a_name_is_loaded_from_the_hub_with_its_main_subset(hub: FakeHub) -> None:
    assert load_dataset("openai/gsm8k", split="test", columns=COLUMNS) == ROWS
    assert hub.loaded == [("openai/gsm8k", "main", "test")]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("some/maths", "has the subsets algebra, geometry; choose one"),
        ("not/there", r"not a local file.*no route to the hub\. Check the name and the network"),
    ],
)
def test_a_dataset_that_the_hub_cannot_give_is_an_error_that_says_what_to_do(
    hub: FakeHub, name: str, complaint: str
) -> None:
    hub.subsets = ["algebra", "geometry"]
    with pytest.raises(DatasetError, match=complaint):
        load_dataset(name)


# Datasets that are given as objects


class ByIndex(torch.utils.data.Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Streamed(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


@pytest.mark.parametrize(
    "given",
    [
        ROWS,
        tuple(ROWS),
        ByIndex(ROWS),
        datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
        pandas.DataFrame(ROWS),
        pyarrow.Table.from_pylist(ROWS),
    ],
    ids=lambda given: type(given).__name__,
)
def test_rows_are_taken_from_what_has_them(given: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows = examples_of("dataset", given)
    assert [rows[0], rows[1], len(rows)] == [*ROWS, 2]
    is_stream = isinstance(given, datasets.IterableDataset)
    assert ("dataset is a stream; its 2 rows were read into memory" in caplog.text) == is_stream


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["a?"], r"dataset has 'a\?', a str, in its first row; each row must be a dict: \{'prompt': 'a\?'\}"),
        (ByIndex([(1, 2)]), r"dataset has \(1, 2\), a tuple, in its first row; each row must be a dict"),
        (np.zeros((2, 2)), r"dataset has array\(\[0\., 0\.\]\), a ndarray, in its first row"),
        (
            (row for row in ROWS),
            r"dataset is a generator, which has no length; if it ends, give .*: list\(d",
        ),
        (Streamed(), r"dataset is a Streamed, which has no length; if it ends, give its rows: list\(dataset\)"),
        ({"question": ["a?"], "answer": ["b"]}, r"a dict of columns; give its rows: datasets\.Dataset\.from_dict\(d"),
        (datasets.DatasetDict(dev=datasets.Dataset.from_list(ROWS)), r"a mapping of 'dev'; give .* dataset\['dev'\]"),
        ("rows.jsonl", r"dataset is a text; load what it names: arl\.load_dataset\('rows\.jsonl'\)"),
        (7, "dataset is a int, which has no length; give a list of dicts"),
        ([], "dataset is empty; it needs at least one example"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_is_no_dataset_is_called_by_its_type_and_told_what_to_give(given: Any, complaint: str) -> None:
    with pytest.raises(DatasetError, match=complaint):
        examples_of("dataset", given)


def test_a_stream_without_an_end_is_refused_after_the_stated_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MAX_STREAMED", 1000)

    def endless() -> Iterator[dict[str, int]]:
        while True:
            yield {"n": 1}

    stream = datasets.IterableDataset.from_generator(endless)
    with pytest.raises(DatasetError, match=r"more than 1,000 rows.*dataset\.take\(1000\)"):
        examples_of("dataset", stream)


def test_held_out_datasets_may_have_names() -> None:
    assert held_out_of(None) is None
    assert held_out_of(ROWS) == ROWS
    named = held_out_of({"gsm8k": ROWS, "aime": ROWS[:1]})
    assert [*named] == [*ROWS, ROWS[0]]
    assert named.places == {"gsm8k": range(2), "aime": range(2, 3)}
    for given, complaint in (
        ({}, "eval_dataset is an empty dict"),
        ({"a/b": ROWS}, "eval_dataset names a dataset 'a/b'; a name is a text without '/'"),
        ({"gsm8k": []}, r"eval_dataset\['gsm8k'\] is empty"),
        ({"question": ["a?"]}, "eval_dataset is a dict of columns"),
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), "eval_dataset is a mapping of 'train'"),
    ):
        with pytest.raises(DatasetError, match=complaint):
            held_out_of(given)

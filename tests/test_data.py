"""Datasets by name: local files in gsm8k's format are read, and what is wrong with one is said."""

import json
import re
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from arl.api.errors import DatasetError
from arl.data import load_dataset, load_splits

ROWS = [
    {"question": "Half of 84?", "answer": "84 / 2 = <<84/2=42>>42\n#### 42"},
    {"question": "Ten thousand\u2028more?", "answer": "#### 10,000"},
]
COLUMNS = ("question", "answer")


def write(path: Path, rows: list[dict[str, str]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_a_file_is_read_whole(tmp_path: Path, suffix: str) -> None:
    assert load_dataset(str(write(tmp_path / f"rows.{suffix}")), columns=COLUMNS) == ROWS


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_directory_is_read_by_split_in_the_files_order(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "main" / f"train-00001-of-00002.{suffix}", ROWS[1:])
    write(tmp_path / "main" / f"train-00000-of-00002.{suffix}", ROWS[:1])
    write(tmp_path / "main" / f"test-00000-of-00001.{suffix}", ROWS[1:])
    assert load_dataset(str(tmp_path), split="train", columns=COLUMNS) == ROWS
    assert load_dataset(str(tmp_path), split="test", columns=COLUMNS) == ROWS[1:]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("rows.jsonl", "", "has no rows in split 'train'"),
        ("rows.jsonl", '{"question": "?", "answer": "4"}\n{"question', r"rows\.jsonl, line 2, is not JSON"),
        ("rows.jsonl", "[1]\n", "line 1, is not an object"),
        ("rows.jsonl", '{}\n{"question": "\udcff"}', r"rows\.jsonl, line 2, is not JSON: .*can't decode byte 0xff"),
        ("rows.jsonl", "{}\n" + "[" * 10**5, r"rows\.jsonl, line 2, is not JSON: maximum recursion depth"),
        ("rows.json", "[" * 10**5, r"rows\.json cannot be read: maximum recursion depth"),
        ("rows.json", '{"a": 1}', "must hold a list of objects"),
        ("rows.parquet", "not parquet", r"rows\.parquet cannot be read"),
        (
            "rows.jsonl",
            '{"question": "?", "answer": "4"}\n{"question": "?", "solution": "4"}',
            r"row 2 of .*jsonl has no 'answer' \(it has 'question', ",
        ),
        ("test.jsonl", "{}", r"no file for split 'train', such as train\.jsonl.*it has test\.jsonl"),
        ("rows.csv", "question,answer\n", r"has an unknown format; its name must end in \.jsonl, \.json, \.parquet"),
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
    assert load_dataset(tmp_path / name) == [{"n": 1}]


def test_rows_are_held_out_of_the_end_of_a_single_file_and_of_another_split_of_a_directory(tmp_path: Path) -> None:
    rows = [{"n": str(n)} for n in range(5)]
    file, other = str(write(tmp_path / "train.jsonl", rows)), str(write(tmp_path / "test.jsonl", rows[::-1]))
    assert load_splits(file, num_held_out=2) == (rows[:3], rows[3:])
    assert load_splits(str(tmp_path), num_held_out=2) == (rows, rows[:2:-1])
    assert load_splits(file, other, num_held_out=9) == (rows, rows[::-1])
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

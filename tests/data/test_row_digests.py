"""The fingerprint of a dataset: the same in every process, and another one for other rows."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from arl.api.errors import CheckpointError
from arl.data.lazy_rows import fingerprint
from arl.rollout.ledger import ExampleLedger

ROWS = [{"question": f"{n} + 1 = ?", "answer": n + 1, "tags": {"b": [n, None], "a": 0.5}} for n in range(1000)]


def test_it_is_the_same_in_another_process_whatever_the_hashes_of_texts_are() -> None:
    script = "import test_row_digests as t; print(sorted(t.fingerprint(t.ROWS).items()))"
    paths = {"PYTHONPATH": f"{Path(__file__).parents[2]}:{Path(__file__).parent}", "PYTHONHASHSEED": "7"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=paths)
    assert run.stdout == f"{sorted(fingerprint(ROWS).items())}\n"


def test_it_reads_few_rows_of_many_among_them_the_first_and_the_last() -> None:
    read: list[int] = []

    class Watched:
        def __len__(self) -> int:
            return 10**7

        def __getitem__(self, index: int) -> dict[str, int]:
            read.append(index)
            return {"n": index}

    fingerprint(Watched())
    assert len({*read}) == 64
    assert {0, 10**7 - 1} <= {*read}


@pytest.mark.parametrize("number", [1, 2, 63, 64, 65])
def test_every_row_of_a_small_dataset_counts(number: int) -> None:
    rows = ROWS[:number]
    for changed in range(0, min(number, 64), 9):
        others = [{**row, "answer": -1} if n == changed else row for n, row in enumerate(rows)]
        assert number > 64 or fingerprint(others) != fingerprint(rows)


def test_rows_of_datasets_and_numpy_are_those_of_a_list() -> None:
    rows = [{"n": n, "row": [1.5, 2.0]} for n in range(5)]
    assert fingerprint(datasets.Dataset.from_list(rows)) == fingerprint(rows)
    assert fingerprint([{"n": np.int64(n), "row": np.array([1.5, 2.0])} for n in range(5)]) == fingerprint(rows)


def test_what_is_drawn_when_a_row_is_read_does_not_count() -> None:
    class Drawn:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"n": index, "noise": random.random() if index == 1 else 0.0, "thing": object()}

    assert fingerprint(Drawn()).keys() == {"0", "2"}


def test_a_run_does_not_go_on_with_other_rows_and_names_the_example() -> None:
    source = ExampleLedger(1000, shuffle=True, seed=0, fingerprint=fingerprint(ROWS))
    state = source.state_dict()
    ExampleLedger(1000, shuffle=True, seed=0).load_state_dict(state)
    before = {name: value for name, value in state.items() if name != "fingerprint"}
    other = fingerprint([*ROWS[:999], {"question": "?"}])
    ExampleLedger(1000, shuffle=True, seed=0, fingerprint=other).load_state_dict(before)
    with pytest.raises(CheckpointError, match="has changed since the checkpoint was written: example 999 is another"):
        ExampleLedger(1000, shuffle=True, seed=0, fingerprint=other).load_state_dict(state)

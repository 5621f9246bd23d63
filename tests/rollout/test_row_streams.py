"""Streams of `datasets`: every row once an epoch, in order, and a resumed run goes on at the exact row."""

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from players import as_json

from arl.api.errors import CheckpointError, DatasetError
from arl.api.workflow import StreamChunk
from arl.data.lazy_rows import CHUNK, StreamedRows
from arl.data.loading import examples_of
from arl.rollout.ledger import ExampleLedger, GroupOutcome, Issue, StreamLedger

NUM_ROWS = 200
"""Over three files, of which one is shorter than a chunk."""


def write(directory: Path, change: Callable[[int], int] = lambda n: n) -> list[str]:
    files: list[str] = []
    for name, numbers in (("a", range(90)), ("b", range(90, 120)), ("c", range(120, NUM_ROWS))):
        file = directory / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"number": change(n)}) + "\n" for n in numbers))
        files.append(str(file))
    return files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write(tmp_path_factory.mktemp("rows"))


def streamed(files: list[str]) -> Any:
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True)


class Counted(StreamedRows):
    num_read = 0

    def read(self, cursor: Any) -> StreamChunk:
        self.num_read += 1
        return super().read(cursor)


async def here(call: Callable[[], Any]) -> Any:
    return call()


def of(stream: Any) -> StreamLedger:
    return StreamLedger(Counted("dataset", stream), here)


def issued(ledger: StreamLedger, number: int) -> list[Issue]:
    async def main() -> list[Issue]:
        found: list[Issue] = []
        for _ in range(number):
            await ledger.ready()
            found.append(ledger.issue())
        return found

    return asyncio.run(main())


def test_an_epoch_has_every_row_in_order_and_ends_where_the_stream_ends(files: list[str]) -> None:
    filtered = streamed(files).filter(lambda row: row["number"] % 2 == 0).map(lambda row: {"twice": 2 * row["number"]})
    found = issued(of(filtered), NUM_ROWS + 10)
    half = NUM_ROWS // 2
    assert [issue.example_id for issue in found] == [(n // half, n % half) for n in range(NUM_ROWS + 10)]
    assert [issue.group_id for issue in found] == list(range(NUM_ROWS + 10))
    assert all(
        issue.example == {"number": 2 * row, "twice": 4 * row} for issue in found for _, row in [issue.example_id]
    )


@given(seed=st.integers(0, 2**32))
@settings(max_examples=12, deadline=None)
def test_wherever_it_stops_it_hands_out_what_was_pending_again_and_then_the_next_row(seed: int) -> None:
    """Over an in-memory stream, for speed: the cursors are those of `datasets`."""
    rng = random.Random(seed)
    stream = datasets.Dataset.from_dict({"number": list(range(150))}).to_iterable_dataset(num_shards=3)
    ledger, running, ended = of(stream), list[Issue](), dict[tuple[int, int], int]()
    for _ in range(4):
        for issue in issued(ledger, rng.randint(0, 120)):
            assert issue.example == {"number": issue.example_id[1]}
            running.append(issue)
        rng.shuffle(running)
        for issue in (done := running[rng.randint(0, 60) :]):
            assert issue.example_id not in ended
            ended[issue.example_id] = issue.group_id
            ledger.settle(issue.example_id, GroupOutcome.TRAINED)
        running = [issue for issue in running if issue not in done]
        kept = {issue.group_id for issue in running if rng.random() < 0.3}
        again = of(stream)
        again.load_state_dict(as_json(ledger.state_dict()), kept)
        owed = sorted((issue for issue in running if issue.group_id not in kept), key=lambda issue: issue.group_id)
        assert issued(again, len(owed)) == owed
        chunks = {(epoch, row // CHUNK) for epoch, row in (issue.example_id for issue in running)}
        reader = again._stream
        assert isinstance(reader, Counted)
        assert reader.num_read <= len(chunks) + 1, "rows that nobody waits for were read again"
        ledger = again
    everything = sorted([*ended, *(issue.example_id for issue in running)])
    assert everything == [(n // 150, n % 150) for n in range(len(everything))], "a row was lost"


def test_a_stream_that_has_changed_since_the_checkpoint_is_named(files: list[str], tmp_path: Path) -> None:
    ledger = of(streamed(files))
    issued(ledger, 70)
    copy = of(streamed(write(tmp_path, lambda n: n + (n == CHUNK))))
    copy.load_state_dict(as_json(ledger.state_dict()))
    with pytest.raises(CheckpointError, match=f"the stream has changed .*: row {CHUNK}, or"):
        issued(copy, 1)


def test_a_checkpoint_of_a_stream_and_one_of_rows_by_index_do_not_continue_each_other(files: list[str]) -> None:
    rows, stream = ExampleLedger(5, shuffle=True, seed=0), of(streamed(files))
    with pytest.raises(CheckpointError, match="written with rows by index, and this run has a stream"):
        stream.load_state_dict(as_json(rows.state_dict()))
    with pytest.raises(CheckpointError, match="written with a stream, and this run has rows by index"):
        rows.load_state_dict(as_json(stream.state_dict()))


def test_a_shuffled_stream_is_refused_since_its_buffer_would_be_lost(files: list[str]) -> None:
    shuffled = streamed(files).shuffle(seed=1, buffer_size=10).map(lambda row: row)
    with pytest.raises(DatasetError, match="dataset is a stream that was shuffled: what is in its buffer"):
        examples_of("dataset", shuffled, may_stream=True)


def test_an_empty_stream_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("{}\n")
    stream = streamed([str(tmp_path / "none.jsonl")]).filter(lambda row: False)
    with pytest.raises(DatasetError, match="dataset is empty"):
        examples_of("dataset", stream, may_stream=True)


def test_a_long_stream_leaves_few_cursors_and_a_small_checkpoint(files: list[str]) -> None:
    ledger = of(datasets.Dataset.from_dict({"number": list(range(9000))}).to_iterable_dataset())
    for issue in issued(ledger, 8000):
        ledger.settle(issue.example_id, GroupOutcome.TRAINED)
    state = as_json(ledger.state_dict())
    assert len(state["places"]) == 1
    assert len(json.dumps(state)) < 2000

"""What a JSONL or a parquet file of a million rows costs: CPU time to open it, memory, the time to read a row, and the
ledger of its examples: until the first is handed out, for each, and in a checkpoint.

    python benchmarks/datasets_in_memory.py [--rows N]

Each file is opened in a process of its own. `held` is the memory that the process cannot give back to the system, as it
can give back what is mapped from a file. The checkpoint is that of half an epoch, of which 1,000 examples are pending
and 30 % of the others were rejected. The same parquet file is also read as a stream.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NUM_READ = 10_000


def write(directory: Path, num_rows: int) -> list[Path]:
    import pyarrow
    import pyarrow.parquet

    rng, lines, table = random.Random(0), directory / "rows.jsonl", directory / "rows.parquet"
    schema = pyarrow.schema([("question", pyarrow.string()), ("answer", pyarrow.string())])
    with lines.open("w") as file, pyarrow.parquet.ParquetWriter(table, schema) as writer:
        for first in range(0, num_rows, 100_000):
            rows = [row(i, rng) for i in range(first, min(first + 100_000, num_rows))]
            file.writelines(json.dumps(one) + "\n" for one in rows)
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
    return [lines, table]


def row(i: int, rng: random.Random) -> dict[str, str]:
    a, b = rng.randrange(10**6), rng.randrange(10**6)
    question = f"Row {i}: Ada has {a} marbles and finds {b} more in a box. How many marbles does she have in the end? "
    return {
        "question": question + "Think step by step.",
        "answer": f"{a} + {b} = <<{a}+{b}={a + b}>>{a + b}\n#### {a + b}",
    }


def held_mb() -> float:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) / 1e3
    return 0.0


def measure(file: Path) -> None:
    import datasets  # noqa: F401 (not counted: what importing it costs)

    from arl import load_dataset

    before, began = held_mb(), time.process_time()
    rows = load_dataset(file, columns=("question", "answer"))
    opened, held = time.process_time() - began, held_mb() - before
    rng, began = random.Random(0), time.process_time()
    for _ in range(NUM_READ):
        rows[rng.randrange(len(rows))]
    row_us = (time.process_time() - began) / NUM_READ * 1e6
    size = file.stat().st_size / 1e6
    costs = f"opened in {opened:.2f} s, held {held:.0f} MB, a row {row_us:.0f} us"
    print(f"{file.name}: {len(rows)} rows, {size:.0f} MB; {costs}")
    measure_ledger(rows)


def measure_ledger(rows: Sequence[Any]) -> None:
    from arl.data.lazy_rows import fingerprint
    from arl.rollout.ledger import ExampleLedger, GroupOutcome

    before, began = held_mb(), time.perf_counter()
    ledger = ExampleLedger(len(rows), shuffle=True, seed=0, fingerprint=fingerprint(rows))
    ledger.prepare()
    rows[ledger.issue().example_id[1]]
    first, held = time.perf_counter() - began, held_mb() - before
    half, began = len(rows) // 2, time.perf_counter()
    for _ in range(NUM_READ):
        rows[ledger.issue().example_id[1]]
    issue_us = (time.perf_counter() - began) / NUM_READ * 1e6
    for example_id in ledger.pending[:-1000]:
        ledger.settle(example_id, GroupOutcome.TRAINED)
    rng = random.Random(0)
    for _ in range(half - NUM_READ):
        is_rejected = rng.random() < 0.3  # a share that takes room: marks are compressed
        ledger.settle(ledger.issue().example_id, GroupOutcome.REJECTED if is_rejected else GroupOutcome.TRAINED)
    began = time.perf_counter()
    state = ledger.state_dict()
    copied = time.perf_counter() - began
    text = json.dumps(state, default=lambda value: value())
    written = time.perf_counter() - began
    began = time.perf_counter()
    ExampleLedger(len(rows), shuffle=True, seed=0).load_state_dict(json.loads(text))
    loaded = time.perf_counter() - began
    print(
        f"    first example after {first:.2f} s, held {held:.0f} MB, then {issue_us:.0f} us each; checkpoint "
        f"{len(text) / 1e6:.2f} MB, the loop stands still for {copied * 1e3:.1f} ms, packed in {written:.2f} s, "
        f"loaded in {loaded:.2f} s"
    )


def measure_stream(file: Path) -> None:
    import asyncio

    import datasets

    from arl.data.lazy_rows import StreamedRows
    from arl.rollout.ledger import GroupOutcome, StreamLedger

    async def read(call: Any) -> Any:
        return call()

    async def hand_out(ledger: StreamLedger, number: int) -> None:
        for _ in range(number):
            await ledger.ready()
            ledger.issue()

    before, began = held_mb(), time.perf_counter()
    stream = datasets.load_dataset("parquet", data_files=str(file), split="train", streaming=True)
    ledger = StreamLedger(StreamedRows("dataset", stream), read)
    asyncio.run(hand_out(ledger, 1))
    first, began = time.perf_counter() - began, time.perf_counter()
    asyncio.run(hand_out(ledger, 100_000))
    row_us, size = (time.perf_counter() - began) / 1e5 * 1e6, held_mb() - before
    for example_id in ledger.pending[:-1000]:
        ledger.settle(example_id, GroupOutcome.TRAINED)
    text = json.dumps(ledger.state_dict(), default=lambda value: value())
    again, began = StreamLedger(StreamedRows("dataset", stream), read), time.perf_counter()
    again.load_state_dict(json.loads(text))
    asyncio.run(hand_out(again, 1001))
    resumed = time.perf_counter() - began
    print(
        f"{file.name} as a stream: first row after {first:.2f} s, then {row_us:.0f} us each, held {size:.0f} MB; goes "
        f"on after {resumed:.2f} s, with a checkpoint of {len(text) / 1e6:.2f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stream", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        measure_stream(options.measure) if options.stream else measure(options.measure)
        return
    with tempfile.TemporaryDirectory() as directory:
        for file in write(Path(directory), options.rows):
            again = [2] if file.suffix == ".parquet" else []
            for _ in (1, *again):  # the second time, datasets has the file in its cache
                subprocess.run([sys.executable, __file__, "--measure", str(file)], check=True)
            if again:
                subprocess.run([sys.executable, __file__, "--measure", str(file), "--stream"], check=True)


if __name__ == "__main__":
    main()

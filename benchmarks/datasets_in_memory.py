"""What a JSONL or a parquet file of a million rows costs: CPU time to open it, memory, and the time to read a row.

    python benchmarks/datasets_in_memory.py [--rows N]

Each file is opened in a process of its own. `held` is the memory that the process cannot give back to the system, as it
can give back what is mapped from a file.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_READ = 10_000


def write(directory: Path, num_rows: int) -> list[Path]:
    import pyarrow.json
    import pyarrow.parquet

    rng, lines, table = random.Random(0), directory / "rows.jsonl", directory / "rows.parquet"
    with lines.open("w") as file:
        for i in range(num_rows):
            a, b = rng.randrange(10**6), rng.randrange(10**6)
            question = (
                f"Row {i}: Ada has {a} marbles and finds {b} more in a box. How many marbles does she have in the end? "
            )
            question += "Think step by step."
            file.write(
                json.dumps({"question": question, "answer": f"{a} + {b} = <<{a}+{b}={a + b}>>{a + b}\n#### {a + b}"})
                + "\n"
            )
    pyarrow.parquet.write_table(pyarrow.json.read_json(lines), table)
    return [lines, table]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        measure(options.measure)
        return
    with tempfile.TemporaryDirectory() as directory:
        for file in write(Path(directory), options.rows):
            again = [2] if file.suffix == ".parquet" else []
            for _ in (1, *again):  # the second time, datasets has the file in its cache
                subprocess.run([sys.executable, __file__, "--measure", str(file)], check=True)


if __name__ == "__main__":
    main()

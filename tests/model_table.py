"""Writes the table of docs/models.md: what arl does with a tiny model of each family. It takes some ten minutes.

    python tests/model_table.py [FAMILY ...]     with families: prints their rows, and writes nothing

Each measure of a family is a process of its own, which may crash or hang.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import TimeoutError as LateError
from pathlib import Path
from typing import Any

from decoder_families import FAMILIES, SEEING
from measured_families import MEASURES, short
from nursery import Nursery

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- The table of `make models` -->\n", "<!-- The end of the table -->\n"
HEADER = "| family | train: way, nats | gradient | LoRA | serve: way, nats | publish |\n|---|---|---|---|---|---|\n"
_LIMIT_S = 120
_WRONG = 1e-3
"""From this many nats on, what was accepted is wrong, and stands out in the table."""

Row = Mapping[str, dict[str, Any]]
"""Measure -> the fields of a Measured, or the sentence of what was "refused" or "failed"."""


def measured(family: str, nursery: Nursery) -> Row:
    """One measure after another."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in MEASURES:
            result, log = Path(scratch, f"{name}.json"), Path(scratch, name)
            arguments = {"name": name, "family": family, "directory": Path(scratch, "model"), "result": result}
            process = nursery.fork("measured_families:measure", arguments, log)
            try:
                code = process.code.result(timeout=_LIMIT_S)
                said = f"it ended with {code}: {log.read_text()[-200:]}"
            except LateError:
                os.kill(process.pid, signal.SIGKILL)
                said = f"it takes longer than {_LIMIT_S} s"
            found[name] = json.loads(result.read_text()) if result.exists() else {"failed": said}
    return found


def cell(measured: Mapping[str, Any], others: Iterable[Mapping[str, Any]] = ()) -> str:
    """A few words. others: what says the same sentence as one of these needs no words."""
    for verdict in ("refused", "failed"):
        if (said := measured.get(verdict)) is not None:
            words = re.sub(r"/\S+?:? |\|", "", said).split()[:12]
            return verdict if any(said == other.get(verdict) for other in others) else f"{verdict}: {' '.join(words)}"
    error = short(measured["nats"])
    parts = [measured["way"].partition(" ")[0], f"**{error}**" if measured["nats"] > _WRONG else error]
    return " ".join(filter(None, parts)) + (f" ({measured['note']})" if measured["note"] else "")


def line(family: str, row: Row) -> str:
    train, lora, serve, publish = (row[name] for name in MEASURES)
    gradient = short(train["gradient"]) if "gradient" in train else ""
    cells = cell(train), gradient, cell(lora, [train]), cell(serve), cell(publish, [train, serve])
    return f"| `{family}` | {' | '.join(cells)} |\n"


def summary(rows: Iterable[Row]) -> str:
    rows = list(rows)

    def count(name: str, holds: Callable[[float], bool]) -> int:
        """Of the larger error, of logprobs or of the gradient."""
        found = (row[name] for row in rows if "nats" in row[name])
        return sum(holds(max(measured["nats"], measured["gradient"] or 0.0)) for measured in found)

    def within(most: float) -> Callable[[float], bool]:
        return lambda error: error <= most

    def each(number: Callable[[str], int]) -> str:
        return ", ".join(f"{name} {number(name)}" for name in MEASURES)

    times = [(row["train"]["trial_s"], row["train"]["load_s"]) for row in rows if "nats" in row["train"]]
    trials, loads = zip(*times, strict=True)
    return f"""
Of {len(rows)} families:

- trained within 1e-4 nats and a relative error of the gradient of 1e-4: {count("train", within(1e-4))} (of 3e-5:
  {count("train", within(3e-5))}); with LoRA: {count("LoRA", within(1e-4))}; published: {count("publish", within(1e-4))}
- served within 1e-3 nats: {count("serve", within(1e-3))}
- accepted, and wrong by more than {_WRONG}: {each(lambda name: count(name, lambda error: error > _WRONG))}
- refused: {each(lambda name: sum("refused" in row[name] for row in rows))}
- failed: {each(lambda name: sum("failed" in row[name] for row in rows))}
- the trainer's trial takes {statistics.median(trials):.2f} s of one core, at most {max(trials):.2f} s, where loading
  without it takes {statistics.median(loads):.2f} s
"""


def table_of(page: str) -> str:
    return page.partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    chosen = parser.parse_args().families
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as cache, Nursery(["measured_families"], XDG_CACHE_HOME=cache) as nursery:
        for family in chosen or (*FAMILIES, *SEEING):
            rows[family] = measured(family, nursery)
            print(line(family, rows[family]), end="", flush=True)
            for name, found in rows[family].items():
                if verdict := found.get("failed") or found.get("refused"):
                    print(f"    {name}: {verdict}", flush=True)
    print(summary(rows.values()))
    if not chosen:
        page = PAGE.read_text()
        table = HEADER + "".join(line(family, row) for family, row in rows.items()) + summary(rows.values())
        PAGE.write_text(page.replace(BEGIN + table_of(page) + END, BEGIN + table + END))


if __name__ == "__main__":
    main()

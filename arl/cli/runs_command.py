"""`arl runs`: the runs in a folder, how each ended or that it trains, and how far it is."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from arl.observe.view.top import plain
from arl.run.script import exit_with
from arl.training.run_dir import ENVIRONMENT, LOCK, starts_of
from arl.training.run_result import END, disk_use, how_it_ended, size_text

ABOUT = (
    "List the runs in a folder, the last started last: the state of each (running, finished, interrupted, failed, "
    "stalled or killed), the steps trained, the last held-out reward or loss, and why a run failed. It disturbs no run."
)
_METRICS, _EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"
_SIGNS = frozenset((LOCK, END, ENVIRONMENT, _METRICS))
"""A directory with one of these files is a run's."""
_DEPTH = 4
"""How far below the folder runs are looked for."""
_TAIL_BYTES = 1 << 16
_SCAN_S = 2.0
"""Longest time to add up the sizes of one run's files."""
_AT_ONCE = 8
_WIDE = 1000
_SAY_WHY = ("failed", "stalled", "killed")
_MOST_OF_WHY = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """One run, as its files tell of it; None is what they do not tell."""

    run_dir: str
    state: str
    """RunEnd.how, or `unknown` if the files do not say how the run ended."""
    why: str
    version: int | None
    """Batches trained."""
    steps: int | None
    """Batches to train."""
    reward: float | str | None
    """The reward of the last evaluation."""
    loss: float | str | None
    """The loss of the last evaluation of fine-tuning, which has no rewards."""
    evaluated_version: int | None
    """The version that was evaluated last."""
    model: str | None
    began: str | None
    """The last start, ISO 8601 in UTC."""
    num_bytes: int

    @classmethod
    def of(cls, run_dir: Path) -> ListedRun:
        end, starts = how_it_ended(run_dir), starts_of(run_dir)
        start = starts[-1] if starts else {}
        step, evaluation = (_last_row(run_dir / name) for name in (_METRICS, _EVALUATIONS))
        return cls(
            run_dir=str(run_dir),
            state=end.how if end else "unknown",
            why=end.why if end else "",
            version=step.get("version", end.version if end else None),
            steps=start.get("steps", end.steps if end else None),
            reward=evaluation.get("reward"),
            loss=None if "reward" in evaluation else evaluation.get("loss"),
            evaluated_version=evaluation.get("version"),
            model=start.get("model"),
            began=start.get("began") or (end.began if end else None) or None,
            num_bytes=sum(disk_use(run_dir, _SCAN_S).values()),
        )


def main(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl runs`. Ends the process with code 2 if there is no such folder."""
    parser = argparse.ArgumentParser(prog="arl runs", description=ABOUT, allow_abbrev=False)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="where to look (default: runs)")
    parser.add_argument("--json", action="store_true", help="print a list of objects, with why each run ended")
    options = parser.parse_args(argv)
    if not options.folder.is_dir():
        exit_with(2, f"error: {options.folder} is not a directory; name the folder that has the runs' directories")
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        found = list(threads.map(ListedRun.of, _run_dirs(options.folder)))
    runs = sorted(found, key=lambda run: (run.began or "", run.run_dir))
    if options.json:
        sys.stdout.write(json.dumps([asdict(run) for run in runs], indent=2) + "\n")
    elif not runs:
        sys.stdout.write(f"there are no runs in {options.folder}\n")
    else:
        console = Console()
        console.width = console.width if console.is_terminal else _WIDE
        with console.capture() as drawn:
            console.print(_table(runs))
        sys.stdout.write("\n".join(line.rstrip() for line in drawn.get().splitlines()) + "\n")


def _run_dirs(folder: Path) -> Iterator[Path]:
    """The runs in the folder, or the folder itself; not what lies within a run."""
    for directory, inner, names in os.walk(folder):
        depth = len(Path(directory).relative_to(folder).parts)
        if _SIGNS.intersection(names):
            inner.clear()
            yield Path(directory)
        elif depth >= _DEPTH:
            inner.clear()
        else:
            inner[:] = [name for name in inner if not name.startswith(".")]


def _last_row(path: Path) -> dict[str, Any]:
    """The last whole row of a JSONL file, of which only the end is read; empty without one."""
    try:
        with path.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:  # a kill cut it short
            continue
        if isinstance(row, dict):
            return row
    return {}


def _table(runs: Sequence[ListedRun]) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("run", "state", "steps", "held-out", "model", "started", "size", "why"):
        is_number, is_name = column in ("steps", "held-out", "size"), column in ("run", "model", "why")
        table.add_column(column, justify="right" if is_number else "left", no_wrap=not is_name, overflow="fold")
    for run in runs:
        trained = str(run.version or 0)
        held_out, value = "-", run.loss if run.reward is None else run.reward
        if value is not None:  # a number that is not finite is a text in the files
            rounded = value if isinstance(value, str) else f"{value:.3f}"
            held_out = f"{'loss ' * (run.reward is None)}{rounded} at {run.evaluated_version}"
        why = run.why.partition("\n")[0] if run.state in _SAY_WHY else ""
        cells = (
            run.run_dir,
            run.state,
            trained if run.steps is None else f"{trained} of {run.steps}",
            held_out,
            run.model or "-",
            "-" if run.began is None else run.began[:16].replace("T", " "),
            size_text(run.num_bytes),
            why if len(why) <= _MOST_OF_WHY else f"{why[: _MOST_OF_WHY - 1]}…",
        )
        table.add_row(*(Text(plain(cell)) for cell in cells))
    return table

"""`arl trace`: what happened when in a run, as a file for Perfetto and chrome://tracing."""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from arl.api.errors import ArlError, RunFileError
from arl.cli import exit_with
from arl.commands.viewing import the_run
from arl.eventlog.run_record import read_run
from arl.view.episode_table import EpisodeTable
from arl.view.trace import write_trace

ABOUT = (
    "Write a timeline of the trainer, the servers and the episodes of a run to a file for https://ui.perfetto.dev or "
    "chrome://tracing. The run may still train."
)


def main(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl trace`. Ends the process with code 2 if there is no run, or no event log."""
    parser = argparse.ArgumentParser(prog="arl trace", description=ABOUT, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory")
    parser.add_argument(
        "-o",
        dest="file",
        type=Path,
        metavar="FILE",
        help="the file to write (default: NAME.trace.json.gz in this directory)",
    )
    parser.add_argument(
        "--from",
        dest="first",
        type=float,
        default=0.0,
        metavar="S",
        help="where to begin, in seconds since the run began",
    )
    parser.add_argument("--to", dest="last", type=float, default=float("inf"), metavar="S", help="where to end")
    options = parser.parse_args(argv)
    if not 0 <= options.first < options.last:
        parser.error(f"--from is {options.first:g} and --to is {options.last:g}; give 0 <= --from < --to")
    try:
        run_dir = the_run(options.run_dir)
        sys.stdout.write(_trace(run_dir, options.file or _usual_file(run_dir), (options.first, options.last)) + "\n")
    except ArlError as error:
        exit_with(2, f"error: {error}")


def _usual_file(run_dir: Path) -> Path:
    return Path(f"{run_dir.resolve().name}.trace.json.gz")


def _trace(run_dir: Path, path: Path, window: tuple[float, float]) -> str:
    """A sentence about what was written. Raises RunFileError."""
    try:
        run = read_run(run_dir)
    except OSError as error:
        raise RunFileError(f"{error.filename or run_dir} cannot be read: {error.strerror or error}") from error
    if not run.system and not run.episodes:
        reasons = "; ".join(run.problems) or "log.events: null turns it off"
        raise RunFileError(f"{run_dir} has no event log, so there is no timeline to write: {reasons}")
    table = EpisodeTable(run)
    table.refresh()
    try:
        with _opened(path) as file:
            counts = write_trace(run, table, file, window)
    except OSError as error:
        raise RunFileError(f"{path} cannot be written: {error.strerror or error}") from error
    late = [f"{counts['late']} more are left out, because they came too late in the log"] if counts["late"] else []
    said = f"{path}: {counts['episodes']} episodes, {counts['calls']} turns, tools and rewards"
    return "\n".join([said, *late, *run.problems])


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """`path` gets its content at the end of the block. Packed if its name ends in .gz."""
    aside = path.with_name(path.name + ".tmp")
    try:
        with gzip.open(aside, "wb", compresslevel=5) if path.suffix == ".gz" else aside.open("wb") as file:
            yield file  # pyright: ignore[reportReturnType] - a GzipFile is one
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)

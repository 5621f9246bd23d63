"""`arl top`: a run in a terminal, live."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from arl.api.errors import ArlError
from arl.cli.viewing import ending_of, the_run
from arl.observe.view.top import top
from arl.observe.view.viewed_run import ViewedRun, is_run
from arl.run.script import exit_with

EVERY_S = 0.5
_HEALTH_EVERY_S = 5.0
"""How often failures, findings and the disk are looked at, which takes longer."""
ABOUT = "Show a run in this terminal, live or ended, and change nothing. Ctrl-C or q ends it."


def main(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl top`. Ends the process with code 2 if --once finds no run."""
    parser = argparse.ArgumentParser(prog="arl top", description=ABOUT, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory; it need not exist yet")
    parser.add_argument("--once", action="store_true", help="print one frame and end, as without a terminal")
    options = parser.parse_args(argv)
    sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue] - a TextIOWrapper has it
    console = Console()
    try:
        if options.once or not console.is_terminal:
            asyncio.run(_print(the_run(options.run_dir), console))
        else:
            asyncio.run(_watch(options.run_dir, console))
    except ArlError as error:
        exit_with(2, f"error: {error}")


async def _print(run_dir: Path, console: Console) -> None:
    """All of it: as many lines as there are."""
    watched = _WatchedRun(run_dir)
    await watched.viewed.load()
    console.print(await watched.now())
    watched.viewed.close()


async def _watch(run_dir: Path, console: Console) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with _keys(loop, stop), Live(console=console, screen=True, auto_refresh=False) as live:
        while not any(map(is_run, _runs_in(run_dir))):
            live.update(Text(f"There is no run in {run_dir} yet. q ends this."), refresh=True)
            await _pause(stop)
            if stop.is_set():
                return
        watched = _WatchedRun(the_run(run_dir))
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(watched.viewed.follow())
            while not stop.is_set():
                await watched.viewed.read_on()
                live.update(await watched.now(is_cut=True), refresh=True)
                await _pause(stop)
            following.cancel()
        watched.viewed.close()


def _runs_in(path: Path) -> list[Path]:
    """The directory itself, and those in it."""
    return [path, *(path.iterdir() if path.is_dir() else ())]


async def _pause(stop: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), EVERY_S)


class _WatchedRun:
    """A run, and its health of a moment ago."""

    def __init__(self, run_dir: Path) -> None:
        self.viewed = ViewedRun(run_dir, ending_of)
        self._health: dict[str, Any] = {}
        self._looked_at = -_HEALTH_EVERY_S

    async def now(self, *, is_cut: bool = False) -> Table:
        return await self.viewed.ask(self._now, is_cut)

    def _now(self, is_cut: bool) -> Table:
        if time.monotonic() - self._looked_at >= _HEALTH_EVERY_S:
            self._health = self.viewed.health()
            self._looked_at = time.monotonic()
        ending = ending_of(self.viewed.run_dir)
        return top(self.viewed, ending, self._health, self.viewed.now(), is_cut=is_cut)


@contextmanager
def _keys(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> Iterator[None]:
    """q ends it. Without a terminal to type at, Ctrl-C alone does."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)

    def pressed() -> None:
        typed = os.read(sys.stdin.fileno(), 64)
        if not typed or b"q" in typed.lower():
            stop.set()

    try:
        tty.setcbreak(sys.stdin)
        loop.add_reader(sys.stdin, pressed)
        yield
    finally:
        loop.remove_reader(sys.stdin)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)

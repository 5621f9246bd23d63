"""`arl view` and `arl top`: show runs, live or ended, in a browser and in a terminal."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
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

from arl.api.errors import ArlError, ConfigError, RunFileError
from arl.observe.view.top import top
from arl.observe.view.view_server import ViewServer
from arl.observe.view.viewed_run import Ending, ViewedRun, is_run, run_dirs
from arl.run.script import exit_with
from arl.runtime.http.server import add_key_option, answer_until, bind, check_address, key_of
from arl.training.run_dir import starts_of
from arl.training.run_result import how_it_ended

PORT = 8722
KEY_VARIABLE = "ARL_VIEW_KEY"
ABOUT = (
    "Show runs in a browser: rewards, episodes token by token, what waited for what, what failed. Follows runs that "
    "still train, and changes nothing. Ctrl-C ends it."
)


def main(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl view`. Ends the process with code 2 if there is no run, or no such address."""
    parser = argparse.ArgumentParser(prog="arl view", description=ABOUT, allow_abbrev=False)
    run_dir = "a run's directory, or one that holds several"
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help=run_dir)
    host = "the address to listen on (default: 127.0.0.1); another needs a key"
    parser.add_argument("--host", default="127.0.0.1", help=host)
    port = f"the port to listen on; 0: any free one (default: {PORT}, or any free one if it is taken)"
    parser.add_argument("--port", type=int, help=port)
    add_key_option(parser, KEY_VARIABLE)
    options = parser.parse_args(argv)
    try:
        asyncio.run(_serve(options))
    except ArlError as error:
        exit_with(2, f"error: {error}")


async def _serve(options: argparse.Namespace) -> None:
    key = key_of(options.api_key_file, KEY_VARIABLE)
    check_address(options.host, options.port or 0, key)
    runs = [ViewedRun(run_dir, ending_of) for run_dir in run_dirs(options.run_dirs)]
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def ready(port: int) -> str:
        host = f"[{options.host}]" if ":" in options.host else options.host
        return f"http://{host}:{port}/" + ("#key=KEY, with your key for KEY" if key else "")

    await answer_until(stop, ViewServer(runs, key).app, listening_socket(options.host, options.port), ready)
    sys.stdout.write("\n")


def listening_socket(host: str, port: int | None) -> socket.socket:
    """port: None for the usual one, or any free one if that is taken. Raises ConfigError."""
    if port is None:
        with suppress(ConfigError):
            return bind(host, PORT)
    return bind(host, port or 0)


def the_run(path: Path) -> Path:
    """The run that is there. Raises RunFileError if there is none, or more than one."""
    found = run_dirs([path])
    if len(found) > 1:
        raise RunFileError(f"{path} holds {len(found)} runs; name one of {', '.join(map(str, found[:10]))}")
    return found[0]


def ending_of(run_dir: Path) -> Ending | None:
    """How the run in run_dir ended, or that it goes on; None if nothing says so."""
    end = how_it_ended(run_dir)
    if end is None:
        return None
    return Ending(end.how, end.why, end.what_next, end.steps or (starts_of(run_dir) or [{}])[-1].get("steps"))


# arl top

EVERY_S = 0.5
_HEALTH_EVERY_S = 5.0
"""How often failures, findings and the disk are looked at, which takes longer."""
TOP_ABOUT = "Show a run in this terminal, live or ended, and change nothing. Ctrl-C or q ends it."


def watch(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl top`. Ends the process with code 2 if --once finds no run."""
    parser = argparse.ArgumentParser(prog="arl top", description=TOP_ABOUT, allow_abbrev=False)
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
    console.print(await watched.viewed.ask(watched.shown))
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
                live.update(await watched.viewed.ask(watched.shown, True), refresh=True)
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

    def shown(self, is_cut: bool = False) -> Table:
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

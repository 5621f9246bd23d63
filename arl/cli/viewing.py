"""`arl view`: show runs, live or ended, in a browser."""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from arl.api.errors import ArlError, ConfigError, RunFileError
from arl.observe.view.view_server import ViewServer
from arl.observe.view.viewed_run import Ending, ViewedRun, run_dirs
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

"""`arl servers`: show the servers of a run, add some, remove some, while it trains."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from arl.api.errors import ConfigError, RunFileError, ServerError
from arl.cli.command import amount, counted, errors_told
from arl.engine.client.servers_file import (
    DRAIN_S,
    SERVERS,
    STATE,
    EditedServers,
    NamedServer,
    ServerRow,
    ServersState,
    base_url,
    edited,
    read_state,
)
from arl.observe.view.top import plain
from arl.run.script import exit_with
from arl.training.run_result import how_it_ended

ABOUT = (
    "Show, add and remove the inference servers of a run, while it trains or before it starts again. For "
    "engine.kind=sglang: servers that arl starts itself are only shown."
)
_LOOK_EVERY_S = 0.2
_DEAF_S = 30.0
"""A run that has not read its servers file for this long will not do so."""
_WIDE = 1000
_SHOWN = 300
"""Characters of a reason in the table."""


def main(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl servers`. Ends the process with code 1 if a server could not join or leave, and 2
    if there is no such run, or it cannot be told which servers to have."""
    parser = argparse.ArgumentParser(prog="arl servers", description=ABOUT, allow_abbrev=False)
    actions = parser.add_subparsers(title="actions", required=True)

    def action(name: str, act: Callable[[argparse.Namespace], None], about: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        made.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory")
        made.set_defaults(act=act)
        if act is not _list:
            made.add_argument("addresses", nargs="+", metavar="ADDRESS", help="a base URL, as http://10.0.0.5:30000")
            made.add_argument(
                "--no-wait", action="store_true", help="do not wait until the servers have joined or left"
            )
        return made

    action("list", _list, "show each server: its state, version, requests, and why it does not serve")
    add = action("add", _add, "let servers join as soon as they hold the current weights")
    add.add_argument("--mirror", metavar="URL", help="their mirror, with weights.transport=delta")
    remove = action("remove", _remove, "let servers end what they run, and leave; they are left running")
    about = f"requests that run longer than this are continued on other servers (default: {DRAIN_S:g} s)"
    remove.add_argument("--drain-timeout", type=amount, default=DRAIN_S, metavar="S", help=about)
    options = parser.parse_args(argv)
    with errors_told("not waited for: the run still does what its servers file says"):
        options.act(options)


def _list(options: argparse.Namespace) -> None:
    trains = _trains_now(options.run_dir)
    state = read_state(options.run_dir)
    if state is None:
        raise RunFileError(_not_connected(options.run_dir))
    moment = datetime.fromtimestamp(state.at, UTC).strftime("at %Y-%m-%d %H:%M:%S UTC")
    how = trains or f"no run trains here now; {moment} these were its servers"
    console = Console()
    console.width = console.width if console.is_terminal else _WIDE  # a server is a line, for programs
    console.print(f"{options.run_dir}: {how}", markup=False, highlight=False, soft_wrap=True)
    console.print(_table(state, time.time() if trains else state.at))
    num_serving, num = sum(row.state == "serving" for row in state.servers), counted(len(state.servers), "server")
    lines = [f"{num_serving} of {num} serve; engine.min_servers is {state.min_servers}"]
    for line in lines + [f"{state.file} is not followed: {state.problem}"] * bool(state.problem):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(state: ServersState, now: float) -> Table:
    table = Table(box=None, header_style="bold")
    for name in ("server", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("for", "version", "requests"):
        table.add_column(name, justify="right", no_wrap=True)
    has_mirrors = any(row.mirror for row in state.servers)
    if has_mirrors:
        table.add_column("mirror", no_wrap=True)
    table.add_column("why", overflow="fold")
    for row in sorted(state.servers, key=lambda row: row.state == "serving"):
        version = "" if row.version is None else str(row.version)
        mirror = [row.mirror or ""] if has_mirrors else []
        seconds, requests = max(0.0, now - row.since), str(row.requests) if row.version is not None else ""
        minutes = f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
        passed = f"{seconds:.0f} s" if seconds < 100 else minutes
        cells = (row.address, row.state, passed, version, requests, *mirror, row.why or row.stays)
        table.add_row(*(Text(plain(cell)[:_SHOWN]) for cell in cells))
    return table


def _add(options: argparse.Namespace) -> None:
    addresses = [base_url(address, "the command") for address in dict.fromkeys(options.addresses)]
    mirror = base_url(options.mirror, "--mirror") if options.mirror else None

    def add(edit: EditedServers) -> None:
        for address in addresses:
            before = edit.named.get(address)
            edit.put(NamedServer(address=address, mirror=mirror or (before.mirror if before else None)))

    since_ns = _edit(options, add)
    if since_ns and _failed(options.run_dir, addresses, since_ns, _has_joined):
        what = f"it stays in {options.run_dir / SERVERS}, and the run tries again; `arl servers remove` takes it out"
        exit_with(1, what)


def _remove(options: argparse.Namespace) -> None:
    addresses = [base_url(address, "the command") for address in dict.fromkeys(options.addresses)]

    def remove(edit: EditedServers) -> None:
        serving = [address for address, one in edit.named.items() if one.drain_s is None]
        if unknown := [address for address in addresses if address not in serving]:
            raise ServerError(f"{unknown[0]} is not one of the servers: {', '.join(serving)}")
        if not set(serving) - set(addresses):
            raise ServerError(f"{addresses[-1]} is the last server; add another before removing it")
        for address in addresses:
            edit.put(NamedServer(address=address, mirror=edit.named[address].mirror, drain_s=options.drain_timeout))

    since_ns = _edit(options, remove)
    if since_ns and (refused := _failed(options.run_dir, addresses, since_ns, _has_left)):
        with edited(options.run_dir, _note()) as edit:  # else it would leave as soon as it may
            for address in refused:
                if (one := edit.named.get(address)) is not None and one.drain_s is not None:
                    edit.put(NamedServer(address=address, mirror=one.mirror))
        raise SystemExit(1)


def _not_connected(run_dir: Path) -> str:
    """Why a run has no state of its servers."""
    if of_policies := sorted(str(state.parent) for state in run_dir.glob(f"policies/*/{STATE}")):
        return (
            f"the run in {run_dir} has several policies, each with servers of its own; give the directory of one: "
            + ", ".join(of_policies)
        )
    return f"the run in {run_dir} has not connected to its servers yet: there is no {run_dir / STATE}"


def _edit(options: argparse.Namespace, change: Callable[[EditedServers], None]) -> int | None:
    """Change the servers file. Returns when it was written, if the command is to wait for a run to follow it."""
    run_dir: Path = options.run_dir
    trains, state = _trains_now(run_dir), read_state(run_dir)
    if state is None:
        raise ConfigError(_not_connected(run_dir))
    if state.file is None:
        raise ConfigError(
            f"arl itself starts the servers of the run in {run_dir}, and engine.num_servers says how many; only "
            "those of engine.kind=sglang join and leave"
        )
    if state.is_users:
        raise ConfigError(
            f"the servers of the run in {run_dir} are those that engine.servers_file names: edit {state.file}"
        )
    with edited(run_dir, _note()) as edit:
        before = sum(one.drain_s is None for one in edit.named.values())
        change(edit)
        left = sum(one.drain_s is None for one in edit.named.values())  # but for those that are to leave
        if left < min(before, state.min_servers):
            raise ServerError(f"engine.min_servers is {state.min_servers}, and {counted(left, 'server')} would be left")
    if trains and not options.no_wait:
        return edit.written_ns
    follows = f"the run follows it; see `arl servers list {run_dir}`"
    how = follows if trains else "no run trains now: the next start has these"
    sys.stdout.write(f"{run_dir / SERVERS} names {counted(left, 'server')}; {how}\n")
    return None


def _note() -> str:
    """Says of an edit when, and by whom. It also makes the text another: what failed is tried again at once."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return f"at {now} by process {os.getpid()} on {socket.gethostname()}"


_Outcome = tuple[bool, str] | None
"""Whether it is what was asked for, and a sentence about it; None as long as it is under way."""


def _has_joined(row: ServerRow | None) -> _Outcome:
    if row is None or row.state in ("joining", "draining"):
        return None
    if row.state in ("absent", "fenced"):
        return False, f"does not serve: {row.why}"
    return True, f"serves, with weights of version {row.version}"


def _has_left(row: ServerRow | None) -> _Outcome:
    if row is None:
        return True, "has left"
    return (False, f"stays: {row.stays}") if row.stays else None


def _failed(
    run_dir: Path, addresses: Sequence[str], since_ns: int, outcome_of: Callable[[ServerRow | None], _Outcome]
) -> list[str]:
    """Wait until the run has done for each server what the file says since then, print the outcomes; which have failed.

    Raises ServerError if the run ends meanwhile, or does not read the file.
    """
    waiting, failed, began = list(addresses), list[str](), time.monotonic()
    while waiting:
        time.sleep(_LOOK_EVERY_S)
        if not _trains_now(run_dir):
            raise ServerError(f"the run ended meanwhile; its next start reads {run_dir / SERVERS}")
        state = read_state(run_dir)
        if state is None or state.settled_ns < since_ns:
            if time.monotonic() - began > _DEAF_S:
                problem = f": {state.problem}" if state and state.problem else ""
                raise ServerError(f"the run has not followed {run_dir / SERVERS} for {_DEAF_S:g} s{problem}")
            continue
        for address in [*waiting]:
            if (outcome := outcome_of(state.row(address))) is not None:
                waiting.remove(address)
                failed += [address] * (not outcome[0])
                (sys.stdout if outcome[0] else sys.stderr).write(f"{address} {plain(outcome[1])}\n")
    return failed


def _trains_now(run_dir: Path) -> str:
    """The process that trains there; empty if there is none. Raises ConfigError if there is no run."""
    end = how_it_ended(run_dir)
    if end is None and not (run_dir / STATE).exists():
        raise ConfigError(f"there is no run in {run_dir}: it has none of the files that a run writes")
    return end.why if end is not None and end.how == "running" else ""

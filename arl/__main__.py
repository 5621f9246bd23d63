"""The command `arl`: tries and scores agents, starts and shows runs and their servers, lists the algorithms."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from arl.api.presets import PRESETS


def main(argv: Sequence[str] | None = None) -> None:
    """argv: without the program's name; sys.argv[1:] when None. A wrong command ends the process with code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    match arguments[:1]:
        case ["try"]:
            from arl.commands.trial import main as try_

            try_(arguments[1:])
        case ["eval"]:
            from arl.commands.scoring import main as eval_

            eval_(arguments[1:])
        case ["view"]:
            from arl.commands.viewing import main as view

            view(arguments[1:])
        case ["top"]:
            from arl.commands.terminal import main as top

            top(arguments[1:])
        case ["trace"]:
            from arl.commands.tracing import main as trace

            trace(arguments[1:])
        case ["plan"]:
            from arl.commands.planning import main as plan

            plan(arguments[1:])
        case ["servers"]:
            from arl.commands.servers_command import main as servers

            servers(arguments[1:])
        case ["launch"]:
            from arl.commands.launching import main as launch

            launch(arguments[1:])
        case _:
            _parser().parse_args(arguments)
            _print_algorithms()


def _parser() -> argparse.ArgumentParser:
    """What `arl --help` shows. The commands that load torch have parsers of their own."""
    parser = argparse.ArgumentParser(
        prog="arl", description="Try, score and watch agents, plan runs, and list the algorithms."
    )
    commands = parser.add_subparsers(title="commands", required=True)
    commands.add_parser("try", help="run episodes of a script's agent without training, and print them")
    commands.add_parser("eval", help="score its model on held-out examples: rewards and pass@k")
    commands.add_parser("view", help="show runs in a browser: every episode, token and second")
    commands.add_parser("top", help="show a run in this terminal, live")
    commands.add_parser("trace", help="write a timeline of a run to a file for Perfetto")
    commands.add_parser("servers", help="show the servers of a run, add some, remove some, while it trains")
    commands.add_parser("launch", help="start a run on many machines: Slurm, Kubernetes or ssh")
    commands.add_parser("plan", help="predict a run with other servers, ranks and settings, before they are rented")
    commands.add_parser("algorithms", help="list the algorithms")
    return parser


def _print_algorithms() -> None:
    table = Table(box=None, header_style="bold")
    table.add_column("name", no_wrap=True)
    table.add_column("paper", no_wrap=True)
    table.add_column("what it is for")
    for name, about in PRESETS.items():
        table.add_row(name, about.paper, about.about)
    Console().print(table)


if __name__ == "__main__":
    main()

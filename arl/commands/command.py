"""How both commands begin and end: options, then the script's own settings, then episodes, then an exit code."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from arl.api.config import Config
from arl.api.errors import ConfigError
from arl.cli import exit_with, load_config, run
from arl.commands.experiment_file import load_experiment, users_traceback
from arl.experiment import Experiment

HELP = ("-h", "--help")
EPILOG = (
    "Other flags are FILE's own settings, as when it is run (--model, --config, ...); `%(prog)s FILE --help` lists "
    "them. One that is called like an option here is set in its --config file. Nothing is trained; a run that trains "
    "in the same run_dir is not disturbed. Exit code: 0; 1 where every episode failed; 2 for a wrong setting."
)

Main = Callable[[Experiment[Any], Config], Awaitable[None]]


def parser_of(name: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"arl {name}",
        usage="%(prog)s FILE [options] [FILE's settings]",
        description=description,
        epilog=EPILOG,
        allow_abbrev=False,
        add_help=False,
    )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's options, and the flags that are left for the script. `--help` prints both's and exits."""
    if not set(argv) & set(HELP):
        return parser.parse_known_args(argv)
    parser.print_help()
    rest = [argument for argument in argv if argument not in HELP]
    if rest:
        sys.stdout.write("\n")
        options, _ = parser.parse_known_args(rest)
        load_config(_loaded(options).config, ["--help"])
    raise SystemExit(0)


def run_command(main: Main, options: argparse.Namespace, settings: Sequence[str], *, if_stopped: str) -> None:
    """Load the script's experiment and settings, and run `main` on them; ends as a script does (see arl.cli.run)."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that cannot show a character is no reason to stop
        sys.stdout.reconfigure(errors="backslashreplace")
    experiment = _loaded(options)
    run(lambda config: main(experiment, config), experiment.config, settings, if_stopped=if_stopped)


def _loaded(options: argparse.Namespace) -> Experiment[Any]:
    try:
        return load_experiment(options.file)
    except ConfigError as error:
        cause = f"{users_traceback(error.__cause__)}" if error.__cause__ else ""
        exit_with(2, f"{cause}error: {error}")


def positive(text: str) -> int:
    """An option's whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

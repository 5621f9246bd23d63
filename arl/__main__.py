"""The command `arl`: tries and scores agents, starts and shows runs and their servers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from arl.api.version import __version__

_COMMANDS = {
    "try": ("trial", "run episodes of a script's agent without training, and print them"),
    "eval": ("scoring", "score its model on held-out examples: rewards and pass@k"),
    "doctor": ("doctor_command", "compare what its servers sample with what is trained, and name the cause of a gap"),
    "serve": ("command:serve", "train a script's model with programs elsewhere, which open episodes over HTTP"),
    "export": ("offline:export", "write a run's checkpoint as a Hugging Face directory, or push it to the hub"),
    "runs": ("runs_command", "list the runs in a folder: how each ended or that it trains, steps, rewards"),
    "rewards": ("auditing", "rewards audit: score a run's answers with another function; where do they disagree?"),
    "view": ("viewing", "show runs in a browser: every episode and token"),
    "top": ("viewing:watch", "show a run in this terminal, live"),
    "replay": ("offline:replay_steps", "train steps of a recorded run again: are they the same, and what if?"),
    "finetune": ("offline:finetune", "fine-tune a model on chats or preferences, or as a reward model"),
    "servers": ("servers_command", "show the servers of a run, add some, remove some, while it trains"),
    "plan": ("planning", "predict a run with other servers, ranks and settings, before they are rented"),
}
"""Command -> the module in arl.cli whose `main`, or named function, takes the arguments; and what `arl --help` says."""


def main(argv: Sequence[str] | None = None) -> None:
    """argv: without the program's name; sys.argv[1:] when None. A wrong command ends the process with code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _COMMANDS:
        module, _, function = _COMMANDS[arguments[0]][0].partition(":")
        getattr(import_module(f"arl.cli.{module}"), function or "main")(arguments[1:])
    else:
        _parser().parse_args(arguments)


def _parser() -> argparse.ArgumentParser:
    """The parser of `arl --help`. Each command has its own parser."""
    parser = argparse.ArgumentParser(
        prog="arl", description="Try, score and watch agents, plan runs, and fine-tune models."
    )
    parser.add_argument("--version", action="version", version=f"arl {__version__}")
    commands = parser.add_subparsers(title="commands", required=True)
    for name, (_, about) in _COMMANDS.items():
        commands.add_parser(name, help=about)
    return parser


if __name__ == "__main__":
    main()

"""The command `arl`.

arl algorithms          # every preset, its paper and its purpose
arl algorithms dapo     # the settings of one preset, as a section of a --config file
arl try FILE            # run episodes of a script's agent, and read them
arl eval FILE           # score its model on held-out examples
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from arl.api.algorithm import AlgorithmConfig, preset
from arl.api.presets import PRESETS, unknown_preset

DEFAULT = str(AlgorithmConfig.model_fields["preset"].default)


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
        case _:
            _print_algorithms(_parser().parse_args(arguments).name)


def _parser() -> argparse.ArgumentParser:
    """What `arl --help` shows. The commands that load torch have parsers of their own."""
    parser = argparse.ArgumentParser(prog="arl", description="Try and score agents, and list the algorithms.")
    commands = parser.add_subparsers(title="commands", required=True)
    commands.add_parser("try", help="run episodes of a script's agent without training, and print them")
    commands.add_parser("eval", help="score its model on held-out examples: rewards and pass@k")
    algorithms = commands.add_parser("algorithms", help="list the algorithms, or print the settings of one")
    algorithms.add_argument("name", nargs="?", help="a name in the list; unset: print the list")
    return parser


def _print_algorithms(name: str | None) -> None:
    if name is None:
        Console().print(_table())
    elif name in PRESETS:
        sys.stdout.write(as_yaml(name))
    else:
        sys.stderr.write(f"error: {unknown_preset(name)}\n")
        raise SystemExit(2)


def as_yaml(name: str) -> str:
    """Every setting of the preset, as the section `algorithm` of a --config file, with notes of other defaults."""
    about = PRESETS[name]
    head = f"# {about.about}\n# Paper: {about.paper}. Behind a # stands the value of {DEFAULT}.\n"
    return head + "\n".join(_lines({"algorithm": _settings(name)}, {"algorithm": _settings(DEFAULT)})) + "\n"


def _table() -> Table:
    table = Table(box=None, header_style="bold", caption="arl algorithms NAME prints the settings of one")
    table.add_column("name", no_wrap=True)
    table.add_column("paper", no_wrap=True)
    table.add_column("what it is for")
    for name, about in PRESETS.items():
        table.add_row(name, about.paper, about.about)
    return table


def _settings(name: str) -> dict[str, Any]:
    settings = preset(name).model_dump(mode="json")
    if settings["correction"]["kind"] == "none":
        # A correction of kind none with bounds would be refused as a contradiction.
        settings["correction"] = {key: settings["correction"][key] for key in ("kind", "level", "veto")}
    return settings


def _lines(settings: Mapping[str, Any], default: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in settings.items():
        other = default.get(name, value)
        is_noted = name != "preset" and not isinstance(other, dict) and value != other
        note = f"  # {_scalar(other)}" if is_noted else ""
        if isinstance(value, dict):
            yield f"{indent}{name}:{note}"
            yield from _lines(value, other if isinstance(other, dict) else {}, indent + "  ")
        else:
            yield f"{indent}{name}: {_scalar(value)}{note}"


def _scalar(value: object) -> str:
    return yaml.safe_dump(value).splitlines()[0]


if __name__ == "__main__":
    main()

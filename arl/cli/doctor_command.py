"""`arl doctor`: whether servers and trainer agree, and if not, why and how to mend it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from arl.api.errors import ArlError
from arl.api.settings.run import Config
from arl.cli.command import OTHER_FLAGS, parse, parser_of, run_command
from arl.run.experiment import Experiment
from arl.run.inputs import given_tasks

if TYPE_CHECKING:
    from arl.observe.doctor.causes import Checked, Diagnosis

ABOUT = (
    "Start the servers and the train engine of the experiment in FILE as a run would, send fixed prompts through both, "
    "and compare them in an order that isolates causes. Prints what differs, why, and what to change."
)
EPILOG = (
    f"{OTHER_FLAGS}It trains no run and keeps nothing. Servers that arl did not start keep their weights, unless you "
    "pass --publish. Exit code: 0 if sampler and trainer agree; 1 if they do not; 2 for a wrong setting."
)
_WIDE = 160
_COLOURS = {"ok": "green", "fault": "bold red", "skipped": "dim"}


def main(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl doctor`."""
    parser = parser_of("doctor", ABOUT, EPILOG)
    parser.add_argument("file", metavar="FILE", type=Path, nargs="?", help="a script with an `experiment`")
    parser.add_argument(
        "--template",
        metavar="MODEL",
        help="examine a model's chat template instead, with its tokenizer alone: what it shows, and what is trained",
    )
    parser.add_argument("--template-options", metavar="JSON", type=json.loads, help="options of the chat template")
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    parser.add_argument(
        "--publish",
        action="store_true",
        help="also load the doctor's weights into servers that arl did not start, then their own again",
    )
    parser.add_argument("--task", metavar="NAME", help="of a script with several tasks: whose prompts to send")
    options, settings = parse(parser, argv)
    if options.template is not None:
        if options.file or settings:
            parser.error(f"--template takes no FILE and no settings: {' '.join([str(options.file or ''), *settings])}")
        _examine_template(options.template, options.template_options, as_json=options.json)
        return
    if options.file is None:
        parser.error("name a FILE with an `experiment`, or a model with --template")
    found: list[Diagnosis] = []

    async def examine(experiment: Experiment[Any], config: Config) -> None:
        found.append(await _diagnosed(experiment, config, options))

    run_command(examine, options, settings, if_stopped="the servers' weights were given back")
    diagnosis = found[0]
    if options.json:
        sys.stdout.write(json.dumps(diagnosis.json_object(), indent=2) + "\n")
    else:
        console = Console(highlight=False)
        console.width = console.width if console.is_terminal else _WIDE
        console.print(_table(diagnosis))
        console.print(Text(diagnosis.verdict, style="green" if diagnosis.is_healthy else "bold red"))
    if not diagnosis.is_healthy:
        raise SystemExit(1)


async def _diagnosed(experiment: Experiment[Any], config: Config, options: argparse.Namespace) -> Diagnosis:
    from arl.run.doctor import opened_examination

    sys.stderr.write(f"preparing {options.file}\n")
    config, setup = await experiment.aprepare(config)
    tasks = given_tasks(setup)
    task = tasks.alone(options.task).only if options.task else tasks.tasks[0]  # all have the same model
    sys.stderr.write(f"loading {config.model} for engine.kind={config.engine.kind} and the train engine\n")

    def say(one: Checked) -> None:
        sys.stderr.write(f"{one.check}: {one.outcome}\n")

    async with opened_examination(config, task.workflow, publish=options.publish, on_check=say) as examination:
        return await examination.run()


def _examine_template(model: str, options: Any, *, as_json: bool) -> None:
    from transformers import AutoTokenizer

    from arl.run.template_report import report_of

    try:
        report = report_of(AutoTokenizer.from_pretrained(model), options)
    except (ArlError, OSError, ValueError) as error:
        raise SystemExit(f"arl doctor: {error}") from error
    if as_json:
        sys.stdout.write(json.dumps({"facts": report.facts, "checks": report.checks, "tokens": report.tokens}) + "\n")
    else:
        console = Console(highlight=False)
        table = Table(box=None, pad_edge=False, show_header=False)
        for name, answer in {**report.facts, **report.checks}.items():
            is_flaw = answer.startswith("no") and name in report.checks
            table.add_row(
                name, Text(answer, style=_COLOURS["fault" if is_flaw else "ok"] if name in report.checks else "")
            )
        console.print(table)
        for tokens in report.tokens:
            console.print(Text("\ntokens of the example, those trained in brackets:", style="dim"))
            parts = [(f"[{text}]", "green") if is_trained else (text, "dim") for text, is_trained in tokens]
            console.print(Text.assemble(*((text.replace("\n", "⏎"), style) for text, style in parts)))
    if not report.is_whole:
        raise SystemExit(1)


def _table(diagnosis: Diagnosis) -> Table:
    has_servers = any(one.server for one in diagnosis.checked)
    table = Table(box=None, pad_edge=False)
    for heading in ("check", *["server"] * has_servers, "", "measured", "allowed"):
        table.add_column(heading, no_wrap=heading in ("check", ""))
    for one in diagnosis.checked:
        style = _COLOURS[one.outcome]
        cells = (one.check, *[one.server] * has_servers, one.outcome, one.measured, one.threshold)
        table.add_row(*(Text(cell, style=style if cell == one.outcome else "") for cell in cells))
    return table

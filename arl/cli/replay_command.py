"""`arl replay`: train recorded steps of a run again, under its own settings or under others."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from arl.api.errors import ArlError, ConfigError
from arl.cli.viewing import the_run
from arl.run.replay.replay import TOLERANCE, ComparedStep, Replayed, ReplayedStep, replay
from arl.run.script import exit_with
from arl.training.display import hide_progress_bars

ABOUT = (
    "Train steps of a run with record=True again, from the checkpoint before them, without sampling or servers. "
    "Without --set it compares the weights after each step with the run's. With it, it compares metrics, and gradients "
    "and updates by layer, for the same batch and the same weights. Exit code: 0; 1 if weights differ, or if something "
    "is missing; 2 for a wrong setting."
)
_WIDE = 140
"""The width of tables if there is no terminal."""


def main(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl replay`."""
    options = _parser().parse_args(argv)
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _WIDE)
    hide_progress_bars()
    try:
        run_dir = the_run(options.run_dir)
        shown = (lambda step: None) if options.json else (lambda step: _show(console, step, options))
        found = replay(
            run_dir,
            options.steps,
            changes=dict(map(_change, options.set)),
            model=options.model,
            tolerance=options.tolerance,
            on_step=shown,
        )
    except ConfigError as error:
        exit_with(2, f"error: {error}")
    except ArlError as error:
        exit_with(1, f"error: {error}")
    except KeyboardInterrupt:
        exit_with(130, "stopped; the run is as it was")
    if options.json:
        sys.stdout.write(json.dumps(asdict(found), default=str) + "\n")
    elif found.steps:
        console.print(_verdict(found))
    if not found.is_good:
        raise SystemExit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="arl replay", description=ABOUT, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory")
    parser.add_argument(
        "--steps",
        metavar="FIRST:STOP",
        help="10:20 are the steps trained on the versions 10 to 19 (default: all that can be reached)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another setting of algorithm, train or seed, such as algorithm.preset=gspo; repeat it for more",
    )
    parser.add_argument("--model", metavar="DIR", help="where the model is that the run began from, if it was moved")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        metavar="X",
        help="the largest difference of a tensor, as a share of its norm, where builds differ (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    return parser


def _change(text: str) -> tuple[str, Any]:
    """NAME=VALUE; the value is YAML, as in a --config file."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--set {text}: write NAME=VALUE, such as algorithm.preset=gspo")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text}: the value is not YAML: {error}") from None


def _show(console: Console, step: ReplayedStep | ComparedStep, options: argparse.Namespace) -> None:
    if isinstance(step, ReplayedStep):
        console.print(Text(_line(step, options.tolerance)))
    else:
        console.print(*_compared(step), sep="\n")


def _line(step: ReplayedStep, tolerance: float) -> str:
    start = f"step {step.version}: weights {step.digest}"
    if step.is_identical:
        return f"{start}, identical"
    if not step.is_known:
        return f"{start}; the run's digest was lost with a process"
    how = "within the tolerance" if step.is_good(tolerance) else "different"
    return (
        f"{start}, the run's {step.recorded_digest}: {how}. {step.tensor} differs most, by {step.difference:.1e} of "
        f"its norm; loss {step.loss:.6g}, the run's {step.recorded_loss:.6g}"
    )


def _verdict(found: Replayed) -> str:
    same = sum(step.is_identical for step in found.steps)
    number = len(found.steps)
    lines = [f"{same} of {number} steps are identical to the bit"]
    if build := sorted({text for step in found.steps for text in step.build}):
        lines.append(
            f"this build differs from the run's ({'; '.join(build)}), so weights are compared within "
            f"{found.tolerance:g} of their norms: {'all agree' if found.is_good else 'some differ more'}"
        )
    elif not found.steps[0].is_on_cpu and same < number:
        lines.append(
            f"a GPU does not always sum in the same order, so weights are compared within {found.tolerance:g} of their "
            f"norms: {'all agree' if found.is_good else 'some differ more'}"
        )
    elif not found.is_good:
        lines.append("the same build computed other numbers: the recorded batch or its checkpoint is not the run's")
    return "\n".join(lines)


def _compared(step: ComparedStep) -> list[Table]:
    layers = Table("layer", "gradient", "other", "cosine", "update", "other", "cosine", title=f"step {step.version}")
    for one in step.layers:
        numbers = (one.gradient, one.other_gradient, one.gradient_cosine)
        numbers += (one.update, one.other_update, one.update_cosine)
        layers.add_row(one.layer, *map(_number, numbers))
    return [layers, _metrics(step.metrics, step.other_metrics)]


def _metrics(own: Mapping[str, float], other: Mapping[str, float]) -> Table:
    table = Table("metric", "the run's settings", "others")
    for name in ("loss", "grad_norm", "lr", "ratio_max", "clip_fraction", "effective_sample_size", "entropy"):
        if name in own or name in other:
            table.add_row(name, *(_number(metrics.get(name, math.nan)) for metrics in (own, other)))
    return table


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value + 0.0:.3g}"

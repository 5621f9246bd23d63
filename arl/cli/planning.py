"""`arl plan`: what a run would do with other servers, ranks and settings, before they are rented."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from arl.api.errors import ArlError, ConfigError, RunFileError
from arl.cli.command import amount, positive
from arl.cli.viewing import the_run
from arl.cluster.plan.costs import GPUS, Costs, Deployment, guessed, read_costs, write_costs
from arl.cluster.plan.prediction import draw, search, told
from arl.run.script import exit_with

ABOUT = """Predict a run with other servers, ranks and settings: throughput, who waits for whom, staleness, memory,
cost. An analytic model computes them from the costs of a run's parts, which are fitted from the event log of RUN_DIR,
read from a file, or guessed for a GPU and a model's size. Each number comes with its error. Settings that are not given
are the run's own. What lies beyond what was measured is marked as extrapolated."""
EXAMPLES = """examples:
  arl plan runs/quickstart --servers 1:4
  arl plan runs/mine --servers 1:64 --ranks 1:8 --budget 40 --max-staleness 4 --plot plan.png
  arl plan --gpu h100 --model-size 8B --servers 1:120 --ranks 4:32 --budget 128 --turns 4 --tool-s 2
"""

Bounds = tuple[int, int]

_WIDE = 140
"""Characters of a line where no terminal limits it."""


def main(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl plan`. Ends the process with code 2 if the plan cannot be made."""
    parser = argparse.ArgumentParser(
        prog="arl plan",
        description=ABOUT,
        epilog=EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_argument_group("where costs come from (one of these)")
    source.add_argument("run_dir", type=Path, nargs="?", metavar="RUN_DIR", help="a run with an event log")
    source.add_argument("--costs", type=Path, metavar="FILE", help="a JSON file of costs, such as --write-costs writes")
    source.add_argument("--gpu", metavar="NAME", help=f"guess for this GPU: {', '.join(GPUS)}")
    guess = parser.add_argument_group("with --gpu")
    guess.add_argument("--model-size", type=_size, metavar="8B", help="parameters of the model")
    for name, default in (("prompt_tokens", 500), ("new_tokens", 500), ("turns", 1)):
        flag, about = f"--{name.replace('_', '-')}", f"{name.replace('_', ' ')}, the mean (default: {default})"
        guess.add_argument(flag, type=positive, default=default, metavar="N", help=about)
    guess.add_argument("--tool-s", type=amount, default=0.0, metavar="S", help="seconds of tools after each turn, mean")
    what = parser.add_argument_group("what to try")
    what.add_argument("--servers", type=_bounds, metavar="N[:M]", help="how many inference servers")
    what.add_argument("--ranks", type=_bounds, metavar="N[:M]", help="how many data-parallel ranks of the trainer")
    what.add_argument("--budget", type=positive, metavar="GPUS", help="the most GPUs, servers and ranks together")
    for name in ("gpus_per_server", "gpus_per_rank", "batch_size", "group_size", "max_concurrent_episodes"):
        what.add_argument(f"--{name.replace('_', '-')}", type=positive, metavar="N")
    what.add_argument("--max-staleness", type=int, metavar="N")
    what.add_argument("--tool-latency", type=amount, dest="tool_factor", metavar="F", help="tools take F times as long")
    what.add_argument("--update-order", choices=("all", "rolling"))
    what.add_argument("--server-hour", type=amount, metavar="PRICE", help="of one server")
    what.add_argument("--rank-hour", type=amount, metavar="PRICE", help="of one rank")
    how = parser.add_argument_group("what to write")
    how.add_argument("--plot", type=Path, metavar="FILE", help="draw throughput, who waits, and staleness")
    how.add_argument("--json", type=Path, metavar="FILE", help="write all predictions")
    how.add_argument("--write-costs", type=Path, metavar="FILE", help="write the costs, to look at or to change")
    try:
        _plan(parser.parse_args(argv))
    except (ArlError, ImportError) as error:
        exit_with(2, f"error: {error}")


def _plan(options: argparse.Namespace) -> None:
    for path in (options.plot, options.json):
        if path and not path.parent.is_dir():  # before the work, not after it
            raise RunFileError(f"{path} cannot be written: there is no directory {path.parent}")
    costs, given = _costs(options), {name: getattr(options, name) for name in ("server_hour", "rank_hour")}
    prices = {name: value for name, value in given.items() if value is not None}
    costs = msgspec.structs.replace(costs, prices=msgspec.structs.replace(costs.prices, **prices))
    base = costs.deployment.changed(**_given(options))
    if options.write_costs:
        _write(options.write_costs, lambda path: write_costs(path, costs))
    try:
        plan = search(
            costs,
            base,
            servers=options.servers or (base.num_servers, base.num_servers),
            ranks=options.ranks or (base.num_ranks, base.num_ranks),
            budget=options.budget,
            note=lambda one: _show(f"{one.num_servers} servers, {one.num_ranks} ranks ..."),
        )
    finally:
        _show("")
    console = Console(highlight=False)
    console.width = console.width if console.is_terminal else _WIDE
    console.print(told(plan, costs))
    if options.plot:
        _write(options.plot, lambda path: draw(plan, path))
    if options.json:
        text = msgspec.json.format(
            msgspec.json.encode({"best": plan.best, "tried": plan.tried, "errors": plan.errors}), indent=1
        )
        _write(options.json, lambda path: path.write_bytes(text + b"\n"))


def _show(progress: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{progress}\033[K")
        sys.stderr.flush()


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The options that are fields of Deployment."""
    fields = Deployment.__struct_fields__
    return {name: value for name, value in vars(options).items() if name in fields and value is not None}


def _costs(options: argparse.Namespace) -> Costs:
    given = [name for name in ("run_dir", "costs", "gpu") if getattr(options, name) is not None]
    if len(given) != 1:
        raise ConfigError("give one of RUN_DIR, --costs FILE and --gpu NAME: a plan needs costs")
    if options.costs:
        return read_costs(options.costs)
    if options.gpu:
        if options.model_size is None:
            raise ConfigError("--gpu needs --model-size, such as 8B")
        deployment = Deployment(max_concurrent_episodes=1_000_000).changed(**_given(options))
        means = {name: getattr(options, name) for name in ("prompt_tokens", "new_tokens", "turns", "tool_s")}
        return guessed(options.gpu, options.model_size, deployment, **means)
    from arl.cluster.plan.fitting import fitted  # numpy, which the other ways do not need

    run_dir = the_run(options.run_dir)
    try:
        return fitted(run_dir)
    except ValueError as error:  # costs that make no sense, such as iterations that take no time
        raise RunFileError(f"{run_dir} is too short or too uniform to learn costs from: {error}") from error


def _write(path: Path, write: Any) -> None:
    try:
        write(path)
    except OSError as error:
        raise RunFileError(f"{path} cannot be written: {error.strerror or error}") from error


def _bounds(text: str) -> Bounds:
    """N, or N:M."""
    first, _, last = text.partition(":")
    bounds = positive(first), positive(last or first)
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r} goes from {first} down to {last}")
    return bounds


def _size(text: str) -> float:
    """Billions of parameters, such as 8B or 0.6b."""
    with suppress(ValueError):
        if 0 < (number := float(text.lower().removesuffix("b"))) < 10_000:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not the size of a model; give billions, such as 8B")

"""`arl finetune`, `arl replay` and `arl export`: training and writing models without servers."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from arl.api.errors import ArlError, ConfigError
from arl.api.settings.finetuning import FinetuneConfig
from arl.cli.command import errors_told
from arl.cli.viewing import the_run
from arl.run.export import SavedWeights
from arl.run.replay import TOLERANCE, ComparedStep, Replayed, ReplayedStep, replay
from arl.run.script import run_script
from arl.runtime.console import is_json, tell
from arl.training.display import hide_progress_bars

_WIDE = 140
"""The width of tables if there is no terminal."""


def finetune(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl finetune`. Ends as `arl.run_script` does."""
    run_script(_finetune, FinetuneConfig, argv)


async def _finetune(config: FinetuneConfig) -> None:
    from arl.run.finetuning.job import fine_tune  # it loads torch

    summary = await fine_tune(config)
    said = ", ".join(
        f"held-out {name} {summary[f'eval_{name}_before']:.4f} -> {summary[f'eval_{name}_after']:.4f}"
        for name in ("loss", "accuracy")
        if f"eval_{name}_before" in summary
    )
    said = f"{said or 'trained'} in {summary['steps']} steps, {summary['wall_s']:.0f} s; see {config.run_dir}"
    if is_json():
        tell("result", said, summary=summary)
    else:
        sys.stdout.write(said + "\n")


# arl replay

REPLAY_ABOUT = (
    "Train steps of a run with record=True again, from the checkpoint before them, without sampling or servers. "
    "Without --set it compares the weights after each step with the run's. With it, it compares metrics, and gradients "
    "and updates by layer, for the same batch and the same weights. Exit code: 0; 1 if weights differ, or if something "
    "is missing; 2 for a wrong setting."
)


def replay_steps(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl replay`."""
    options = _replay_parser().parse_args(argv)
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _WIDE)
    hide_progress_bars()

    def show(step: ReplayedStep | ComparedStep) -> None:
        if isinstance(step, ReplayedStep):
            console.print(Text(_line(step, options.tolerance)))
        else:
            console.print(*_compared(step), sep="\n")

    with errors_told("stopped; the run is as it was"):
        found = replay(
            the_run(options.run_dir),
            options.steps,
            changes=dict(map(_change, options.set)),
            model=options.model,
            tolerance=options.tolerance,
            on_step=None if options.json else show,
        )
    if options.json:
        sys.stdout.write(json.dumps(asdict(found), default=str) + "\n")
    elif found.steps:
        console.print(_verdict(found))
    if not found.is_good:
        raise SystemExit(1)


def _replay_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="arl replay", description=REPLAY_ABOUT, allow_abbrev=False)
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
    same, number = sum(step.is_identical for step in found.steps), len(found.steps)
    other = "the same build computed other numbers: the recorded batch or its checkpoint is not the run's"
    why = "" if found.is_good else other
    agree = "all agree" if found.is_good else "some differ more"
    within = f"so weights are compared within {found.tolerance:g} of their norms: {agree}"
    if build := sorted({text for step in found.steps for text in step.build}):
        why = f"this build differs from the run's ({'; '.join(build)}), {within}"
    elif not found.steps[0].is_on_cpu and same < number:
        why = f"a GPU does not always sum in the same order, {within}"
    return "\n".join(filter(None, (f"{same} of {number} steps are identical to the bit", why)))


def _compared(step: ComparedStep) -> list[Table]:
    layers = Table("layer", "gradient", "other", "cosine", "update", "other", "cosine", title=f"step {step.version}")
    for one in step.layers:
        numbers = (one.gradient, one.other_gradient, one.gradient_cosine)
        numbers += (one.update, one.other_update, one.update_cosine)
        layers.add_row(one.layer, *map(_number, numbers))
    own, other, metrics = step.metrics, step.other_metrics, Table("metric", "the run's settings", "others")
    for name in ("loss", "grad_norm", "lr", "ratio_max", "clip_fraction", "effective_sample_size", "entropy"):
        if name in own or name in other:
            metrics.add_row(name, *(_number(of.get(name, math.nan)) for of in (own, other)))
    return [layers, metrics]


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value + 0.0:.3g}"


# arl export

EXPORT_ABOUT = (
    "Write the model of a run's checkpoint as a Hugging Face directory, with its config and tokenizer. It does not "
    "matter how the run ended, or whether it still trains. No server starts, and no GPU is used."
)


def export(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl export`. Ends the process with code 2 for a wrong argument, 1 for a failure."""
    parser = argparse.ArgumentParser(prog="arl export", description=EXPORT_ABOUT, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory")
    parser.add_argument("--version", type=int, metavar="N", help="the checkpoint's version (default: the newest)")
    parser.add_argument("--policy", metavar="NAME", help="of a run of several policies: the one to write")
    out = "the directory to make (default: RUN_DIR/exported/version-N, with -NAME for a policy)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out)
    adapter = "only the adapters of a run with train.lora; else they are merged"
    parser.add_argument("--adapter", action="store_true", help=adapter)
    parser.add_argument("--model", metavar="DIR", help="where the model is that the run began from, if it was moved")
    push = (
        "upload it to this repository of the Hugging Face hub, such as me/adder, which is made if it is missing, "
        "private; kept here only with --out"
    )
    parser.add_argument("--push", metavar="REPO", help=push)
    parser.add_argument("--public", action="store_true", help="with --push: make a missing repository public")
    options = parser.parse_args(argv)
    is_kept = options.push is None or options.out is not None
    scratch = nullcontext("") if is_kept else tempfile.TemporaryDirectory(prefix="arl-export-")
    with errors_told("stopped; nothing was left half written"), scratch as tmp:
        if options.public and options.push is None:
            raise ConfigError("--public needs --push, which is missing")
        weights = SavedWeights.of(options.run_dir, options.version, options.model, options.policy)
        hide_progress_bars()
        policy = f"-{options.policy}" if options.policy else ""
        name = f"version-{weights.version:08d}{policy}{'-adapter' * options.adapter}"
        directory = (options.out or weights.run_dir / "exported" / name) if is_kept else Path(tmp) / "model"
        num_bytes = weights.export(directory, adapter=options.adapter)
        said = [f"version {weights.version} of {weights.run_dir}, {num_bytes / 1e6:.1f} MB"]
        if options.push is not None:
            said.append(_push(directory, options.push, f"Version {weights.version} of a run", options.public))
        sys.stdout.write(": ".join(said + [str(directory)] * is_kept) + "\n")


def _push(directory: Path, repository: str, message: str, public: bool) -> str:
    """Upload; returns the repository's address. A repository that exists keeps its visibility."""
    from httpx import TransportError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    hub = HfApi()
    try:
        address = hub.create_repo(repository, private=not public, exist_ok=True)
        hub.upload_folder(repo_id=address.repo_id, folder_path=directory, commit_message=message)
    except HFValidationError as error:
        raise ConfigError(f"--push {repository}: {error}") from None
    except (HfHubHTTPError, LocalTokenNotFoundError, TransportError, OSError) as error:
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ArlError(
            f"cannot push to {repository} at {hub.endpoint}: {said}; a token with write access is needed, in $HF_TOKEN "
            "or by `hf auth login`"
        ) from error
    return str(address)

"""`arl export`: a checkpoint of a run as a Hugging Face directory, here or on the hub."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from arl.api.errors import ArlError, ConfigError
from arl.run.export import SavedWeights
from arl.run.script import exit_with
from arl.training.display import hide_progress_bars

ABOUT = (
    "Write the model of a run's checkpoint as a Hugging Face directory, with its config and tokenizer. It does not "
    "matter how the run ended, or whether it still trains. No server starts, and no GPU is used."
)


def main(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl export`. Ends the process with code 2 for a wrong argument, 1 for a failure."""
    options = _parser().parse_args(argv)
    try:
        if options.public and options.push is None:
            raise ConfigError("--public needs --push, which is missing")
        weights = SavedWeights.of(options.run_dir, options.version, options.model, options.policy)
        hide_progress_bars()
        if options.push is None or options.out is not None:
            policy = f"-{options.policy}" if options.policy else ""
            name = f"version-{weights.version:08d}{policy}{'-adapter' * options.adapter}"
            _export(weights, options.out or weights.run_dir / "exported" / name, options)
        else:
            with tempfile.TemporaryDirectory(prefix="arl-export-") as scratch:
                _export(weights, Path(scratch) / "model", options)
    except ConfigError as error:
        exit_with(2, f"error: {error}")
    except ArlError as error:
        exit_with(1, f"error: {error}")
    except KeyboardInterrupt:
        exit_with(130, "stopped; nothing was left half written")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="arl export", description=ABOUT, allow_abbrev=False)
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
    return parser


def _export(weights: SavedWeights, directory: Path, options: argparse.Namespace) -> None:
    num_bytes = weights.export(directory, adapter=options.adapter)
    what = f"version {weights.version} of {weights.run_dir}, {num_bytes / 1e6:.1f} MB"
    if options.push is not None:
        what += f": {_push(directory, options.push, f'Version {weights.version} of a run', options.public)}"
    if options.push is None or options.out is not None:
        what += f": {directory}"
    sys.stdout.write(what + "\n")


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

"""`arl rm`: a reward model from preferences."""

from __future__ import annotations

from collections.abc import Sequence

from arl.api.finetuning_config import RMConfig
from arl.commands.tuning import run_job


def main(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl rm`."""
    run_job(RMConfig, argv)

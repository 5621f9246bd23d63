"""`arl dpo`: learning from preferences, with DPO or IPO."""

from __future__ import annotations

from collections.abc import Sequence

from arl.api.finetuning_config import DPOConfig
from arl.commands.tuning import run_job


def main(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl dpo`."""
    run_job(DPOConfig, argv)

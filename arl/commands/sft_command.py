"""`arl sft`: supervised fine-tuning on chats."""

from __future__ import annotations

from collections.abc import Sequence

from arl.api.finetuning_config import SFTConfig
from arl.commands.tuning import run_job


def main(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl sft`."""
    run_job(SFTConfig, argv)

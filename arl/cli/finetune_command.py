"""`arl finetune`: a model is fine-tuned on chats, on preferences, or as a reward model."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from arl.api.settings.finetuning import FinetuneConfig
from arl.run.script import run_script
from arl.runtime.console import is_json, tell


def main(argv: Sequence[str]) -> None:
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

"""The frame of `arl sft`, `arl dpo` and `arl rm`: settings from flags and YAML, a run, its result on stdout."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from arl.api.finetuning_config import FinetuneConfig
from arl.cli import run
from arl.json_console import is_json, tell


def run_job(config_class: type[FinetuneConfig], argv: Sequence[str]) -> None:
    """Fine-tune with the settings in argv. Ends as `arl.cli.run` does."""

    async def main(config: FinetuneConfig) -> None:
        from arl.finetuning.job import fine_tune  # it loads torch

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

    run(main, config_class, argv)

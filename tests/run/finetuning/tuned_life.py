"""A life of a fine-tuning run, for a nursery to fork: the command itself, which gets a signal after a step perhaps."""

import os
from collections.abc import Sequence
from typing import Any

import transformers  # noqa: F401 (lives that are forked find it loaded)

import arl.engine.fsdp.train_engine  # noqa: F401
from arl.__main__ import main
from arl.run.finetuning.job import TuningRun


def live(argv: Sequence[str], number: int = 0, at: int = 0) -> None:
    """Run `arl` with these arguments. number: the signal that comes after the row of step `at`."""
    append = TuningRun._append

    def appended(run: TuningRun, name: str, row: dict[str, Any]) -> None:
        append(run, name, row)
        if name == "metrics" and row["version"] == at:
            os.kill(os.getpid(), number)

    TuningRun._append = appended  # type: ignore[method-assign]
    main(argv)

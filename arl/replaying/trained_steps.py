"""Recorded steps, one after another, each with what trains it under the settings that its start of the run had."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, TypeVar

from arl.api.config import Config
from arl.replaying.recorded_run import RecordedRun, ReplayRange, fingerprint_of
from arl.training.recording import RecordedStep


class _Closes(Protocol):
    def close(self) -> None: ...


_Trainer = TypeVar("_Trainer", bound=_Closes)


def trained_steps(
    run: RecordedRun,
    which: ReplayRange,
    *,
    start: Callable[[Config], _Trainer],
    save: Callable[[_Trainer, Path], object],
    load: Callable[[_Trainer, Path], object],
) -> Iterator[tuple[RecordedStep, _Trainer, Config]]:
    """The steps from `which.base` on. What `start` makes trains neighbouring steps of the same settings.

    Where the run continued with other settings, the next one begins with what the last one saved. save: returns once
    the files are written. Raises RecordingError, ConfigError, and what the three raise.
    """
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="arl-replay-")))
        trainer, of_trainer = None, ""
        saved = which.checkpoint and which.checkpoint.absolute() / "engine"
        for version in range(which.base, which.stop):
            step = run.step(version)
            config = run.settings_of(step, scratch)
            if trainer is None or fingerprint_of(config) != of_trainer:
                if trainer is not None:
                    saved = scratch / f"engine-{version}"
                    save(trainer, saved)
                    trainer.close()
                trainer, of_trainer = start(config), fingerprint_of(config)
                stack.callback(trainer.close)
                if saved is not None:
                    load(trainer, saved)
            yield step, trainer, config

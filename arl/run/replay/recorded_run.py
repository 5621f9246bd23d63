"""The recording of a run: its steps, the checkpoints from which a replay can begin, and the settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from arl.api.errors import ConfigError, RecordingError
from arl.api.settings.run import Config
from arl.api.settings.sections import config_error, laid_over
from arl.api.version import __version__
from arl.engine.model_files import model_digest
from arl.training.recording import DIRECTORY, RecordedStep, recorded_versions, step_file
from arl.training.run_dir import checkpoint_of, saved_versions

_MATTER = ("seed", "train", "algorithm", "rollout")
"""The sections on which a step's numbers depend, besides its batch."""
_ABOUT_TRAINING = ("algorithm", "train", "seed")
"""The sections that a replay can change."""
_OF_RANKS = ("num_ranks", "min_ranks", "tensor_parallel", "ray_address", "max_recoveries")
"""Of `train`, but without effect: other settings are compared on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRange:
    """The steps to train, and where the replay begins."""

    checkpoint: Path | None
    """None: the model that the run began from."""
    base: int
    """The version of these weights."""
    first: int
    """The first step that was asked for. The steps from `base` to it are only trained to reach it."""
    stop: int
    """The last one is stop - 1."""


class RecordedRun:
    """Raises RecordingError for a directory without recorded steps."""

    def __init__(self, run_dir: Path, model: str | None = None) -> None:
        """model: where the model is that the run began from, if it was moved."""
        self.run_dir = run_dir
        self._model = model
        self.versions = recorded_versions(run_dir)
        if not self.versions:
            raise RecordingError(
                f"{run_dir} has no recorded steps (in {run_dir / DIRECTORY}): only a run with record=True keeps them"
            )

    def which(self, first: int | None = None, stop: int | None = None) -> ReplayRange:
        """The range of a replay. Raises RecordingError if a step or its beginning is missing; the error says what
        exists.

        first: default, the first step that can be reached. stop: default, the end of the recording.
        """
        stop = self.versions[-1] + 1 if stop is None else stop
        if first is None:
            first = next((version for version in self.versions if self._base_of(version) is not None), self.versions[0])
        if first >= stop:
            raise ConfigError(f"the range {first}:{stop} contains no step")
        base = self._base_of(first)
        missing = first if base is None else min({*range(base, stop)} - {*self.versions}, default=None)
        if base is None or missing is not None:
            raise RecordingError(f"{self.run_dir} cannot replay step {missing}: {self._what_there_is()}")
        saved = saved_versions(self._checkpoints)
        return ReplayRange(
            checkpoint=checkpoint_of(self._checkpoints, base) if base in saved else None,
            base=base,
            first=first,
            stop=stop,
        )

    def step(self, version: int) -> RecordedStep:
        return RecordedStep.read(step_file(self.run_dir / DIRECTORY, version))

    def settings_of(self, step: RecordedStep, scratch: Path) -> Config:
        """The settings that trained the step, on as many ranks as trained it. scratch: a directory for its files."""
        sections = {name: step.settings[name] for name in _MATTER if name in step.settings}
        model = self._model or str(step.settings["model"])
        self._check_model(model, step)
        laid = laid_over(sections, {"train": {"num_ranks": step.num_ranks, "min_ranks": None}})
        given = {**laid, "model": model, "run_dir": scratch, "record": True, "log": {"events": None, "console": False}}
        builds = f"arl {step.build.arl} recorded the run, and its settings do not fit this arl {__version__}"
        return _validated(given, f"{builds}; replay it with that one")

    def _check_model(self, model: str, step: RecordedStep) -> None:
        if step.model_digest is None or model in self._checked:
            return
        here = model_digest(model)
        if here is None:
            raise RecordingError(
                f"the run began from {model}, which cannot be read here; say where the model is (--model DIR)"
            )
        if here != step.model_digest:
            raise RecordingError(
                f"{model} is another model than the run began from (its digest differs); say where the right one is "
                "(--model DIR)"
            )
        self._checked.add(model)

    @cached_property
    def _checked(self) -> set[str]:
        return set()

    @property
    def _checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    def _base_of(self, version: int) -> int | None:
        """The newest version from which recorded steps lead to `version`; None without one."""
        bases = {0, *saved_versions(self._checkpoints)}
        for base in range(version, -1, -1):
            if base in bases:
                return base
            if base - 1 not in self.versions:
                return None
        return None

    def _what_there_is(self) -> str:
        recorded = ", ".join(f"{a}:{b}" for a, b in _ranges(self.versions))
        saved = ", ".join(map(str, sorted(saved_versions(self._checkpoints)))) or "none"
        return (
            f"the recorded steps are {recorded}, the checkpoints {saved} (and version 0, the model itself); a replay "
            "begins at a checkpoint and needs every step from there on"
        )


def other_settings(config: Config, changes: Mapping[str, Any]) -> Config:
    """`config` with changes, merged section by section. Raises ConfigError for a change that no replay can make."""
    if not changes:
        return config
    for name in changes:
        if name not in _ABOUT_TRAINING:
            raise ConfigError(
                f"{name} has no effect in a replay, which samples nothing; change settings of "
                f"{', '.join(_ABOUT_TRAINING)}"
            )
    train = changes.get("train")
    if isinstance(train, Mapping) and (of_ranks := [name for name in _OF_RANKS if name in train]):
        raise ConfigError(f"train.{of_ranks[0]} has no effect here: both settings are compared on one rank")
    before = config.model_dump(mode="json", exclude={"log", "run_dir"})
    given = {**laid_over(before, changes), "run_dir": config.run_dir, "log": config.log}
    return _validated(given, "other settings")


def _validated(given: Mapping[str, Any], what: str) -> Config:
    try:
        return Config.model_validate(given)
    except ValidationError as error:
        raise ConfigError(f"{what}: {config_error(Config, error)}") from None


def fingerprint_of(config: Config) -> str:
    """Equal for settings that train alike, so that neighbouring steps can share a learner."""
    matter = config.model_dump(mode="json", include={*_MATTER, "model"}, fallback=str)
    return json.dumps(matter, sort_keys=True)


def _ranges(versions: list[int]) -> Iterator[tuple[int, int]]:
    """(first, stop) of each series of neighbouring versions."""
    start = previous = versions[0]
    for version in versions[1:]:
        if version != previous + 1:
            yield start, previous + 1
            start = version
        previous = version
    yield start, previous + 1

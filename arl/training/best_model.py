"""run_dir/best: the model of the version whose evaluation had the highest metric."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from arl.api.errors import ConfigError
from arl.api.types import Evaluation

log = logging.getLogger(__name__)

BEST = "best"
"""A link to the directory of a version, which is replaced in one step."""
_NOTE = "best.json"
_OF_WORKFLOWS = ("episode/", "reward/")
_DIRECTORIES, _ASIDE = "best-version-", ".writing"


@dataclass(frozen=True, slots=True)
class _Kept:
    version: int
    value: float


class BestModel:
    """Calls block; one thread at a time."""

    def __init__(self, run_dir: Path, metric: str) -> None:
        """Raises ConfigError if something else lies at run_dir/best."""
        self._link = run_dir / BEST
        self._metric = metric
        if self._link.exists() and not self._link.is_symlink():
            raise ConfigError(
                f"evaluation.keep_best would keep a model at {self._link}, but something else lies there; move it away"
            )
        self._kept = self._read()

    def value_of(self, evaluation: Evaluation, unplayed: Sequence[str] = ()) -> float | None:
        """The metric in an evaluation; None if it is of a suite that was not played.

        Also None, with a warning, if it is one that the workflow reports, which it need not do each time. Raises
        ConfigError for any other that the evaluation does not have.
        """
        found = dict(_values(evaluation))
        if self._metric in found or any(self._metric.startswith(f"{name}/") for name in unplayed):
            return found.get(self._metric)
        lacks = (
            f"evaluation.keep_best is {self._metric!r}, which the evaluation of version {evaluation.version} does not "
            f"have; it has: {', '.join(sorted(found))}"
        )
        of = next((name for name in evaluation.by_name or {} if self._metric.startswith(f"{name}/")), None)
        if not self._metric.removeprefix(f"{of}/" if of else "").startswith(_OF_WORKFLOWS):
            raise ConfigError(lacks)
        log.warning("%s", lacks)
        return None

    def is_better(self, value: float) -> bool:
        return not math.isnan(value) and (self._kept is None or value > self._kept.value)

    def keep(self, version: int, value: float, write: Callable[[Path], None]) -> None:
        """Have the model written, and put it in the place of the one before. Raises OSError and what `write` raises."""
        directory = self._link.with_name(f"{_DIRECTORIES}{version}")
        aside = directory.with_name(directory.name + _ASIDE)
        shutil.rmtree(aside, ignore_errors=True)
        try:
            write(aside)
            note = {"version": version, "metric": self._metric, "value": value}
            (aside / _NOTE).write_text(json.dumps(note) + "\n")
            if directory.name == self._target:  # the same version again, after a resume
                directory = directory.with_name(directory.name + "-again")
            shutil.rmtree(directory, ignore_errors=True)
            aside.rename(directory)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        link = self._link.with_name(BEST + _ASIDE)
        link.unlink(missing_ok=True)
        link.symlink_to(directory.name)
        os.replace(link, self._link)
        self._kept = _Kept(version, value)
        for path in self._link.parent.glob(f"{_DIRECTORIES}*"):  # the one before, and what a kill has left
            if path.name != directory.name:
                shutil.rmtree(path, ignore_errors=True)

    def __str__(self) -> str:
        if self._kept is None:
            return f"there is no {self._link} yet"
        return f"{self._link} is version {self._kept.version}, {self._metric} {self._kept.value:.4g}"

    @property
    def _target(self) -> str | None:
        return os.readlink(self._link) if self._link.is_symlink() else None

    def _read(self) -> _Kept | None:
        with suppress(FileNotFoundError):
            try:
                known = json.loads((self._link / _NOTE).read_text())
                if known["metric"] == self._metric:
                    return _Kept(int(known["version"]), float(known["value"]))
                log.warning(
                    "%s was kept by %s, and evaluation.keep_best is %s: the next evaluation's model takes its place",
                    self._link,
                    known["metric"],
                    self._metric,
                )
            except (ValueError, KeyError, TypeError) as error:
                log.warning("%s cannot be read (%s): the next evaluation's model takes its place", self._link, error)
        return None


def _values(evaluation: Evaluation) -> Iterator[tuple[str, float]]:
    """All numbers of an evaluation by name; a named dataset's as NAME/..."""
    yield "reward", evaluation.reward
    yield from evaluation.metrics.items()
    for name, part in (evaluation.by_name or {}).items():
        for what, value in _values(part):
            yield f"{name}/{what}", value

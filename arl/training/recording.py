"""Records everything on which a step's numbers depend, so that the step can be trained again: run_dir/recording.

run_dir/recording/step-00000017.npz    the batch that was trained on the weights of version 17 (batch_codec.py), and
                                       `about`: settings, versions of packages, weights before and after, metrics;
                                       its images are in run_dir/images
"""

from __future__ import annotations

import json
import logging
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from arl.api.errors import ImageError, RecordingError
from arl.api.settings.run import Config
from arl.api.settings.sections import settings_without_masked
from arl.api.train_engine import TensorPrint
from arl.api.version import __version__
from arl.observe.events.image_store import ImageStore
from arl.training.batch_codec import FlatBatch, images_named
from arl.training.checkpoints import UNREADABLE
from arl.training.run_dir import usable
from arl.training.token_log import ReportedBatch

DIRECTORY = "recording"
FORMAT = 2
"""Raise it for each change that older readers cannot read."""

_PACKAGES = ("torch", "transformers", "numpy")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """The software and processor that compute: if all of this is equal, numbers are the same to the bit."""

    arl: str = __version__
    python: str = field(default_factory=platform.python_version)
    packages: Mapping[str, str] = field(default_factory=lambda: {name: metadata.version(name) for name in _PACKAGES})
    processor: str = field(default_factory=lambda: _processor())

    def differences(self, other: Build) -> list[str]:
        """Phrases such as "torch 2.13.0 there, 2.11.0 here"; `self` is here."""
        here, there = ({**asdict(one), **one.packages} for one in (self, other))
        names = [name for name in sorted({*here, *there} - {"packages"}) if here.get(name) != there.get(name)]
        return [f"{name} {there.get(name)} there, {here.get(name)} here" for name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One step: the batch, and everything else on which its numbers depend."""

    version: int
    """The version on which it was trained."""
    batch: FlatBatch
    settings: Mapping[str, Any]
    """The run's settings, without keys and passwords."""
    num_ranks: int
    """How many ranks trained it."""
    model_digest: str | None
    """The digest of the run's first model (arl.engine.model_files.model_digest); None if it could not be read."""
    build: Build
    before: str
    """The digest of the weights before the step (arl.api.train_engine); empty if it was lost with a process."""
    after: Mapping[str, TensorPrint]
    """The fingerprints of the weights after the step; also empty in that case."""
    metrics: Mapping[str, float]

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all, without its images. Raises OSError."""
        about = {
            "format": FORMAT,
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("batch", "after", "build")},
            "num_new": self.batch.num_new,
            "build": asdict(self.build),
            "after": {name: [one.bits, one.norm, one.projection] for name, one in self.after.items()},
            "checksum": _checksum(self.batch.header, self.batch.arrays),
        }
        aside = path.with_name(f".{path.name}")
        with aside.open("wb") as file:
            self.batch.write(file, json.dumps(about).encode())
        aside.replace(path)

    @classmethod
    def read(cls, path: Path) -> RecordedStep:
        """path: in run_dir/recording. Raises RecordingError, which names the file and says what is wrong with it."""
        try:
            with path.open("rb") as file:
                text, header, arrays = FlatBatch.read(file)
            about = json.loads(text)
        except UNREADABLE as error:
            raise RecordingError(f"{path} cannot be read as a recorded step: {error}") from error
        if about.get("format") != FORMAT:
            raise RecordingError(
                f"{path} was written by arl {about.get('build', {}).get('arl', 'unknown')} in format "
                f"{about.get('format')}, and this arl {__version__} reads format {FORMAT}: replay it with that arl"
            )
        if about.pop("checksum") != _checksum(header, arrays):
            raise RecordingError(f"{path} holds another batch than was recorded: its checksum differs")
        names = {f.name for f in fields(cls)} - {"batch", "after", "build"}
        try:
            images = images_named(header, ImageStore(path.parents[1]).image)
        except ImageError as error:
            raise RecordingError(f"{path} cannot be replayed: {error}") from error
        return cls(
            **{name: about[name] for name in names},
            batch=FlatBatch(header=header, arrays=arrays, num_new=about["num_new"], images=images),
            build=Build(**about["build"]),
            after={name: TensorPrint(bits=b, norm=n, projection=p) for name, (b, n, p) in about["after"].items()},
        )


class Recorder:
    """Writes the steps of a run as they are trained. If a step cannot be written, the log says so."""

    def __init__(self, config: Config, model_digest: str | None) -> None:
        self._directory = config.run_dir / DIRECTORY
        self._images = ImageStore(config.run_dir)
        known = {name: getattr(config, name) for name in Config.model_fields}  # a subclass may have more
        self._settings = settings_without_masked(Config.model_construct(**known))
        self._model_digest = model_digest
        self._build = Build()

    def keep(self, version: int, batch: FlatBatch, trained: ReportedBatch | None, num_ranks: int) -> None:
        """Keep the step that was trained on `version`. trained: None if its numbers were lost."""
        weights = trained.weights if trained else None
        step = RecordedStep(
            version=version,
            batch=batch,
            settings=self._settings,
            num_ranks=num_ranks,
            model_digest=self._model_digest,
            build=self._build,
            before=weights.before if weights else "",
            after=weights.after if weights else {},
            metrics=trained.metrics if trained else {},
        )
        try:
            self._directory.mkdir(exist_ok=True)
            self._images.keep(batch.images)
            step.write(step_file(self._directory, version))
        except OSError as error:
            log.error(
                "step %d is not recorded, so it cannot be replayed: %s: %s",
                version,
                self._directory,
                error.strerror or error,
            )


def forget_steps(run_dir: Path, version: int) -> None:
    """Remove the steps from `version` on: a run that continues from there trains them again, with other batches.

    Raises RunFileError.
    """
    with usable(run_dir / DIRECTORY):
        for recorded in recorded_versions(run_dir):
            if recorded >= version:
                step_file(run_dir / DIRECTORY, recorded).unlink()


def recorded_versions(run_dir: Path) -> list[int]:
    """The versions whose steps are recorded, ascending."""
    directory = run_dir / DIRECTORY
    paths = directory.iterdir() if directory.is_dir() else ()
    matches = (re.fullmatch(r"step-(\d{8})\.npz", path.name) for path in paths)
    return sorted(int(match[1]) for match in matches if match)


def step_file(directory: Path, version: int) -> Path:
    return directory / f"step-{version:08d}.npz"


def _checksum(header: bytes, arrays: Mapping[str, np.ndarray]) -> int:
    checksum = crc32(header)
    for name, array in sorted(arrays.items()):
        checksum = crc32(np.ascontiguousarray(array).tobytes(), crc32(name.encode(), checksum))
    return checksum


def _processor() -> str:
    """The processor's name: libraries choose their kernels by it."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return name

"""Checkpoints as directories that are whole or not there: written aside, synced, renamed; the newest K kept.

run_dir/checkpoints/version-00000040/state.json      totals, dataset cursor, ledger
                                     engine/         whatever the train engine saves
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arl.api.engine import Saving
from arl.api.errors import CheckpointError

_ASIDE = ".writing-"


class Checkpoints:
    """The checkpoints of one run. identity: settings that must be the same for a run to continue."""

    def __init__(self, directory: Path, keep: int, identity: dict[str, Any]) -> None:
        self._directory = directory
        self._keep = keep
        self._identity = identity

    def newest_version(self) -> int | None:
        return max(self._versions(), default=None)

    def save(self, version: int, save_engine: Callable[[Path], Saving], state: dict[str, Any]) -> None:
        """Write the checkpoint of `version` and drop the oldest past `keep`. Raises CheckpointError, e.g. disk full."""
        aside = self._directory / f"{_ASIDE}{version}"
        for left_by_a_kill in self._directory.glob(f"{_ASIDE}*"):
            shutil.rmtree(left_by_a_kill, ignore_errors=True)
        try:
            aside.mkdir(parents=True)
            save_engine(aside / "engine").wait()
            with (aside / "state.json").open("w") as file:
                json.dump({"identity": self._identity, **state}, file)
                file.flush()
                os.fsync(file.fileno())
            _sync(aside)
            aside.rename(self._path(version))
            _sync(self._directory)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of version {version} could not be written to {self._directory}: {error}; "
                "earlier ones are untouched. Make room and run the same command again"
            ) from error
        for old in sorted(self._versions())[: -self._keep]:
            shutil.rmtree(self._path(old))

    def load_newest(self, load_engine: Callable[[Path], None]) -> dict[str, Any] | None:
        """Load the newest checkpoint and return its state; None where there is none. Raises CheckpointError."""
        version = self.newest_version()
        if version is None:
            return None
        path = self._path(version)
        try:
            state = json.loads((path / "state.json").read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise CheckpointError(
                f"{path}/state.json is unreadable: {error}; delete {path} to continue from an earlier one"
            ) from None
        for name, value in self._identity.items():
            if state["identity"].get(name) != value:
                raise CheckpointError(
                    f"{path} was written with {name}={state['identity'].get(name)!r}, this run has {value!r}; "
                    "use another run_dir, or the same settings"
                )
        load_engine(path / "engine")
        return state

    def _path(self, version: int) -> Path:
        return self._directory / f"version-{version:08d}"

    def _versions(self) -> list[int]:
        if not self._directory.is_dir():
            return []
        matches = (re.fullmatch(r"version-(\d{8})", path.name) for path in self._directory.iterdir())
        return [int(match[1]) for match in matches if match]


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

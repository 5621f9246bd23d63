"""Checkpoints as directories that are complete or absent: written aside, synced, renamed; the newest stay.

run_dir/checkpoints/version-00000040/state.json      totals, dataset cursor, ledger
                                     groups.npz      finished groups that wait for a batch
                                     replay.npz      trained groups that may be trained again
                                     engine/         the files of the train engine

The images of groups are in run_dir/images (arl.api.image_store), and are on the disk before a checkpoint has its name.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any
from zipfile import BadZipFile

from arl.api.engine import Saving
from arl.api.errors import ArlError, CheckpointError, DamagedCheckpointError, ImageError
from arl.api.image_store import ImageStore
from arl.api.types import Group
from arl.offload import force_to_disk
from arl.training.flat_groups import images_of, read_groups, write_groups
from arl.training.run_dir import checkpoint_of, saved_versions

log = logging.getLogger(__name__)

FORMAT = 3
"""The format of the files here and of the states in them: +1 for each change that this reader cannot read."""
UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, BadZipFile)
"""The errors of the standard library and numpy for a damaged file."""

_ASIDE = ".writing-"
_RETIRED = ".deleting-"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run between two steps, without the train engine's."""

    values: dict[str, Any]
    """JSON values. A function stands for the value that it returns; the writing thread calls it."""
    groups: Sequence[Group] = ()
    """Finished, untrained groups: ReplayBuffer.untrained."""
    replay: Sequence[Group] = ()
    """Trained groups that may be trained again: Replay.groups."""
    sync: Callable[[], None] = lambda: None
    """Forces to the disk what the logs say of the state. Called before the checkpoint gets its name."""

    def text(self, identity: Mapping[str, Any]) -> str:
        known = {"format": FORMAT, "identity": identity, **self.values}
        return json.dumps(known, default=lambda value: value())


class Checkpoints:
    def __init__(self, directory: Path, keep: int, identity: dict[str, Any]) -> None:
        """directory: run_dir/checkpoints. keep: how many stay on the disk. identity: settings that must not change for
        a run to continue.

        NAME_digest may describe the contents behind NAME: if the digest is the same, NAME may change.
        """
        self._directory = directory
        self._images = ImageStore(directory.parent)
        self._keep = keep
        self._identity = identity
        self._begun = count()
        self._writing = Lock()

    def newest_version(self) -> int | None:
        return max(saved_versions(self._directory), default=None)

    def begin(self, version: int, save_engine: Callable[[Path], Saving], state: RunState) -> CheckpointSaving:
        """Copy the train engine aside. The result's `wait` writes the checkpoint. Both raise CheckpointError.

        Another checkpoint may begin before the first is written. Of two of one version, the first complete one stays.
        """
        aside = self._directory / f"{_ASIDE}{version}-{next(self._begun)}"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir(parents=True)
            engine = save_engine(aside / "engine")
        except (OSError, ArlError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise _unwritten(version, self._directory, error) from error
        return CheckpointSaving(partial(self._complete, version, aside, engine, state))

    def _complete(self, version: int, aside: Path, engine: Saving, state: RunState) -> None:
        """Write what `begin` took, rename the directory, and delete the oldest checkpoints past `keep`."""
        with self._writing:
            try:
                engine.wait()
                if self._path(version).exists():
                    shutil.rmtree(aside)
                    return
                self._images.keep(images_of((*state.groups, *state.replay)))
                for name, groups in (("groups.npz", state.groups), ("replay.npz", state.replay)):
                    with (aside / name).open("wb") as file:
                        write_groups(file, groups)
                    force_to_disk(aside / name)
                (aside / "state.json").write_text(state.text(self._identity))
                force_to_disk(aside / "state.json")
                force_to_disk(aside)
                state.sync()
                aside.rename(self._path(version))
                force_to_disk(self._directory)
            except (OSError, ArlError) as error:
                shutil.rmtree(aside, ignore_errors=True)
                raise _unwritten(version, self._directory, error) from error
            for old in sorted(saved_versions(self._directory))[: -self._keep]:
                self._delete(old)

    def load_newest(self, load_engine: Callable[[Path], None]) -> RunState | None:
        """Load the newest checkpoint, if any; return its state. Removes half-written ones. Raises CheckpointError."""
        for pattern in (f"{_ASIDE}*", f"{_RETIRED}*"):
            for left_by_a_kill in self._directory.glob(pattern):
                shutil.rmtree(left_by_a_kill, ignore_errors=True)
        self._images.remove_unfinished()
        version = self.newest_version()
        if version is None:
            return None
        path = self._path(version)
        try:
            state = self._read(path)
            load_engine(path / "engine")
        except DamagedCheckpointError as error:
            earlier = sorted(saved_versions(self._directory))[:-1]
            where = f"version {earlier[-1]}" if earlier else "the beginning, as there is no earlier one"
            advice = f"if it cannot be read later either, delete {path} to continue from {where}"
            raise CheckpointError(f"{error}; {advice}") from error
        return state

    def _read(self, path: Path) -> RunState:
        values = read_values(path, "continue with the arl that wrote it, or use another run_dir")
        identity = values["identity"]
        for name, value in self._identity.items():
            if not (name.endswith("_digest") or self._is_same(name, identity)):
                written = f"with {name}={identity[name]!r}" if name in identity else f"without {name}"
                raise CheckpointError(
                    f"{path} was written {written}, this run has {value!r}; use another run_dir, or the same settings"
                )
        groups, replay = (self._groups(path / name) for name in ("groups.npz", "replay.npz"))
        return RunState(values=values, groups=groups, replay=replay)

    def _is_same(self, name: str, written: Mapping[str, Any]) -> bool:
        here, there = (identity.get(f"{name}_digest") for identity in (self._identity, written))
        return self._identity[name] == written.get(name) or (here is not None and here == there)

    def _groups(self, file: Path) -> list[Group]:
        try:
            with file.open("rb") as stream:
                return read_groups(stream, self._images.image)
        except ImageError as error:
            raise DamagedCheckpointError(f"{file} cannot be read: {error}") from error
        except UNREADABLE as error:
            raise DamagedCheckpointError(f"{file} is unreadable: {type(error).__name__}: {error}") from error

    def _delete(self, version: int) -> None:
        """Rename, then delete: a kill leaves no half checkpoint under its name."""
        retired = self._directory / f"{_RETIRED}{version}"
        try:
            self._path(version).rename(retired)
            shutil.rmtree(retired)
        except OSError as error:
            log.warning("cannot delete the old checkpoint of version %d: %s", version, error)

    def _path(self, version: int) -> Path:
        return checkpoint_of(self._directory, version)


def read_values(path: Path, advice: str) -> dict[str, Any]:
    """The JSON values of a checkpoint, with its `identity`. advice: what to do about one of another format.

    Raises CheckpointError.
    """
    file = path / "state.json"
    try:
        values = json.loads(file.read_text())
        dict(values["identity"])
    except UNREADABLE as error:
        raise DamagedCheckpointError(f"{file} is unreadable: {type(error).__name__}: {error}") from error
    if values.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {values.get('format')}, and this arl reads {FORMAT}; {advice}")
    return values


@dataclass(frozen=True, slots=True)
class CheckpointSaving:
    """The Saving of a whole checkpoint, whose parts are copied aside."""

    complete: Callable[[], None]

    def wait(self) -> None:
        """Block until it is on the disk. Call it once. Raises CheckpointError."""
        self.complete()


def _unwritten(version: int, directory: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"cannot write the checkpoint of version {version} to {directory}: {error}; earlier ones are untouched, and "
        "the same command continues from them once the cause is fixed"
    )

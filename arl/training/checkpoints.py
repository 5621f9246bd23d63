"""Checkpoints as directories that are complete or absent: written aside, synced, renamed; the newest stay.

run_dir/checkpoints/version-00000040/state.json      totals, dataset cursor, ledger
                                     groups.npz      finished groups that wait for a batch
                                     replay.npz      trained groups that may be trained again
                                     engine/         the files of the train engine

The images of groups are in run_dir/images (arl.observe.events.image_store), and are on the disk before a checkpoint
has its name.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any
from zipfile import BadZipFile

from arl.api.errors import ArlError, CheckpointError, DamagedCheckpointError, ImageError, ProcessLostError
from arl.api.events import NOWHERE, CheckpointWritten, Events
from arl.api.settings.run import CheckpointConfig
from arl.api.train_engine import Saving
from arl.api.types import Group
from arl.observe.events.image_store import ImageStore
from arl.runtime.threads import TrainThread, force_to_disk, offload
from arl.training.batch_codec import images_of, read_groups, write_groups
from arl.training.learner_process import RunLearner
from arl.training.run_dir import checkpoint_of, saved_versions

log = logging.getLogger(__name__)

FORMAT = 4
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

    def begin(self, version: int, save_engine: Callable[[Path], Saving], state: RunState) -> Callable[[], None]:
        """Copy the train engine aside. The result writes the checkpoint; call it once. Both raise CheckpointError.

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
        return partial(self._complete, version, aside, engine, state)

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
                values = {"format": FORMAT, "identity": self._identity, **state.values}
                (aside / "state.json").write_text(json.dumps(values, default=lambda value: value()))
                force_to_disk(aside / "state.json")
                force_to_disk(aside)
                state.sync()
                aside.rename(self._path(version))
                force_to_disk(self._directory)
            except (OSError, ArlError) as error:
                shutil.rmtree(aside, ignore_errors=True)
                raise _unwritten(version, self._directory, error) from error
            for old in sorted(saved_versions(self._directory))[: -self._keep]:
                retired = self._directory / f"{_RETIRED}{old}"
                try:
                    self._path(old).rename(retired)  # first, so a kill leaves no half checkpoint under its name
                    shutil.rmtree(retired)
                except OSError as error:
                    log.warning("cannot delete the old checkpoint of version %d: %s", old, error)

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
        here, identity = self._identity, values["identity"]
        for name, value in here.items():
            digest = here.get(f"{name}_digest")
            is_same = value == identity.get(name) or (digest is not None and digest == identity.get(f"{name}_digest"))
            if not (name.endswith("_digest") or is_same):
                written = f"with {name}={identity[name]!r}" if name in identity else f"without {name}"
                raise CheckpointError(
                    f"{path} was written {written}, this run has {value!r}; use another run_dir, or the same settings"
                )
        groups, replay = (self._groups(path / name) for name in ("groups.npz", "replay.npz"))
        return RunState(values=values, groups=groups, replay=replay)

    def _groups(self, file: Path) -> list[Group]:
        try:
            with file.open("rb") as stream:
                return read_groups(stream, self._images.image)
        except ImageError as error:
            raise DamagedCheckpointError(f"{file} cannot be read: {error}") from error
        except UNREADABLE as error:
            raise DamagedCheckpointError(f"{file} is unreadable: {type(error).__name__}: {error}") from error

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


def _unwritten(version: int, directory: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"cannot write the checkpoint of version {version} to {directory}: {error}; earlier ones are untouched, and "
        "the same command continues from them once the cause is fixed"
    )


@dataclass(kw_only=True, eq=False)
class Saver:
    """Saves the trainer's versions. Which ones: see CheckpointConfig."""

    config: CheckpointConfig
    checkpoints: Checkpoints
    learner: RunLearner
    thread: TrainThread
    events: Events = NOWHERE

    def __post_init__(self) -> None:
        self._writing: asyncio.Future[None] | None = None
        self._begun_at = time.monotonic()
        self._was_lost = False

    def is_due(self, version: int) -> bool:
        """Whether the version that was just trained is to be saved."""
        if self.config.every and version % self.config.every == 0:
            return True
        if self._writing is not None and not self._writing.done():
            return False
        every_s = self.config.every_s
        is_late = every_s is not None and time.monotonic() - self._begun_at >= every_s
        return is_late or self._was_lost or self.learner.is_full

    async def finished(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._writing:
            await asyncio.wait([self._writing])
            # It was raised where it was awaited, unless the run was ending.
            if (error := self._writing.exception()) and not is_lost(self._writing):
                log.error("the previous checkpoint failed: %s", error)

    async def begin(self, version: int, state: Callable[[], RunState]) -> asyncio.Future[None] | None:
        """Begin to write a checkpoint, once none is being written; None if there is nothing to write.

        When this returns, the state has been copied. The caller awaits `written` on the result.
        """
        if version in (0, self.checkpoints.newest_version()):
            return None
        began = self._begun_at = time.monotonic()
        self._was_lost = False
        begun = self.thread.submit(self.checkpoints.begin, version, self.learner.save, state())
        try:
            write = await self.thread.finish(begun)
        except asyncio.CancelledError:
            if begun.exception() is None:  # finish writing it, or the next one would collide with it
                self._writing = offload(begun.result())
            raise
        self._writing = offload(write)
        self._writing.add_done_callback(partial(self._report, version, began))
        return self._writing

    def _report(self, version: int, began: float, saving: asyncio.Future[None]) -> None:
        self._was_lost = is_lost(saving)
        if self._was_lost:
            log.warning("the checkpoint of version %d was lost with the trainer's process; another follows", version)
        error = None if saving.cancelled() else saving.exception()
        seconds, why = time.monotonic() - began, "" if error is None else f"{type(error).__name__}: {error}"
        self.events.emit(CheckpointWritten(version=version, seconds=seconds, error=why))


async def written(saving: asyncio.Future[None]) -> bool:
    """Wait until the saving is on the disk. A cancelled wait goes on until then, so that no error is lost.

    Returns False if it was lost with the trainer's process.
    """
    try:
        await asyncio.wait([saving])
    except asyncio.CancelledError:
        await asyncio.wait([saving])
        if not is_lost(saving):
            saving.result()
        raise
    if is_lost(saving):
        return False
    saving.result()
    return True


def is_lost(saving: asyncio.Future[None]) -> bool:
    """Whether it failed because the trainer's process or a rank was lost; another one can save the same."""
    error = None if saving.cancelled() else saving.exception()
    return isinstance(error, CheckpointError) and isinstance(error.__cause__, ProcessLostError)

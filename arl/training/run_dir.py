"""The directory of a run: it can be written to, and no other run trains in it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO
from weakref import WeakSet

from arl.api.errors import ConfigError, RunFileError

log = logging.getLogger(__name__)

LOCK, THIS_ONE = "run.lock", ", which is this one"
BEST = "best"
"""A link to the directory of a version, which is replaced in one step."""
_TRIES, _TRY_AGAIN_S = 3, 0.02


def make_run_dir(run_dir: Path) -> None:
    """Create the directory if needed. Raises ConfigError if it is not writable."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror or str(error)
        raise ConfigError(
            f"run_dir is {run_dir}, where a run cannot write its files: {reason}; set run_dir to a directory that can "
            "be made or written to"
        ) from error


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The directory of the newest checkpoint, if there is one."""
    directory = run_dir / "checkpoints"
    version = max(saved_versions(directory), default=None)
    return None if version is None else checkpoint_of(directory, version)


def checkpoint_of(directory: Path, version: int) -> Path:
    """Where the checkpoint of a version lies in the directory of all checkpoints."""
    return directory / f"version-{version:08d}"


def saved_versions(directory: Path) -> list[int]:
    """The versions of the checkpoints in the directory, in no order."""
    if not directory.is_dir():
        return []
    matches = (re.fullmatch(r"version-(\d{8})", path.name) for path in directory.iterdir())
    return [int(match[1]) for match in matches if match]


class RunLock:
    """Keeps a second run out of run_dir: a lock on run_dir/run.lock, whose text names the process that holds it.

    The kernel releases the lock when the process ends, however it ends: processes that it started or forked do not keep
    it. On NFS the server keeps it while the machine of the process answers. On a file system without locks arl logs a
    warning, and the run goes on.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK
        self._file: IO[bytes] | None = None
        self._is_held = False
        _LOCKS.add(self)

    def take(self) -> None:
        """Create run_dir if needed, and lock it. Raises ConfigError (run_dir), RunFileError if a run holds the lock."""
        make_run_dir(self._path.parent)
        with usable(self._path):
            file = self._file = self._path.open("a+b", buffering=0)  # NFS locks only files that are open for writing
            file.seek(0)
            holder = _holder(file.read())
        try:
            _lock(file)
        except (BlockingIOError, PermissionError):
            self.close()
            raise RunFileError(
                f"another run trains in {self._path.parent}: {holder or 'an unknown process'}. Two runs would delete "
                "each other's checkpoints: wait for its end, stop it, or set another run_dir"
            ) from None
        except OSError as error:
            log.warning(
                "%s cannot be locked: %s. Nothing keeps a second run out of this directory%s",
                self._path,
                error.strerror or error,
                f"; {holder} has not reported its end: if it still runs, stop one of the two" if holder else "",
            )
        else:
            if holder and f" on {socket.gethostname()}," not in holder:
                log.warning("%s did not end properly in %s; if it still runs, stop it", holder, self._path.parent)
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        with usable(self._path):
            file.truncate(0)
            file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode())
        self._is_held = True

    @property
    def is_held(self) -> bool:
        """Whether `take` has returned and neither release nor close was called."""
        return self._is_held

    def release(self) -> None:
        """Record that the run has ended, and release the lock. Does nothing if it was not taken."""
        if self._file:
            with suppress(OSError):
                self._file.truncate(0)
        self.close()

    def close(self) -> None:
        self._is_held = False
        if self._file:
            self._file.close()
            self._file = None


def _lock(file: IO[bytes]) -> None:
    """Raises as flock does. It tries for a moment, because `is_locked` may hold a lock of its own."""
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_TRY_AGAIN_S)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(path: Path) -> bool:
    """Whether a run holds this lock now, as far as this machine can see. It disturbs no run."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no file, or a file system without locks
        return False
    return False


def holder_of(path: Path) -> str:
    """Who holds or held this lock without a release; empty if nobody."""
    try:
        return _holder(path.read_bytes())
    except OSError:
        return ""


_LOCKS: WeakSet[RunLock] = WeakSet()


def _forget_locks() -> None:
    """In a forked process: close the inherited files, or it would keep the locks after the run is dead."""
    for lock in list(_LOCKS):
        lock.close()


os.register_at_fork(after_in_child=_forget_locks)


def _holder(record: bytes) -> str:
    """Who wrote this record; empty if there is none."""
    try:
        known = json.loads(record)
        is_this_one = (known["host"], known["pid"]) == (socket.gethostname(), os.getpid())
        said = f"process {known['pid']} on {known['host']}, since {known['since']}"
    except (ValueError, TypeError, KeyError):
        return ""
    return said + (THIS_ONE if is_this_one else "")


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """Raises RunFileError for an error of the system within the block. path: what it reads or writes."""
    try:
        yield
    except OSError as error:
        raise RunFileError(
            f"{path} cannot be written or read: {error.strerror or error}; the same command continues from the last "
            "checkpoint once it can be"
        ) from error

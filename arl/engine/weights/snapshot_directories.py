"""Where snapshots lie on their way to servers: in memory while that reaches all of them, else in the run directory."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from arl.api.errors import TransportError
from arl.api.train_engine import WeightSource
from arl.runtime.http.server import is_here

_RAM = Path("/dev/shm")
_LOCK = ".lock"

logger = logging.getLogger(__name__)


@runtime_checkable
class RemoteEngine(Protocol):
    """A train engine whose snapshots another process writes, perhaps on another machine."""

    def unseen(self, directory: Path) -> str | None:
        """A sentence if that process does not see this process's directory; None if it does."""
        ...


class SnapshotPlaces:
    """A directory of this process's own in the place for new snapshots, and those in the places before.

    Without a directory that the settings name, snapshots go to /dev/shm, which is memory, as long as it has room, every
    server is on this machine, and the process that writes snapshots shares it; then to run_dir/weights.
    """

    def __init__(
        self,
        directory: Path | None,
        run_dir: Path,
        engine: WeightSource | None,
        servers: Iterable[str],
        setting: str = "weights.directory",
    ) -> None:
        """servers: base URLs. setting: what errors call `directory`. Raises TransportError if the engine shares none of
        the places with this process."""
        self.setting = setting
        self._fallback = None if directory is not None else Path(run_dir).absolute() / "weights"
        choices = [directory or self._fallback]
        if directory is None and os.access(_RAM, os.W_OK) and _RAM.is_dir():
            if far := next((server for server in servers if not is_here(server)), None):
                logger.info("%s is on another machine: weights go to %s", far, self._fallback)
            else:
                choices.insert(0, _RAM)
        self._homes = [_home(engine, [Path(choice).absolute() for choice in choices if choice is not None], setting)]

    @property
    def home(self) -> Path:
        """The parent of new snapshots."""
        return self._homes[-1].path

    def is_memory(self, home: Path) -> bool:
        """Whether this parent of snapshots is in memory, and there is another place."""
        return self._fallback is not None and home.parent == _RAM

    def has_room(self, num_bytes: int) -> bool:
        """Whether memory has room for another snapshot of this size. True if new ones go to a disk, which says so."""
        return not self.is_memory(self.home) or _room(_RAM) >= num_bytes

    def leave_memory(self, reason: str) -> None:
        """Put later snapshots into the run directory. Those in memory stay until `remove`: servers may need them."""
        logger.warning("%s: weights go to %s from now on", reason, self._fallback)
        if self._fallback is not None:
            self._homes.append(_home_in(self._fallback, self.setting))

    def remedy(self, home: Path) -> str:
        """The setting to change if a server does not see this parent of snapshots."""
        settings = f"run_dir or {self.setting}" if home.parent == self._fallback else self.setting
        other = ", or weights.transport=distributed" if self.setting == "weights.directory" else ""
        return f"set {settings} to storage that both see{other}"

    def remove(self) -> None:
        """Remove everything. Idempotent."""
        for home in self._homes:
            home.remove()


def _home(engine: WeightSource | None, choices: list[Path], setting: str) -> OwnDirectory:
    """A directory in the first place that the engine and this process share. Raises TransportError without one."""
    sentence: str | None = None
    for place in choices:
        home = _home_in(place, setting)
        sentence = engine.unseen(home.path) if isinstance(engine, RemoteEngine) else None
        if sentence is None:
            return home
        home.remove()
    raise TransportError(f"{sentence}; set {setting} to a place that this machine, that one and servers see")


def _home_in(base: Path, setting: str) -> OwnDirectory:
    try:
        home = OwnDirectory(base, f"arl-weights-{socket.gethostname()}-", f"{os.getpid()}-")
        home.path.chmod(0o755)  # servers may run as someone else
    except OSError as error:
        raise TransportError(f"cannot write weights to {base}: {error}; set a writable {setting}") from error
    return home


class OwnDirectory:
    """This process's directory below `base`, with a lock that ends with the process.

    Making one removes the directories of processes that died. Raises OSError.
    """

    def __init__(self, base: Path, prefix: str, label: str = "") -> None:
        """prefix: begins the names of this host's directories of this kind. label: follows it here, such as 123-."""
        base.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(base, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix + label, dir=base))
        # Lock the file before it gets its name, so that nobody sees it unlocked.
        unnamed = self.path / f"{_LOCK}.new"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o644)
        with suppress(OSError):  # some shared file systems have no locks
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            unnamed.rename(self.path / _LOCK)
        _OWN.add(self)

    def remove(self) -> None:
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            self.forget()

    def forget(self) -> None:
        """Close the lock file. A forked process does so at once, or it would keep the lock of a dead parent."""
        os.close(self._lock)
        self._lock = -1
        _OWN.discard(self)


_OWN: set[OwnDirectory] = set()
os.register_at_fork(after_in_child=lambda: [directory.forget() for directory in list(_OWN)])


def _remove_leftovers(base: Path, prefix: str) -> None:
    """Remove directories of this host whose processes no longer hold the lock."""
    for path in base.glob(f"{prefix}*"):
        if not re.fullmatch(r"(\d+-)?\w+", path.name.removeprefix(prefix)):
            continue  # it belongs to a host whose name begins with this host's; its locks may be invisible here
        try:
            lock = os.open(path / _LOCK, os.O_RDWR)
        except OSError:
            continue  # it is another user's, or is being made
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # its process is alive
        finally:
            os.close(lock)


def _room(directory: Path) -> int:
    """Bytes that fit into a directory in memory: its free space or the available memory, whichever is smaller."""
    free = shutil.disk_usage(directory).free
    meminfo = Path("/proc/meminfo").read_text().splitlines()
    available_kib = next((int(line.split()[1]) for line in meminfo if line.startswith("MemAvailable")), free // 1024)
    return min(free, available_kib * 1024)

"""DiskTransport: weights travel to the servers as model directories, by default in memory and not on a disk."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from arl.api.engine import (
    DiskWeights,
    InferenceEngine,
    Snapshot,
    TrainEngine,
    UpdateStats,
    WeightServer,
    WeightUpdate,
)
from arl.api.engine_config import WeightFilesConfig
from arl.api.errors import TransportError

_RAM = Path("/dev/shm")
_LOCK = ".lock"

UpdateT = TypeVar("UpdateT", bound="WrittenWeights")
ResultT = TypeVar("ResultT")
ArgsT = TypeVarTuple("ArgsT")

logger = logging.getLogger(__name__)


class DiskTransport:
    """Writes each snapshot to a directory of its own, beside training, and lets the servers load it from there.

    The place is config.directory if it is given, else the RAM-backed /dev/shm while it has room, else run_dir/weights.
    There the process has one directory, locked while it lives; the next process removes what killed ones have left. A
    snapshot appears whole or not at all. It stays until a newer one was delivered, or tried, for servers that come back
    after a failure.
    """

    def __init__(self, config: WeightFilesConfig, run_dir: Path) -> None:
        directory = config.directory
        self._fallback = None if directory is not None else Path(run_dir).absolute() / "weights"
        first_choice = directory or _ram_directory() or self._fallback
        self._homes = [_Home(Path(first_choice or run_dir).absolute())]
        self._num_bytes = 0
        self._writer = ThreadPoolExecutor(1, "arl-weights")
        self._updates: list[WrittenWeights] = []

    @property
    def directory(self) -> Path:
        """Where this process's snapshots are."""
        return self._homes[-1].path

    def snapshot(self, engine: TrainEngine) -> WrittenWeights:
        """Copy the weights aside; nothing is written yet."""
        return self._kept(WrittenWeights(engine.snapshot(), self._writer, self._write))

    def _kept(self, update: UpdateT) -> UpdateT:
        self._updates.append(update)
        return update

    async def deliver(self, update: WeightUpdate, engine: InferenceEngine) -> UpdateStats:
        """Bring the servers to `update`, then remove the snapshots before it."""
        try:
            return await engine.update_weights(update)
        finally:
            await asyncio.to_thread(self._prune, update.version)

    def discard(self, update: WeightUpdate) -> None:
        """Let go of a snapshot that will not be delivered. Idempotent."""
        if isinstance(update, WrittenWeights):
            update.discard()
            with suppress(ValueError):  # it was let go of before
                self._updates.remove(update)

    def close(self) -> None:
        """Remove everything. Idempotent."""
        self._writer.shutdown(cancel_futures=True)
        for update in self._updates:
            update.discard()
        self._updates.clear()
        for home in self._homes:
            home.remove()

    @property
    def _in_ram(self) -> bool:
        return self._fallback is not None and self.directory.parent == _RAM

    def _leave_ram(self) -> None:
        """Later snapshots go to the run directory. Those in memory stay until close: servers may still need them."""
        logger.warning("no room in %s: weights go to %s from now on", _RAM, self._fallback)
        if self._fallback is not None:
            self._homes.append(_Home(self._fallback))

    def _write(self, snapshot: Snapshot) -> DiskWeights:
        """Raises TransportError if there is no room."""
        if self._in_ram and _room(_RAM) < self._num_bytes:
            self._leave_ram()
        try:
            return self._write_here(snapshot)
        except Exception as error:
            if not _is_full(error):
                raise
            if not self._in_ram:
                raise TransportError(
                    f"there is no room for version {snapshot.version}'s weights in {self.directory.parent}: {error}; "
                    "free some, or set weights.directory to a place that every server sees"
                ) from error
        self._leave_ram()
        return self._write(snapshot)

    def _write_here(self, snapshot: Snapshot) -> DiskWeights:
        aside = Path(tempfile.mkdtemp(prefix=".writing-", dir=self.directory))
        try:
            self._num_bytes = snapshot.write(aside / "model")
            target = self.directory / f"version-{snapshot.version}-{aside.name.rpartition('-')[2]}"
            (aside / "model").rename(target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return DiskWeights(version=snapshot.version, directory=target, num_bytes=self._num_bytes)

    def _prune(self, version: int) -> None:
        for old in [update for update in self._updates if update.version < version]:
            self.discard(old)


class WrittenWeights:
    """A WeightUpdate that is written when the first server prepares for it, once for all of them."""

    def __init__(
        self, snapshot: Snapshot, writer: ThreadPoolExecutor, write: Callable[[Snapshot], DiskWeights]
    ) -> None:
        self.version = snapshot.version
        self._snapshot = snapshot
        self._writer = writer
        self._write = write
        self._written: Future[DiskWeights] | None = None

    @property
    def adapter(self) -> str | None:
        return None

    @property
    def directory(self) -> Path:
        """Where it was written. Raises TransportError before it was."""
        if (written := self._result()) is None:
            raise TransportError(f"version {self.version} was not written; prepare comes before load")
        return written.directory

    @property
    def num_bytes(self) -> int:
        written = self._result()
        return written.num_bytes if written else 0

    async def prepare(self, server: WeightServer) -> None:
        """Wait until the directory is there. Raises TransportError if it could not be written."""
        if self._written is None:
            self._written = self._submit(self._write_and_release)
        # Shielded: one server that gives up must not keep the others from it.
        await asyncio.shield(asyncio.wrap_future(self._written))

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None:
        await server.load_directory(self.directory, version=self.version, flush_cache=flush_cache)

    def discard(self) -> None:
        """Free the memory, and remove the directory."""
        self._snapshot.release()
        if (written := self._result()) is not None:
            shutil.rmtree(written.directory, ignore_errors=True)

    def _submit(self, work: Callable[[*ArgsT], ResultT], *args: *ArgsT) -> Future[ResultT]:
        """Run it on the thread that writes snapshots."""
        try:
            return self._writer.submit(work, *args)
        except RuntimeError as error:
            raise TransportError("the transport was closed") from error

    def _write_and_release(self) -> DiskWeights:
        try:
            return self._write(self._snapshot)
        finally:
            self._snapshot.release()

    def _result(self) -> DiskWeights | None:
        if self._written is None or not self._written.done() or self._written.cancelled() or self._written.exception():
            return None
        return self._written.result()


class _Home:
    """This process's directory below `base`, named by host and marked by a lock that dies with the process."""

    def __init__(self, base: Path) -> None:
        prefix = f"arl-weights-{socket.gethostname()}-"
        try:
            base.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(base, prefix)
            self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=base))
        except OSError as error:
            raise TransportError(
                f"weights can't be written to {base}: {error}; set weights.directory to a place that can be written"
            ) from error
        self.path.chmod(0o755)  # servers may run as someone else
        # Locked before it has its name: nobody ever sees a lock that is still to be taken.
        unnamed = self.path / f"{_LOCK}.new"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o644)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / _LOCK)

    def remove(self) -> None:
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _remove_leftovers(base: Path, prefix: str) -> None:
    """Remove the directories of this host's processes that no longer hold their lock."""
    for path in base.glob(f"{prefix}*"):
        if not re.fullmatch(r"\d+-\w+", path.name.removeprefix(prefix)):
            continue  # of a host whose name begins with this one's, and whose locks may not be seen here
        try:
            lock = os.open(path / _LOCK, os.O_RDWR)
        except OSError:
            continue  # someone else's, or just being made: not ours to judge
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue  # its process lives
        finally:
            os.close(lock)


def _ram_directory() -> Path | None:
    return _RAM if os.access(_RAM, os.W_OK) and _RAM.is_dir() else None


def _room(directory: Path) -> int:
    """Bytes that fit into a RAM-backed directory: the smaller of its free space and the available memory."""
    free = shutil.disk_usage(directory).free
    meminfo = Path("/proc/meminfo").read_text().splitlines()
    available_kib = next((int(line.split()[1]) for line in meminfo if line.startswith("MemAvailable")), free // 1024)
    return min(free, available_kib * 1024)


def _is_full(error: Exception) -> bool:
    """Safetensors reports a full disk as an error of its own, which quotes the system's."""
    return (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in str(error)

"""DiskTransport: servers load weights from directories, which are in memory unless that is full.

snapshot --written--> model directory --update_weights_from_disk--> paused server
         --written--> adapter directory --load_lora_adapter NAME-vT--> server, beside what it generates
"""

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
from typing import Any, NoReturn, Protocol, TypeVar, TypeVarTuple, runtime_checkable

from arl.api.engine import DiskWeights, InferenceEngine, Snapshot, UpdateStats, WeightServer, WeightSource, WeightUpdate
from arl.api.engine_config import AdapterWeightsConfig, WeightFilesConfig
from arl.api.errors import ServerError, ServerFailedError, TransportError
from arl.api.types import new_id

_RAM = Path("/dev/shm")
_LOCK = ".lock"

UpdateT = TypeVar("UpdateT", bound="WrittenWeights")
ResultT = TypeVar("ResultT")
ArgsT = TypeVarTuple("ArgsT")

logger = logging.getLogger(__name__)


@runtime_checkable
class AdapterEngine(Protocol):
    """A train engine that can copy its adapters without the large model, which does not change."""

    def snapshot_adapter(self) -> Snapshot:
        """A snapshot that writes a directory in peft's format. Raises ConfigError without train.lora."""
        ...


@runtime_checkable
class RemoteEngine(Protocol):
    """A train engine whose snapshots another process writes, perhaps on another machine."""

    def unseen(self, directory: Path) -> str | None:
        """A sentence if that process does not see this process's directory; None if it does."""
        ...


class DiskTransport:
    """Writes each snapshot to a directory of its own, beside training, and lets the servers load it from there.

    Snapshots go to config.directory if it is set. Else they go to /dev/shm, which is memory, as long as it has room and
    the process that writes them shares it; else to run_dir/weights. Each process has one directory there and locks it
    while it lives. The next process removes the directories of processes that were killed. A snapshot appears whole or
    not at all. It stays until arl has delivered a newer one, or has tried to: a server that recovers loads it.

    With AdapterWeightsConfig the snapshots are adapters. Each version of each run has a unique name, so nothing can
    mistake one adapter for another. Version 0 is an adapter too (B is 0).
    """

    def __init__(self, config: WeightFilesConfig, run_dir: Path, engine: WeightSource | None = None) -> None:
        """engine: takes the snapshots. Raises TransportError if it shares none of these places with this process."""
        directory = config.directory
        self._fallback = None if directory is not None else Path(run_dir).absolute() / "weights"
        choices = (directory, None if directory else _ram_directory(), self._fallback)
        self._homes = [_home(engine, [Path(choice).absolute() for choice in choices if choice is not None])]
        self._adapters = f"arl-{new_id()[:12]}" if isinstance(config, AdapterWeightsConfig) else None
        self._num_bytes = 0
        self._writer = ThreadPoolExecutor(1, "arl-weights")
        self._updates: list[WrittenWeights] = []

    @property
    def directory(self) -> Path:
        """The parent of new snapshots."""
        return self._homes[-1].path

    def snapshot(self, engine: WeightSource) -> WrittenWeights:
        """Copy the weights aside; nothing is written yet. Raises TransportError if the engine has no adapters."""
        if self._adapters is None:
            return self._kept(WrittenWeights(self, engine.snapshot()))
        if not isinstance(engine, AdapterEngine):
            what = type(engine).__name__
            raise TransportError(f"{what} has no adapters to publish; set train.lora, or weights.transport=disk")
        snapshot = engine.snapshot_adapter()
        return self._kept(WrittenWeights(self, snapshot, adapter=f"{self._adapters}-v{snapshot.version}"))

    def _kept(self, update: UpdateT) -> UpdateT:
        self._updates.append(update)
        return update

    async def deliver(self, update: WeightUpdate, engine: InferenceEngine) -> UpdateStats:
        """Bring the servers to `update`; then remove older snapshots, without waiting for that.

        Raises TransportError if the update cannot be written. Servers and older snapshots are untouched then.
        """
        if isinstance(update, WrittenWeights):
            await update.on_disk()
        try:
            return await engine.update_weights(update)
        finally:
            with suppress(TransportError):  # `close` came first, and has removed everything
                self.submit(self._prune, update.version)

    def discard(self, update: WeightUpdate) -> None:
        """Release a snapshot that will not be delivered. Idempotent."""
        if isinstance(update, WrittenWeights):
            update.discard()
            with suppress(ValueError):  # already released
                self._updates.remove(update)

    def close(self) -> None:
        """Remove everything. Idempotent."""
        self._writer.shutdown(cancel_futures=True)
        for update in self._updates:
            update.discard()
        self._updates.clear()
        for home in self._homes:
            home.remove()

    def submit(self, work: Callable[[*ArgsT], ResultT], *args: *ArgsT) -> Future[ResultT]:
        """Run `work` on the thread that writes snapshots. Raises TransportError after `close`."""
        return submitted(self._writer, work, *args)

    def write(self, snapshot: Snapshot, adapter: str | None) -> DiskWeights:
        """Write a snapshot on the calling thread. Raises TransportError if there is no room."""
        if self._in_ram and _room(_RAM) < self._num_bytes:
            self._leave_ram()
        try:
            return self._write_here(snapshot, adapter)
        except Exception as error:  # each writer has its own error for a full disk
            if not _is_full(error):
                raise
            if not self._in_ram:
                raise TransportError(
                    f"there is no room for version {snapshot.version}'s weights in {self.directory.parent}: {error}; "
                    "free some, or set weights.directory to a place that every server sees"
                ) from error
        self._leave_ram()
        return self.write(snapshot, adapter)

    @property
    def _in_ram(self) -> bool:
        return self._fallback is not None and self.directory.parent == _RAM

    def _leave_ram(self) -> None:
        """Write later snapshots to the run directory. Those in memory stay until close: servers may need them."""
        logger.warning("no room in %s: weights go to %s from now on", _RAM, self._fallback)
        if self._fallback is not None:
            self._homes.append(_home_in(self._fallback))

    def _write_here(self, snapshot: Snapshot, adapter: str | None) -> DiskWeights:
        target = self.directory / f"version-{snapshot.version}-{new_id()[:12]}"
        try:
            self._num_bytes = snapshot.write(target)
        except BaseException:  # half a snapshot must not fill the memory
            shutil.rmtree(target, ignore_errors=True)
            raise
        return DiskWeights(version=snapshot.version, directory=target, num_bytes=self._num_bytes, adapter=adapter)

    def _prune(self, version: int) -> None:
        for old in [update for update in self._updates if update.version < version]:
            self.discard(old)


def submitted(pool: ThreadPoolExecutor, work: Callable[[*ArgsT], ResultT], *args: *ArgsT) -> Future[ResultT]:
    """Submit work to a transport's threads. Raises TransportError if the transport was closed."""
    try:
        return pool.submit(work, *args)
    except RuntimeError as error:
        raise TransportError("the transport was closed") from error


async def shared(work: Future[ResultT]) -> ResultT:
    """The result of a transport's work, which goes on for the other servers if one of them gives up."""
    waiting = asyncio.wrap_future(work)
    waiting.add_done_callback(look_at)
    return await asyncio.shield(waiting)


def look_at(done: asyncio.Future[Any]) -> None:
    """Retrieve the error, or asyncio would report one that nobody awaits any more."""
    if not done.cancelled():
        done.exception()


class WrittenWeights:
    """A WeightUpdate that is written once for all servers, before the first of them is touched."""

    def __init__(self, transport: DiskTransport, snapshot: Snapshot, *, adapter: str | None = None) -> None:
        self.version = snapshot.version
        self.adapter = adapter
        self._transport = transport
        self._snapshot = snapshot
        self._writing: Future[DiskWeights] | None = None

    @property
    def written(self) -> DiskWeights:
        """Raises TransportError unless it has been written."""
        if (written := self._result()) is None:
            raise TransportError(f"version {self.version} was not written; call prepare before load")
        return written

    @property
    def directory(self) -> Path:
        return self.written.directory

    @property
    def num_bytes(self) -> int:
        written = self._result()
        return written.num_bytes if written else 0

    async def prepare(self, server: WeightServer) -> None:
        """Wait until it is written. A server loads an adapter here already. Raises ServerError, TransportError."""
        written = await self.on_disk()
        try:
            await written.prepare(server)
        except ServerError as error:
            _explain(error, server, written.directory)

    async def on_disk(self) -> DiskWeights:
        """Wait until it is written. The first call begins to write. Raises TransportError."""
        if self._writing is None:
            self._writing = self._transport.submit(self._write_and_release)
        return await shared(self._writing)

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None:
        try:
            await self.written.load(server, flush_cache=flush_cache)
        except ServerError as error:
            _explain(error, server, self.directory)

    def discard(self) -> None:
        self._snapshot.release()
        if (written := self._result()) is not None:
            shutil.rmtree(written.directory, ignore_errors=True)

    def _write_and_release(self) -> DiskWeights:
        try:
            return self._transport.write(self._snapshot, self.adapter)
        finally:
            self._snapshot.release()

    def _result(self) -> DiskWeights | None:
        writing = self._writing
        if writing is None or not writing.done() or writing.cancelled() or writing.exception():
            return None
        return writing.result()


def _explain(error: ServerError, server: WeightServer, directory: Path) -> NoReturn:
    """Raise the error again. If the server refused, add which directory it must see: only it can check that."""
    if isinstance(error, ServerFailedError):
        raise error
    raise ServerError(
        f"{error}. If {server.address} does not see {directory.parent} of this machine ({socket.gethostname()}), set "
        "weights.directory to a place that both see, or weights.transport=distributed"
    ) from error


def _home(engine: WeightSource | None, choices: list[Path]) -> OwnDirectory:
    """A directory in the first place that the engine and this process share. Raises TransportError without one."""
    sentence: str | None = None
    for place in choices:
        home = _home_in(place)
        sentence = engine.unseen(home.path) if isinstance(engine, RemoteEngine) else None
        if sentence is None:
            return home
        home.remove()
    raise TransportError(f"{sentence}; set weights.directory to a place that this machine, that one and servers see")


def _home_in(base: Path) -> OwnDirectory:
    try:
        home = OwnDirectory(base, f"arl-weights-{socket.gethostname()}-", f"{os.getpid()}-")
        home.path.chmod(0o755)  # servers may run as someone else
    except OSError as error:
        raise TransportError(f"cannot write weights to {base}: {error}; set a writable weights.directory") from error
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


def _ram_directory() -> Path | None:
    return _RAM if os.access(_RAM, os.W_OK) and _RAM.is_dir() else None


def _room(directory: Path) -> int:
    """Bytes that fit into a directory in memory: its free space or the available memory, whichever is smaller."""
    free = shutil.disk_usage(directory).free
    meminfo = Path("/proc/meminfo").read_text().splitlines()
    available_kib = next((int(line.split()[1]) for line in meminfo if line.startswith("MemAvailable")), free // 1024)
    return min(free, available_kib * 1024)


def _is_full(error: Exception) -> bool:
    """Safetensors raises its own error for a full disk, which quotes the system's."""
    return (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in str(error)

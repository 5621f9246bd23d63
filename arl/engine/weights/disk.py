"""DiskTransport: servers load weights from directories, in memory if that reaches all of them.

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
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar, TypeVarTuple, runtime_checkable

from arl.api.engine import DiskWeights, InferenceEngine, UpdateStats, WeightServer, WeightUpdate
from arl.api.errors import ServerError, ServerFailedError, TransportError, UnseenDirectoryError
from arl.api.settings.engines import AdapterWeightsConfig, WeightFilesConfig
from arl.api.train_engine import Snapshot, WeightSource
from arl.api.types import new_id
from arl.runtime.http.server import is_here
from arl.runtime.threads import offload

UpdateT = TypeVar("UpdateT", bound="WrittenWeights")
ResultT = TypeVar("ResultT")
ArgsT = TypeVarTuple("ArgsT")

_RAM = Path("/dev/shm")
_LOCK = ".lock"

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

    A snapshot appears whole or not at all. It stays until arl has delivered a newer one, or has tried to: a server that
    recovers loads it. Without a directory that the settings name, snapshots go to /dev/shm, which is memory, as long as
    it has room, every server is on this machine, and the process that writes snapshots shares it; then to
    run_dir/weights.

    With AdapterWeightsConfig the snapshots are adapters. Each version of each run has a unique name, so nothing can
    mistake one adapter for another. Version 0 is an adapter too (B is 0).
    """

    def __init__(
        self, config: WeightFilesConfig, run_dir: Path, engine: WeightSource | None = None, servers: Iterable[str] = ()
    ) -> None:
        """engine: takes the snapshots. servers: base URLs of those that will load them, as far as they are known.

        Raises TransportError if the engine shares no place for snapshots with this process.
        """
        place = Path(config.directory or Path(run_dir, "weights")).absolute()
        self.fallback = None if config.directory is not None else place
        """Where snapshots go that memory does not take."""
        choices = [place]
        if self.fallback is not None and os.access(_RAM, os.W_OK) and _RAM.is_dir():
            if far := next((server for server in servers if not is_here(server)), None):
                logger.info("%s is on another machine: weights go to %s", far, place)
            else:
                choices.insert(0, _RAM)
        self._homes: list[OwnDirectory] = []
        """The parent of new snapshots is the last."""
        while not self._homes:
            home = _home_in(choices.pop(0))
            sentence = engine.unseen(home.path) if isinstance(engine, RemoteEngine) else None
            if sentence is None:
                self._homes.append(home)
                continue
            home.remove()
            if not choices:
                what = "a place that this machine, that one and servers see"
                raise TransportError(f"{sentence}; set weights.directory to {what}")
        self._adapters = f"arl-{new_id()[:12]}" if isinstance(config, AdapterWeightsConfig) else None
        self._num_bytes = 0
        self._writer = ThreadPoolExecutor(1, "arl-weights")
        self._updates: list[WrittenWeights] = []

    @property
    def directory(self) -> Path:
        """The parent of new snapshots."""
        return self._homes[-1].path

    def is_memory(self, directory: Path) -> bool:
        """Whether this parent of snapshots is in memory, and there is another place."""
        return self.fallback is not None and directory.parent == _RAM

    def leave_memory(self, reason: str) -> None:
        """Put later snapshots into the run directory. Those in memory stay until `close`: servers may need them."""
        logger.warning("%s: weights go to %s from now on", reason, self.fallback)
        if self.fallback is not None:
            self._homes.append(_home_in(self.fallback))

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
            older = [old for old in self._updates if old.version < update.version]
            with suppress(TransportError):  # `close` came first, and has removed everything
                self.submit(lambda: [self.discard(old) for old in older])

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
        no_room = f"no room in {self.directory.parent}"
        if self.is_memory(self.directory) and _room(_RAM) < self._num_bytes:
            self.leave_memory(no_room)
        target = self.directory / f"version-{snapshot.version}-{new_id()[:12]}"
        is_memory = self.is_memory(self.directory)
        try:
            self._num_bytes = snapshot.write(target)
            if target.is_dir() or not is_memory:
                return DiskWeights(
                    version=snapshot.version, directory=target, num_bytes=self._num_bytes, adapter=adapter
                )
            reason = f"the weights of version {snapshot.version} were written in another machine's memory"
        except BaseException as error:
            shutil.rmtree(target, ignore_errors=True)  # half a snapshot must not fill the memory
            is_unseen = isinstance(error, UnseenDirectoryError)  # ranks that were replaced are on another machine
            # Safetensors raises its own error for a full disk, which quotes the system's.
            is_full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
            if is_full and not is_memory:
                raise TransportError(
                    f"there is no room for version {snapshot.version}'s weights in {self.directory.parent}: {error}; "
                    "free some, or set weights.directory to a place that every server sees"
                ) from error
            if not is_memory or not (is_full or is_unseen):
                raise
            reason = str(error) if is_unseen else no_room
        self.leave_memory(reason)
        return self.write(snapshot, adapter)


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
        self._writing: Future[None] | None = None
        self._written: list[DiskWeights] = []
        """Copies of the same weights: servers load the last."""

    @property
    def written(self) -> DiskWeights:
        """Raises TransportError unless it has been written."""
        if not self._written:
            raise TransportError(f"version {self.version} was not written; call prepare before load")
        return self._written[-1]

    @property
    def directory(self) -> Path:
        return self.written.directory

    @property
    def num_bytes(self) -> int:
        return self._written[-1].num_bytes if self._written else 0

    async def prepare(self, server: WeightServer) -> None:
        """Wait until it is written where the server sees it, as far as that can be known; load an adapter.

        Raises ServerError, TransportError.
        """
        written = await self.on_disk()
        if self._transport.is_memory(written.directory.parent) and not await offload(is_here, server.address):
            written = await shared(self._transport.submit(self._copied_from_memory))
        try:
            await written.prepare(server)
        except ServerError as error:
            self._explain(error, server)

    async def on_disk(self) -> DiskWeights:
        """Wait until it is written. The first call begins to write. Raises TransportError."""

        def work() -> None:
            try:
                self._written.append(self._transport.write(self._snapshot, self.adapter))
            finally:
                self._snapshot.release()

        if self._writing is None:
            self._writing = self._transport.submit(work)
        await shared(self._writing)
        return self.written

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None:
        try:
            await self.written.load(server, flush_cache=flush_cache)
        except ServerError as error:
            self._explain(error, server)

    def discard(self) -> None:
        self._snapshot.release()
        for written in self._written:
            shutil.rmtree(written.directory, ignore_errors=True)

    def _copied_from_memory(self) -> DiskWeights:
        """A copy in the run directory, for the thread that writes: the first server that needs it has it made.

        Raises TransportError if it cannot be made.
        """
        transport, written = self._transport, self.written
        if not transport.is_memory(written.directory.parent):
            return written
        if transport.is_memory(transport.directory):
            transport.leave_memory("a server is on another machine")
        target = transport.directory / written.directory.name
        try:
            shutil.copytree(written.directory, target)
        except OSError as error:  # a full disk is shutil.Error, which is one
            shutil.rmtree(target, ignore_errors=True)
            raise TransportError(
                f"cannot copy the weights of version {written.version} to {target}: {error}"
            ) from error
        self._written.append(replace(written, directory=target))
        return self.written

    def _explain(self, error: ServerError, server: WeightServer) -> NoReturn:
        """Raise the error again. If the server refused, add which directory it must see: only it can check that."""
        if isinstance(error, ServerFailedError):
            raise error
        home = self.directory.parent
        what = f"If {server.address} does not see {home} of this machine ({socket.gethostname()}), "
        setting = "run_dir or weights.directory" if home.parent == self._transport.fallback else "weights.directory"
        what += f"set {setting} to storage that both see, or weights.transport=distributed"
        raise ServerError(f"{error}. {what}") from error


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
        for path in base.glob(f"{prefix}*"):  # leftovers of this host, whose processes no longer hold the lock
            if not re.fullmatch(r"(\d+-)?\w+", path.name.removeprefix(prefix)):
                continue  # it belongs to a host whose name begins with this host's; its locks may be invisible here
            with suppress(OSError):  # another user's, or being made; or its process is alive
                lock = os.open(path / _LOCK, os.O_RDWR)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(lock)
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


def _room(directory: Path) -> int:
    """Bytes that fit into a directory in memory: its free space or the available memory, whichever is smaller."""
    free = shutil.disk_usage(directory).free
    meminfo = Path("/proc/meminfo").read_text().splitlines()
    available_kib = next((int(line.split()[1]) for line in meminfo if line.startswith("MemAvailable")), free // 1024)
    return min(free, available_kib * 1024)

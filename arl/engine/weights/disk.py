"""DiskTransport: servers load weights from directories, in memory if that reaches all of them.

snapshot --written--> model directory --update_weights_from_disk--> paused server
         --written--> adapter directory --load_lora_adapter NAME-vT--> server, beside what it generates
"""

from __future__ import annotations

import asyncio
import errno
import shutil
import socket
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
from arl.engine.weights.snapshot_directories import SnapshotPlaces
from arl.runtime.http.server import is_here
from arl.runtime.threads import offload

UpdateT = TypeVar("UpdateT", bound="WrittenWeights")
ResultT = TypeVar("ResultT")
ArgsT = TypeVarTuple("ArgsT")


@runtime_checkable
class AdapterEngine(Protocol):
    """A train engine that can copy its adapters without the large model, which does not change."""

    def snapshot_adapter(self) -> Snapshot:
        """A snapshot that writes a directory in peft's format. Raises ConfigError without train.lora."""
        ...


class DiskTransport:
    """Writes each snapshot to a directory of its own, beside training, and lets the servers load it from there.

    snapshot_directories.py says where. A snapshot appears whole or not at all. It stays until arl has delivered a newer
    one, or has tried to: a server that recovers loads it.

    With AdapterWeightsConfig the snapshots are adapters. Each version of each run has a unique name, so nothing can
    mistake one adapter for another. Version 0 is an adapter too (B is 0).
    """

    def __init__(
        self,
        config: WeightFilesConfig,
        run_dir: Path,
        engine: WeightSource | None = None,
        servers: Iterable[str] = (),
        *,
        setting: str = "weights.directory",
    ) -> None:
        """engine: takes the snapshots. servers: base URLs of those that will load them, as far as they are known.
        setting: what errors call config.directory.

        Raises TransportError if the engine shares no place for snapshots with this process.
        """
        self.places = SnapshotPlaces(config.directory, run_dir, engine, servers, setting)
        self._adapters = f"arl-{new_id()[:12]}" if isinstance(config, AdapterWeightsConfig) else None
        self._num_bytes = 0
        self._writer = ThreadPoolExecutor(1, "arl-weights")
        self._updates: list[WrittenWeights] = []

    @property
    def directory(self) -> Path:
        """The parent of new snapshots."""
        return self.places.home

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
        self.places.remove()

    def submit(self, work: Callable[[*ArgsT], ResultT], *args: *ArgsT) -> Future[ResultT]:
        """Run `work` on the thread that writes snapshots. Raises TransportError after `close`."""
        return submitted(self._writer, work, *args)

    def write(self, snapshot: Snapshot, adapter: str | None) -> DiskWeights:
        """Write a snapshot on the calling thread. Raises TransportError if there is no room."""
        if not self.places.has_room(self._num_bytes):
            self.places.leave_memory(f"no room in {self.directory.parent}")
        reason = f"no room in {self.directory.parent}"
        try:
            written = self._write_here(snapshot, adapter)
            if written.directory.is_dir() or not self.places.is_memory(self.directory):
                return written
            reason = f"the weights of version {snapshot.version} were written in another machine's memory"
        except UnseenDirectoryError as error:
            if not self.places.is_memory(self.directory):
                raise
            reason = str(error)  # ranks that were replaced are on another machine
        except Exception as error:  # each writer has its own error for a full disk
            if not _is_full(error):
                raise
            if not self.places.is_memory(self.directory):
                raise TransportError(
                    f"there is no room for version {snapshot.version}'s weights in {self.directory.parent}: {error}; "
                    f"free some, or set {self.places.setting} to a place that every server sees"
                ) from error
        self.places.leave_memory(reason)
        return self.write(snapshot, adapter)

    def copy_from_memory(self, written: DiskWeights) -> DiskWeights:
        """A copy in the run directory, on the calling thread. Raises TransportError if it cannot be made."""
        if self.places.is_memory(self.directory):
            self.places.leave_memory("a server is on another machine")
        target = self.directory / written.directory.name
        try:
            shutil.copytree(written.directory, target)
        except OSError as error:  # a full disk is shutil.Error, which is one
            shutil.rmtree(target, ignore_errors=True)
            raise TransportError(
                f"cannot copy the weights of version {written.version} to {target}: {error}"
            ) from error
        return replace(written, directory=target)

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
        if self._transport.places.is_memory(written.directory.parent) and not await offload(is_here, server.address):
            written = await shared(self._transport.submit(self._copied_from_memory))
        try:
            await written.prepare(server)
        except ServerError as error:
            self._explain(error, server)

    async def on_disk(self) -> DiskWeights:
        """Wait until it is written. The first call begins to write. Raises TransportError."""
        if self._writing is None:
            self._writing = self._transport.submit(self._write_and_release)
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

    def _write_and_release(self) -> None:
        try:
            self._written.append(self._transport.write(self._snapshot, self.adapter))
        finally:
            self._snapshot.release()

    def _copied_from_memory(self) -> DiskWeights:
        """For the thread that writes: the first server that needs the copy has it made."""
        if self._transport.places.is_memory(self.directory.parent):
            self._written.append(self._transport.copy_from_memory(self.written))
        return self.written

    def _explain(self, error: ServerError, server: WeightServer) -> NoReturn:
        """Raise the error again. If the server refused, add which directory it must see: only it can check that."""
        if isinstance(error, ServerFailedError):
            raise error
        home = self.directory.parent
        what = f"If {server.address} does not see {home} of this machine ({socket.gethostname()}), "
        what += self._transport.places.remedy(home)
        raise ServerError(f"{error}. {what}") from error


def _is_full(error: Exception) -> bool:
    """Safetensors raises its own error for a full disk, which quotes the system's."""
    return (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in str(error)

"""A server that takes weights in every way, an engine that updates such servers, snapshots of one file, mirrors."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from embedded_server import ServerProcess

from arl.api.engine import TensorSpec, UpdateStats, WeightGroup, WeightUpdate
from arl.api.errors import ServerError
from arl.api.fakes import ScriptedEngine, ScriptedTrainEngine
from arl.engine.weights.delta import Held, MirrorClient
from arl.engine.weights.distributed import byte_size, views
from arl.engine.weights.mirror import build_app, mirror_store
from arl.runtime.http.server import bind, serving

TIMEOUT = timedelta(seconds=30)


@dataclass
class Receiver:
    """A WeightServer of `num_ranks` ranks, which joins groups for real and keeps what it loads and receives.

    `calls` is what it was asked for; `errors` are raised instead, once each.
    """

    address: str = "http://127.0.0.1:1"
    num_ranks: int = 1
    meets_by_id: bool = False
    calls: list[str] = field(default_factory=list[str])
    errors: dict[str, Exception] = field(default_factory=dict[str, Exception])
    names: list[int | str | None] = field(default_factory=list[int | str | None])
    """The version that each load and bucket names, or the adapter."""
    flushes: list[bool] = field(default_factory=list[bool])
    directories: list[Path] = field(default_factory=list[Path])
    files: list[dict[str, bytes]] = field(default_factory=list[dict[str, bytes]])
    """What was in the directories when they were loaded."""
    groups: dict[str, list[dist.ProcessGroupGloo]] = field(default_factory=dict[str, list[dist.ProcessGroupGloo]])
    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if error := self.errors.pop(call, None):
            raise error

    async def load_directory(self, directory: Path, *, version: int, flush_cache: bool) -> None:
        await self.load_adapter(version, directory)
        self.flushes.append(flush_cache)

    async def load_adapter(self, name: int | str, directory: Path) -> None:
        self._note("load")
        self.names.append(name)
        self.directories.append(directory)
        self.files.append(contents(directory))

    async def join_group(self, group: WeightGroup) -> None:
        self._note("join")

        def join(rank: int) -> dist.ProcessGroupGloo:
            store: dist.Store = dist.TCPStore(group.address, group.port, group.world_size, False, timeout=TIMEOUT)
            # As torch's own groups meet; but that keeps one of a name in a process, and the trainer is here too.
            for prefix in (group.name, f"{group.name}/", "cpu/"):
                store = dist.PrefixStore(prefix, store)
            return dist.ProcessGroupGloo(store, rank, group.world_size, TIMEOUT)

        ranks = [asyncio.to_thread(join, rank) for rank in range(1, 1 + self.num_ranks)]
        self.groups[group.name] = await asyncio.gather(*ranks)

    async def leave_group(self, name: str) -> None:
        self._note("leave")
        self.groups.pop(name, None)

    async def begin_update(self) -> None:
        self._note("begin")

    async def receive(
        self, specs: Sequence[TensorSpec], group: WeightGroup, *, version: int | None, flush_cache: bool
    ) -> None:
        self._note("receive")
        num_bytes = sum(map(byte_size, specs))
        ranks = [asyncio.to_thread(receive, rank, num_bytes) for rank in self.groups[group.name]]
        received = await asyncio.gather(*ranks)
        assert all(torch.equal(flat, received[0]) for flat in received)
        self.tensors.update(zip([spec.name for spec in specs], views(specs, received[0]), strict=True))
        self.names.append(version)
        self.flushes.append(flush_cache)

    async def end_update(self) -> None:
        self._note("end")


def receive(rank: dist.ProcessGroupGloo, num_bytes: int) -> torch.Tensor:
    flat = torch.empty(num_bytes, dtype=torch.uint8)
    rank.broadcast([flat], dist.BroadcastOptions()).wait()
    return flat


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


class Servers(ScriptedEngine):
    """Updates each of its servers; raises the last failure if none took the update."""

    def __init__(self, *servers: Any) -> None:
        super().__init__(lambda request: ())
        self.servers = servers
        self.failures: dict[str, ServerError] = {}

    async def update_weights(self, update: WeightUpdate) -> UpdateStats:
        self.failures.clear()
        for server in self.servers:
            try:
                await update.prepare(server)
                await update.load(server, flush_cache=True)
            except ServerError as error:
                self.failures[server.address] = error
        if self.failures and len(self.failures) == len(self.servers):
            raise self.failures.popitem()[1]
        return await super().update_weights(update)


@dataclass
class Weights:
    """A snapshot of one file, in which its version stands. `write` fails half-way where there is an error."""

    version: int
    error: Exception | None = None
    num_writes: int = 0
    is_released: bool = False
    may_write: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_write.set()

    def write(self, directory: Path) -> int:
        self.may_write.wait()
        self.num_writes += 1
        directory.mkdir(parents=True)
        (directory / "half").write_text("x")
        if self.error is not None:
            raise self.error
        return (directory / "weights").write_text(str(self.version))

    def release(self) -> None:
        self.is_released = True


class Exporter(ScriptedTrainEngine):
    """Takes Weights as snapshots and gives each its `error`; `newest` is the last one."""

    error: Exception | None = None
    newest: Weights

    def snapshot(self) -> Weights:
        self.newest = Weights(self.version, self.error)
        return self.newest

    def train(self) -> None:
        self.train_batch([], None)  # type: ignore[arg-type]


class AdapterExporter(Exporter):
    """Has adapters; nobody may ask for its model."""

    def snapshot_adapter(self) -> Weights:
        return super().snapshot()

    def snapshot(self) -> Weights:
        raise NotImplementedError


@dataclass
class Mirror:
    """Where a mirror is, and what it keeps: in a directory of its own below `directory`."""

    directory: Path
    address: str

    @property
    def versions(self) -> list[int]:
        """The versions whose directories have their final names."""
        return sorted(int(path.name.split("-")[1]) for path in self.directory.glob("*/version-*"))

    @property
    def unfinished(self) -> list[Path]:
        return list(self.directory.glob("*/.writing-*"))


async def sent(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def put(client: MirrorClient, pieces: Iterable[bytes]) -> Held:
    """Send a package to a mirror; returns what it holds then."""
    return await client.put(sent(pieces))


@asynccontextmanager
async def mirror_here(directory: Path, api_key: str | None = None) -> AsyncIterator[Mirror]:
    """A mirror in this process."""
    with mirror_store(directory, num_threads=2) as store:
        async with serving(build_app(store, api_key), bind("127.0.0.1", 0)) as port:
            yield Mirror(directory, f"http://127.0.0.1:{port}")


class MirrorProcess(ServerProcess, Mirror):
    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        super().__init__("arl.engine.weights.mirror", "--directory", str(directory), *options)

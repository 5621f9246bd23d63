"""Servers that read what they are told to load, an engine that updates them, and snapshots of one small file."""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arl.api.engine import UpdateStats, WeightUpdate
from arl.api.errors import ServerError
from arl.api.scripted import ScriptedEngine, ScriptedTrainEngine


@dataclass
class Loader:
    """A WeightServer that keeps which directories it was told to load, and what was in their files then."""

    address: str = "http://server"
    num_ranks: int = 1
    refuses: bool = False
    directories: list[Path] = field(default_factory=list[Path])
    files: list[dict[str, bytes]] = field(default_factory=list[dict[str, bytes]])
    names: list[int | str] = field(default_factory=list[int | str])
    """Versions of models and names of adapters."""
    flushes: list[bool] = field(default_factory=list[bool])

    async def load_directory(self, directory: Path, *, version: int, flush_cache: bool) -> None:
        await self.load_adapter(version, directory)
        self.flushes.append(flush_cache)

    async def load_adapter(self, name: int | str, directory: Path) -> None:
        if self.refuses:
            raise ServerError("it does not fit")
        self.names.append(name)
        self.directories.append(directory)
        self.files.append(contents(directory))


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
    """Its snapshots are Weights, of which `error` becomes a part; the newest is `newest`."""

    error: Exception | None = None
    newest: Weights

    def snapshot(self) -> Weights:
        self.newest = Weights(self.version, self.error)
        return self.newest

    def train(self) -> None:
        self.train_batch([], None)  # type: ignore[arg-type]


class AdapterExporter(Exporter):
    """Has adapters, and no model that anyone may ask for."""

    def snapshot_adapter(self) -> Weights:
        return super().snapshot()

    def snapshot(self) -> Weights:
        raise NotImplementedError

"""Snapshots on disk: whole or absent, kept while a server may need them, and gone when nobody does."""

import asyncio
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from arl.api.config import DiskWeightsConfig
from arl.api.engine import UpdateStats, WeightUpdate
from arl.api.errors import ServerError, TransportError
from arl.api.scripted import ScriptedEngine, ScriptedTrainEngine
from arl.api.types import ModelResponse
from arl.engine.weights import disk as module
from arl.engine.weights.disk import DiskTransport


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
        return (directory / "model.safetensors").write_text(str(self.version))

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


@dataclass
class Loader:
    """A WeightServer that keeps which directories it was told to load."""

    address: str = "http://server"
    num_ranks: int = 1
    loaded: list[tuple[Path, int, bool]] = field(default_factory=list[tuple[Path, int, bool]])

    async def load_directory(self, directory: Path, *, version: int, flush_cache: bool) -> None:
        self.loaded.append((directory, version, flush_cache))


class Servers(ScriptedEngine):
    """Updates a server as engines do, but for pausing it."""

    def __init__(self) -> None:
        super().__init__(silent)
        self.server = Loader()

    async def update_weights(self, update: WeightUpdate) -> UpdateStats:
        await update.prepare(self.server)
        await update.load(self.server, flush_cache=False)
        return await super().update_weights(update)


class BrokenEngine(ScriptedEngine):
    async def update_weights(self, update: WeightUpdate) -> UpdateStats:
        await update.prepare(Loader())
        raise ServerError("no server took it")


def silent(request: object) -> ModelResponse:
    raise NotImplementedError


@pytest.fixture
def engine() -> Exporter:
    return Exporter()


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[DiskTransport]:
    transport = DiskTransport(DiskWeightsConfig(directory=tmp_path / "weights"), tmp_path / "run")
    yield transport
    transport.close()


async def prepared(transport: DiskTransport, engine: Exporter) -> Path:
    """The directory of a snapshot of the engine."""
    update = transport.snapshot(engine)
    await update.prepare(Loader())
    return update.directory


async def test_servers_load_an_absolute_directory_with_the_engines_version(
    transport: DiskTransport, engine: Exporter
) -> None:
    engine.train()
    update = transport.snapshot(engine)
    assert (update.version, update.num_bytes) == (1, 0)
    server = Loader()
    await update.prepare(server)
    await update.load(server, flush_cache=True)
    assert server.loaded == [(update.directory, 1, True)]
    assert update.directory.is_absolute()
    assert (update.directory / "model.safetensors").read_text() == "1"
    assert update.num_bytes == 1


async def test_it_is_written_once_beside_training_however_many_servers_prepare(
    transport: DiskTransport, engine: Exporter
) -> None:
    update = transport.snapshot(engine)
    weights = engine.newest
    weights.may_write.clear()
    first = asyncio.create_task(update.prepare(Loader()))
    others = [asyncio.create_task(update.prepare(Loader())) for _ in range(3)]
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    assert not any(other.done() for other in others)
    weights.may_write.set()
    await asyncio.gather(*others)
    assert (weights.num_writes, weights.is_released) == (1, True)


async def test_snapshots_before_a_delivered_one_are_removed_and_it_stays(
    transport: DiskTransport, engine: Exporter
) -> None:
    servers = Servers()
    first = transport.snapshot(engine)
    await transport.deliver(first, servers)
    removed = first.directory
    assert removed.is_dir()
    engine.train()
    second = transport.snapshot(engine)
    engine.train()
    third = transport.snapshot(engine)
    await transport.deliver(second, servers)
    assert servers.version == 1
    assert not removed.exists()
    await third.prepare(Loader())
    assert [update.directory.is_dir() for update in (second, third)] == [True, True]


async def test_a_snapshot_that_was_skipped_lets_go_of_its_memory(transport: DiskTransport, engine: Exporter) -> None:
    transport.snapshot(engine)
    skipped = engine.newest
    engine.train()
    await transport.deliver(transport.snapshot(engine), Servers())
    assert (skipped.num_writes, skipped.is_released) == (0, True)


def test_a_discarded_snapshot_lets_go_of_its_memory_at_once(transport: DiskTransport, engine: Exporter) -> None:
    kept, discarded = transport.snapshot(engine), transport.snapshot(engine)
    for _ in range(2):
        transport.discard(discarded)
    assert engine.newest.is_released
    assert transport._updates == [kept]


async def test_a_delivery_that_failed_stays_for_servers_that_come_back(
    transport: DiskTransport, engine: Exporter
) -> None:
    first = await prepared(transport, engine)
    engine.train()
    second = transport.snapshot(engine)
    with pytest.raises(ServerError):
        await transport.deliver(second, BrokenEngine(silent))
    assert second.directory.is_dir()
    assert not first.exists()


async def test_the_same_version_may_be_snapshot_again(transport: DiskTransport, engine: Exporter) -> None:
    assert await prepared(transport, engine) != await prepared(transport, engine)


async def test_a_snapshot_that_fails_half_way_leaves_nothing(transport: DiskTransport, engine: Exporter) -> None:
    engine.error = ValueError("half-way")
    with pytest.raises(ValueError, match="half-way"):
        await prepared(transport, engine)
    assert [path.name for path in transport.directory.iterdir()] == [".lock"]
    assert engine.newest.is_released


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
async def test_a_full_disk_is_named_with_what_to_do(
    transport: DiskTransport, engine: Exporter, error: Exception
) -> None:
    engine.error = error
    update = transport.snapshot(engine)
    for _ in range(2):
        with pytest.raises(TransportError, match=r"no room for version 0's weights in .*weights.*weights\.directory"):
            await update.prepare(Loader())
    with pytest.raises(TransportError, match="was not written"):
        await update.load(Loader(), flush_cache=False)
    assert engine.newest.num_writes == 1


async def test_after_a_full_disk_the_next_version_is_written(transport: DiskTransport, engine: Exporter) -> None:
    engine.error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(TransportError):
        await prepared(transport, engine)
    engine.error = None
    assert (await prepared(transport, engine)).is_dir()


async def test_closing_removes_everything_twice_over(transport: DiskTransport, engine: Exporter) -> None:
    await prepared(transport, engine)
    transport.close()
    assert not transport.directory.exists()
    transport.close()
    with pytest.raises(TransportError, match="closed"):
        await prepared(transport, engine)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TransportError, match=r"can't be written to .*file.*set weights\.directory"):
        DiskTransport(DiskWeightsConfig(directory=tmp_path / "file" / "weights"), tmp_path)


@pytest.mark.parametrize(("has_memory", "place"), [(True, "shm"), (False, "run/weights")])
def test_memory_is_the_default_place_and_the_run_directory_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_memory: bool, place: str
) -> None:
    monkeypatch.setattr(module, "_RAM", tmp_path / "shm")
    if has_memory:
        (tmp_path / "shm").mkdir()
    transport = DiskTransport(DiskWeightsConfig(), tmp_path / "run")
    assert transport.directory.parent == tmp_path / place
    transport.close()
    assert list((tmp_path / place).iterdir()) == []


async def test_when_memory_has_no_room_for_another_snapshot_the_run_directory_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Exporter
) -> None:
    monkeypatch.setattr(module, "_RAM", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    transport = DiskTransport(DiskWeightsConfig(), tmp_path / "run")
    first = await prepared(transport, engine)
    monkeypatch.setattr(module, "_room", lambda directory: 0)
    second = await prepared(transport, engine)
    assert first.is_dir()
    assert second.is_relative_to(tmp_path / "run")
    transport.close()
    assert not first.exists()
    assert not second.exists()


async def test_a_full_memory_directory_gives_way_to_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Exporter
) -> None:
    write = Weights.write

    def write_where_there_is_room(self: Weights, directory: Path) -> int:
        if directory.is_relative_to(tmp_path / "shm"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, directory)

    monkeypatch.setattr(Weights, "write", write_where_there_is_room)
    monkeypatch.setattr(module, "_RAM", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    transport = DiskTransport(DiskWeightsConfig(), tmp_path / "run")
    assert (await prepared(transport, engine)).is_relative_to(tmp_path / "run")
    transport.close()


def test_directories_of_a_host_with_a_longer_name_are_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / f"arl-weights-{socket.gethostname()}-2-1234-abc_1234"
    theirs.mkdir()
    (theirs / ".lock").touch()  # as of a process whose lock is not seen over the network
    DiskTransport(DiskWeightsConfig(directory=tmp_path), tmp_path).close()
    assert theirs.is_dir()


def test_leftovers_of_a_killed_run_are_removed_and_a_living_ones_are_not(tmp_path: Path) -> None:
    script = (
        "import os, sys, pathlib; from arl.api.config import DiskWeightsConfig; "
        "from arl.engine.weights.disk import DiskTransport; "
        "t = DiskTransport(DiskWeightsConfig(directory=pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[1])); "
        "print(t.directory, flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        theirs = Path(child.stdout.readline().strip())
        DiskTransport(DiskWeightsConfig(directory=tmp_path), tmp_path).close()
        assert theirs.is_dir()
        child.kill()
    ours = DiskTransport(DiskWeightsConfig(directory=tmp_path), tmp_path)
    assert not theirs.exists()
    assert ours.directory.is_dir()
    assert str(os.getpid()) in ours.directory.name
    ours.close()

"""Snapshots on disk: whole or absent, kept while a server may need them, and gone when nobody does."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from arl.api import DiskWeights, ModelResponse, ScriptedEngine, ScriptedTrainEngine, UpdateStats, WeightUpdate
from arl.api.config import DiskWeightsConfig
from arl.api.errors import ServerError, TransportError
from arl.engine import transport as module
from arl.engine.transport.disk import DiskTransport


class Exporter(ScriptedTrainEngine):
    """Exports one file, or raises `error` half-way."""

    error: Exception | None = None

    def export(self, directory: Path) -> int:
        directory.mkdir(parents=True)
        (directory / "half").write_text("x")
        if self.error is not None:
            raise self.error
        return (directory / "model.safetensors").write_text(str(self.version))

    def train(self) -> None:
        self.train_batch([], None)  # type: ignore[arg-type]


class BrokenEngine(ScriptedEngine):
    async def update_weights(self, update: WeightUpdate) -> UpdateStats:
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


def test_a_snapshot_is_an_absolute_directory_with_the_engines_version(
    transport: DiskTransport, engine: Exporter
) -> None:
    engine.train()
    update = transport.snapshot(engine)
    assert isinstance(update, DiskWeights)
    assert update.version == 1
    assert update.directory.is_absolute()
    assert (update.directory / "model.safetensors").read_text() == "1"
    assert update.num_bytes == 1


async def test_snapshots_before_a_delivered_one_are_removed_and_it_stays(
    transport: DiskTransport, engine: Exporter
) -> None:
    servers = ScriptedEngine(silent)
    first = transport.snapshot(engine)
    await transport.deliver(first, servers)
    assert first.directory.is_dir()
    engine.train()
    second = transport.snapshot(engine)
    engine.train()
    third = transport.snapshot(engine)
    await transport.deliver(second, servers)
    assert servers.version == 1
    assert not first.directory.exists()
    assert second.directory.is_dir()
    assert third.directory.is_dir()


async def test_a_delivery_that_failed_stays_for_servers_that_come_back(
    transport: DiskTransport, engine: Exporter
) -> None:
    first = transport.snapshot(engine)
    engine.train()
    second = transport.snapshot(engine)
    with pytest.raises(ServerError):
        await transport.deliver(second, BrokenEngine(silent))
    assert second.directory.is_dir()
    assert not first.directory.exists()


def test_the_same_version_may_be_snapshot_again(transport: DiskTransport, engine: Exporter) -> None:
    assert transport.snapshot(engine).directory != transport.snapshot(engine).directory


def test_a_snapshot_that_fails_half_way_leaves_nothing(transport: DiskTransport, engine: Exporter) -> None:
    engine.error = ValueError("half-way")
    with pytest.raises(ValueError, match="half-way"):
        transport.snapshot(engine)
    assert [path.name for path in transport.directory.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_named_with_what_to_do(transport: DiskTransport, engine: Exporter, error: Exception) -> None:
    engine.error = error
    with pytest.raises(TransportError, match=r"no room for version 0's weights in .*weights.*weights\.directory"):
        transport.snapshot(engine)


def test_closing_removes_everything_twice_over(transport: DiskTransport, engine: Exporter) -> None:
    transport.snapshot(engine)
    transport.close()
    assert not transport.directory.exists()
    transport.close()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TransportError, match=r"can't be written to .*file.*set weights\.directory"):
        DiskTransport(DiskWeightsConfig(directory=tmp_path / "file" / "weights"), tmp_path)


def test_memory_is_the_default_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RAM", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    transport = DiskTransport(DiskWeightsConfig(), tmp_path / "run")
    assert transport.directory.parent == tmp_path / "shm"
    transport.close()
    assert list((tmp_path / "shm").iterdir()) == []


def test_without_a_memory_directory_the_run_directory_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RAM", tmp_path / "none")
    transport = DiskTransport(DiskWeightsConfig(), tmp_path / "run")
    assert transport.directory.parent == tmp_path / "run" / "weights"
    transport.close()


def test_when_memory_has_no_room_for_another_snapshot_the_run_directory_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Exporter
) -> None:
    monkeypatch.setattr(module, "_RAM", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    transport = DiskTransport(DiskWeightsConfig(), tmp_path / "run")
    first = transport.snapshot(engine)
    monkeypatch.setattr(module, "_room", lambda directory: 0)
    second = transport.snapshot(engine)
    assert first.directory.is_dir()
    assert second.directory.is_relative_to(tmp_path / "run")
    transport.close()
    assert not first.directory.exists()
    assert not second.directory.exists()


def test_a_full_memory_directory_gives_way_to_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullMemory(Exporter):
        def export(self, directory: Path) -> int:
            if directory.is_relative_to(tmp_path / "shm"):
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().export(directory)

    monkeypatch.setattr(module, "_RAM", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    transport = DiskTransport(DiskWeightsConfig(), tmp_path / "run")
    assert transport.snapshot(FullMemory()).directory.is_relative_to(tmp_path / "run")
    transport.close()


def test_leftovers_of_a_killed_run_are_removed_and_a_living_ones_are_not(tmp_path: Path) -> None:
    script = (
        "import os, sys, pathlib; from arl.api.config import DiskWeightsConfig; "
        "from arl.engine.transport.disk import DiskTransport; "
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

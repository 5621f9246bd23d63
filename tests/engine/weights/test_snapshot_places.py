"""Where snapshots lie: in memory if that reaches the engine and every server, else in the run directory."""

import asyncio
import shutil
from pathlib import Path

import pytest
from loaders import Exporter, Receiver, Servers, Weights

from arl.api.errors import ServerError, TransportError
from arl.api.settings.engines import DeltaWeightsConfig, DiskWeightsConfig
from arl.engine.weights import disk as module
from arl.engine.weights.delta import DeltaTransport
from arl.engine.weights.disk import DiskTransport


@pytest.fixture
def engine() -> Exporter:
    return Exporter()


@pytest.mark.parametrize(("has_memory", "place"), [(True, "shm"), (False, "run/weights")])
def test_memory_is_the_default_place_and_the_run_directory_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_memory: bool, place: str
):
    monkeypatch.setattr(module, "_RAM", tmp_path / "shm")
    if has_memory:
        (tmp_path / "shm").mkdir()
    transport = DiskTransport(DiskWeightsConfig(), tmp_path / "run")
    assert transport.directory.parent == tmp_path / place
    transport.close()
    assert list((tmp_path / place).iterdir()) == []


class ElsewhereExporter(Exporter):
    """Writes on another machine, which shares `shared` with this one."""

    def __init__(self, shared: Path) -> None:
        super().__init__()
        self.shared = shared

    def unseen(self, directory: Path) -> str | None:
        return None if directory.is_relative_to(self.shared) else f"rank 0, on node 7, does not see {directory}"


def test_the_place_is_one_that_the_engines_machine_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(module, "_RAM", tmp_path / "shm")
    transport = DiskTransport(DiskWeightsConfig(), tmp_path / "run", ElsewhereExporter(tmp_path / "run"))
    assert transport.directory.parent == tmp_path / "run/weights"
    assert list((tmp_path / "shm").iterdir()) == []
    transport.close()
    for directory in (None, tmp_path / "here"):
        with pytest.raises(TransportError, match=r"on node 7, does not see .*; set weights\.directory to a place"):
            DiskTransport(DiskWeightsConfig(directory=directory), tmp_path / "run", ElsewhereExporter(tmp_path / "no"))
    assert list((tmp_path / "here").iterdir()) == []


async def test_when_a_recovery_moves_the_writer_to_another_machine_the_run_directory_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Exporter, caplog: pytest.LogCaptureFixture
):
    shm = shm_in(tmp_path, monkeypatch)
    transport, server = DiskTransport(DiskWeightsConfig(), tmp_path / "run", engine), Receiver()
    write = Weights.write

    def write_elsewhere(self: Weights, directory: Path) -> int:
        return 1 if directory.is_relative_to(shm) else write(self, directory)

    monkeypatch.setattr(Weights, "write", write_elsewhere)
    await transport.deliver(transport.snapshot(engine), Servers(server))
    assert server.directories[0].is_relative_to(tmp_path / "run/weights")
    assert "the weights of version 0 were written in another machine's memory: weights go to" in caplog.text
    transport.close()


ELSEWHERE = "http://192.0.2.7:30000"
"""An address for documentation, which no machine has."""


def shm_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(module, "_RAM", tmp_path / "shm")
    return tmp_path / "shm"


@pytest.mark.parametrize(
    ("servers", "place"),
    [
        (["http://127.0.0.1:1", "http://localhost:2", "http://[::1]:3", "http://0.0.0.0:4"], "shm"),
        (["http://127.0.0.1:1", ELSEWHERE], "run/weights"),
        (["http://no-such-host.invalid:1"], "run/weights"),
    ],
)
def test_servers_of_other_machines_read_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: list[str], place: str
):
    shm = shm_in(tmp_path, monkeypatch)
    transport = DiskTransport(DiskWeightsConfig(), tmp_path / "run", servers=servers)
    assert transport.directory.parent == tmp_path / place
    assert bool(list(shm.iterdir())) == (place == "shm")
    transport.close()


def test_servers_with_a_mirror_read_nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shm = shm_in(tmp_path, monkeypatch)
    config = DeltaWeightsConfig(mirrors={f"{ELSEWHERE}/": "http://192.0.2.7:30900"})
    transport = DeltaTransport(config, tmp_path / "run", servers=[ELSEWHERE])
    assert transport.directory.parent == shm
    transport.close()


async def test_a_server_of_another_machine_that_joins_gets_a_copy_in_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Exporter, caplog: pytest.LogCaptureFixture
):
    shm = shm_in(tmp_path, monkeypatch)
    transport = DiskTransport(DiskWeightsConfig(), tmp_path / "run")
    first, here, theirs = transport.snapshot(engine), Receiver(), Receiver(address=ELSEWHERE)
    await transport.deliver(first, Servers(here))
    await Servers(theirs).update_weights(first)
    assert here.directories[0].is_relative_to(shm)
    assert theirs.directories[0].is_relative_to(tmp_path / "run/weights")
    assert here.files == theirs.files
    assert "a server is on another machine: weights go to" in caplog.text
    engine.train()
    second = transport.snapshot(engine)
    await transport.deliver(second, Servers(here))
    await asyncio.wrap_future(transport.submit(bool))  # after the removals, on the same thread
    assert here.directories[1].is_relative_to(tmp_path / "run/weights")
    assert not here.directories[0].exists()
    assert not theirs.directories[0].exists()
    transport.close()
    assert list(shm.iterdir()) == list((tmp_path / "run/weights").iterdir()) == []


async def test_where_there_is_no_room_for_a_copy_only_the_server_that_needs_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Exporter
):
    shm_in(tmp_path, monkeypatch)
    transport = DiskTransport(DiskWeightsConfig(), tmp_path / "run")
    update, here, theirs = transport.snapshot(engine), Receiver(), Receiver(address=ELSEWHERE)
    await transport.deliver(update, Servers(here))

    def copytree(source: Path, target: Path) -> None:
        target.mkdir()
        raise shutil.Error("No space left on device")

    monkeypatch.setattr(shutil, "copytree", copytree)
    with pytest.raises(TransportError, match=r"cannot copy the weights of version 0 to .*/run/weights/.*No space left"):
        await update.prepare(theirs)
    assert list(transport.directory.iterdir()) == [transport.directory / ".lock"]
    await Servers(here).update_weights(update)
    assert here.directories[0] == here.directories[1]
    transport.close()


async def test_what_to_set_depends_on_where_the_weights_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Exporter
):
    shm_in(tmp_path, monkeypatch)
    for address, settings in (("http://127.0.0.1:1", "weights.directory"), (ELSEWHERE, "run_dir or weights.directory")):
        transport = DiskTransport(DiskWeightsConfig(), tmp_path / "run", servers=[address])
        server = Receiver(address=address, errors={"load": ServerError("no such directory")})
        with pytest.raises(ServerError, match=rf"\), set {settings} to storage that both see, or weights\.transport"):
            await transport.deliver(transport.snapshot(engine), Servers(server))
        transport.close()

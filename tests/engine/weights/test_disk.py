"""Snapshots on disk, of models and of adapters: whole or absent, kept while a server may need them, then gone."""

import asyncio
import errno
import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loaders import AdapterExporter, Exporter, Receiver, Servers, Weights

from arl.api.errors import ServerError, ServerFailedError, TransportError, UnseenDirectoryError
from arl.api.settings.engines import AdapterWeightsConfig, DeltaWeightsConfig, DiskWeightsConfig
from arl.api.settings.run import Config
from arl.engine.weights import disk as module
from arl.engine.weights.delta import DeltaTransport
from arl.engine.weights.disk import DiskTransport


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
    await update.prepare(Receiver())
    return update.directory


async def test_servers_load_an_absolute_directory_with_the_engines_version(transport: DiskTransport, engine: Exporter):
    engine.train()
    update = transport.snapshot(engine)
    assert (update.version, update.adapter, update.num_bytes) == (1, None, 0)
    server = Receiver()
    await transport.deliver(update, Servers(server))
    assert (server.directories, server.names, server.flushes) == ([update.directory], [1], [True])
    assert update.directory.is_absolute()
    assert server.files[0]["weights"] == b"1"
    assert update.num_bytes == 1


async def test_each_version_of_each_run_is_an_adapter_of_its_own_name(tmp_path: Path):
    names: set[int | str | None] = set()
    for _ in range(2):
        transport = DiskTransport(AdapterWeightsConfig(directory=tmp_path), tmp_path)
        engine, server = AdapterExporter(), Receiver()
        for version in range(3):
            update = transport.snapshot(engine)
            await transport.deliver(update, Servers(server))
            assert update.adapter == server.names[-1]
            assert server.files[-1]["weights"] == str(version).encode()
            engine.train()
        assert len({str(name).removesuffix(f"-v{i}") for i, name in enumerate(server.names)}) == 1
        assert server.flushes == []
        names |= set(server.names)
        transport.close()
    assert len(names) == 6


def test_an_engine_without_adapters_is_an_error_that_names_the_setting(tmp_path: Path):
    transport = DiskTransport(AdapterWeightsConfig(directory=tmp_path), tmp_path)
    with pytest.raises(TransportError, match=r"Exporter has no adapters to publish; set train\.lora"):
        transport.snapshot(Exporter())
    transport.close()


async def test_it_is_written_once_beside_training_however_many_servers_prepare(
    transport: DiskTransport, engine: Exporter
):
    update = transport.snapshot(engine)
    weights = engine.newest
    weights.may_write.clear()
    first = asyncio.create_task(update.prepare(Receiver()))
    others = [asyncio.create_task(update.prepare(Receiver())) for _ in range(3)]
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    assert not any(other.done() for other in others)
    weights.may_write.set()
    await asyncio.gather(*others)
    assert (weights.num_writes, weights.is_released) == (1, True)


async def test_a_failed_write_whose_delivery_was_cancelled_is_not_reported_as_forgotten(
    transport: DiskTransport, engine: Exporter
):
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    engine.error = TransportError("a rank died")
    update = transport.snapshot(engine)
    delivering = asyncio.create_task(transport.deliver(update, Servers()))
    engine.newest.may_write.clear()
    await asyncio.sleep(0)
    delivering.cancel()
    await asyncio.wait([delivering])
    engine.newest.may_write.set()
    await removed(transport)
    await asyncio.sleep(0)
    transport.discard(update)
    engine.error = None
    del delivering, update, engine.newest  # all that holds the error
    gc.collect()
    assert told == []


async def removed(transport: DiskTransport) -> None:
    """Wait for the removals of the deliveries before: they run on the same thread, in order."""
    await asyncio.wrap_future(transport.submit(bool))


async def test_snapshots_that_no_server_will_need_are_let_go(transport: DiskTransport, engine: Exporter):
    updates, snapshots = [], []
    for _ in range(5):
        updates.append(transport.snapshot(engine))
        snapshots.append(engine.newest)
        engine.train()
    for _ in range(2):
        transport.discard(updates[4])
    assert snapshots[4].is_released
    written, _, delivered, newer, _ = updates
    for update in (written, newer):
        await update.prepare(Receiver())
    directory = written.directory
    await transport.deliver(delivered, Servers(Receiver()))
    await removed(transport)
    assert (directory.exists(), delivered.directory.is_dir(), newer.directory.is_dir()) == (False, True, True)
    assert (snapshots[1].num_writes, snapshots[1].is_released) == (0, True)
    assert transport._updates == [delivered, newer]


async def test_a_delivery_that_failed_stays_for_servers_that_come_back(transport: DiskTransport, engine: Exporter):
    first = await prepared(transport, engine)
    engine.train()
    second, server = transport.snapshot(engine), Receiver(errors={"load": ServerError("it does not fit")})
    with pytest.raises(ServerError):
        await transport.deliver(second, Servers(server))
    await removed(transport)
    assert not first.exists()
    await Servers(server).update_weights(second)
    assert server.names == [1]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
async def test_a_full_disk_is_named_with_what_to_do(transport: DiskTransport, engine: Exporter, error: Exception):
    engine.error = error
    update = transport.snapshot(engine)
    for _ in range(2):
        with pytest.raises(TransportError, match=r"no room for version 0's weights in .*weights.*weights\.directory"):
            await update.prepare(Receiver())
    with pytest.raises(TransportError, match="was not written"):
        await update.load(Receiver(), flush_cache=False)
    assert engine.newest.num_writes == 1
    engine.error = None
    assert (await prepared(transport, engine)).is_dir()


async def test_a_snapshot_that_cannot_be_written_leaves_the_one_that_servers_hold(
    transport: DiskTransport, engine: Exporter
):
    held, server = transport.snapshot(engine), Receiver()
    await transport.deliver(held, Servers(server))
    engine.train()
    engine.error = OSError(errno.ENOSPC, "No space left on device")
    unwritten = transport.snapshot(engine)
    with pytest.raises(TransportError, match="no room"):
        await transport.deliver(unwritten, Servers(server))
    assert engine.newest.is_released
    assert {path.name for path in transport.directory.iterdir()} == {".lock", held.directory.name}
    transport.discard(unwritten)
    await removed(transport)
    assert held.directory.is_dir()
    engine.error = None
    await transport.deliver(transport.snapshot(engine), Servers(server))
    await removed(transport)
    assert (server.names, held.directory.exists()) == ([0, 1], False)


async def test_closing_removes_everything_twice_over(transport: DiskTransport, engine: Exporter):
    assert await prepared(transport, engine) != await prepared(transport, engine)  # of one version
    for _ in range(2):
        transport.close()
        assert not transport.directory.exists()
    with pytest.raises(TransportError, match="closed"):
        await prepared(transport, engine)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TransportError, match=r"cannot write weights to .*file.*set a writable weights\.directory"):
        DiskTransport(DiskWeightsConfig(directory=tmp_path / "file" / "weights"), tmp_path)


@pytest.mark.parametrize("kind", [DiskWeightsConfig, AdapterWeightsConfig])
async def test_a_server_that_refuses_a_directory_is_said_to_need_to_see_it(tmp_path: Path, kind: Any):
    transport, server = DiskTransport(kind(directory=tmp_path), tmp_path), Receiver()
    update = transport.snapshot(Exporter() if kind is DiskWeightsConfig else AdapterExporter())
    server.errors["load"] = ServerError("no such directory")
    with pytest.raises(ServerError, match=rf"no such directory\. If {server.address} does not see .* set weights\.dir"):
        await transport.deliver(update, Servers(server))
    server.errors["load"] = ServerFailedError("it is away")
    with pytest.raises(ServerFailedError, match=r"it is away$"):
        await Servers(server).update_weights(update)
    transport.close()


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [None, FULL, UnseenDirectoryError("rank 0, on node-2, does not see /dev/shm")])
async def test_when_memory_takes_no_other_snapshot_the_run_directory_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Exporter, error: Exception | None
):
    """error: None: that there is no room is foreseen. A rank that was replaced may be on another machine."""
    write = Weights.write

    def write_where_there_is_room(self: Weights, directory: Path) -> int:
        if error is not None and directory.is_relative_to(tmp_path / "shm"):
            raise error
        return write(self, directory)

    shm_in(tmp_path, monkeypatch)
    transport = DiskTransport(DiskWeightsConfig(), tmp_path / "run")
    first = await prepared(transport, engine)
    if error is None:
        monkeypatch.setattr(module, "_room", lambda directory: 0)
    else:
        monkeypatch.setattr(Weights, "write", write_where_there_is_room)
    second = await prepared(transport, engine)
    assert first.is_relative_to(tmp_path / "shm")
    assert first.is_dir()
    assert second.is_relative_to(tmp_path / "run")
    transport.close()
    assert not first.exists()
    assert not second.exists()


def test_directories_of_a_host_with_a_longer_name_are_left_alone(tmp_path: Path):
    theirs = tmp_path / f"arl-weights-{socket.gethostname()}-2-1234-abc_1234"
    theirs.mkdir()
    (theirs / ".lock").touch()  # as of a process whose lock is not seen over the network
    DiskTransport(DiskWeightsConfig(directory=tmp_path), tmp_path).close()
    assert theirs.is_dir()


def test_leftovers_of_a_killed_run_are_removed_though_its_child_lives_and_a_living_ones_are_not(tmp_path: Path):
    script = (
        "import os, sys, time, pathlib; from arl.api.settings.engines import DiskWeightsConfig; "
        "from arl.engine.weights.disk import DiskTransport; "
        "t = DiskTransport(DiskWeightsConfig(directory=pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[1])); "
        "read, write = os.pipe(); forked = os.fork() or (os.write(write, b'-'), time.sleep(600), os._exit(0)); "
        "os.read(read, 1); print(t.directory, forked, flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        theirs, forked = child.stdout.readline().split()
        theirs = Path(theirs)
        DiskTransport(DiskWeightsConfig(directory=tmp_path), tmp_path).close()
        assert theirs.is_dir()
        child.kill()
    ours = DiskTransport(DiskWeightsConfig(directory=tmp_path), tmp_path)
    os.kill(int(forked), signal.SIGKILL)
    assert not theirs.exists()
    assert ours.directory.is_dir()
    assert str(os.getpid()) in ours.directory.name
    ours.close()


# Where snapshots lie: in memory if that reaches the engine and every server, else in the run directory.

ELSEWHERE = "http://192.0.2.7:30000"
"""An address for documentation, which no machine has."""


def shm_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(module, "_RAM", tmp_path / "shm")
    return tmp_path / "shm"


class ElsewhereExporter(Exporter):
    """Writes on another machine, which shares `shared` with this one."""

    def __init__(self, shared: Path) -> None:
        super().__init__()
        self.shared = shared

    def unseen(self, directory: Path) -> str | None:
        return None if directory.is_relative_to(self.shared) else f"rank 0, on node 7, does not see {directory}"


def test_the_place_is_one_that_the_engines_machine_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shm = shm_in(tmp_path, monkeypatch)
    transport = DiskTransport(DiskWeightsConfig(), tmp_path / "run", ElsewhereExporter(tmp_path / "run"))
    assert transport.directory.parent == tmp_path / "run/weights"
    assert list(shm.iterdir()) == []
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


@pytest.mark.parametrize(
    ("servers", "place"),
    [
        (["http://127.0.0.1:1", "http://localhost:2", "http://[::1]:3", "http://0.0.0.0:4"], "shm"),
        (["http://127.0.0.1:1", ELSEWHERE], "run/weights"),
        (["http://no-such-host.invalid:1"], "run/weights"),
        (None, "run/weights"),
    ],
)
def test_memory_is_the_place_if_there_is_some_and_every_server_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: list[str] | None, place: str
):
    """servers: None: this machine has no such memory."""
    shm = shm_in(tmp_path, monkeypatch)
    if servers is None:
        shm.rmdir()
    transport = DiskTransport(DiskWeightsConfig(), tmp_path / "run", servers=servers or ())
    assert transport.directory.parent == tmp_path / place
    transport.close()
    assert not shm.exists() or list(shm.iterdir()) == []


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


# Settings


SGLANG = {"kind": "sglang", "addresses": ["http://a"]}
IMPOSSIBLE = [
    ({"train": {}}, "train.lora is unset, so there are no adapters; set train.lora, or use weights.transport=disk"),
    ({"engine": {"pause_mode": "abort"}}, "engine.pause_mode is abort, but weights.transport=adapter pauses nothing"),
    ({"engine": SGLANG, "train": {"lora": {"target_modules": ["q_proj", "k_proj"]}}}, "lacks v_proj: SGLang fuses it"),
    ({"engine": SGLANG, "train": {"lora": {"target_modules": ["mlp.up_proj"]}}}, "lacks gate_proj: SGLang fuses it"),
]


@pytest.mark.parametrize(("settings", "sentence"), IMPOSSIBLE, ids=[sentence[:30] for _, sentence in IMPOSSIBLE])
def test_settings_that_cannot_publish_adapters_are_errors(settings: dict[str, object], sentence: str):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Config.model_validate({"model": "m", "train": {"lora": {}}, "weights": {"transport": "adapter"}, **settings})


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], ["gate_proj"], ["o_proj"]])
def test_targets_that_sglang_takes_are_none(targets: object):
    train = {"lora": {"target_modules": targets}}
    Config.model_validate({"model": "m", "engine": SGLANG, "train": train, "weights": {"transport": "adapter"}})

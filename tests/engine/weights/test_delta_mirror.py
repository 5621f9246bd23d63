"""The mirror process: a version is whole or absent, whatever is sent and whenever it is killed."""

import asyncio
import errno
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
import torch
from loaders import Mirror, MirrorProcess, contents, mirror_here, put
from safetensors.torch import save_file

from arl.api.errors import ConfigError, ServerError, ServerFailedError
from arl.engine.weights import mirror as module
from arl.engine.weights.delta import (
    FilePart,
    Held,
    MirrorClient,
    PackageHeader,
    Replica,
    WrongBaseError,
    package,
    survey,
)
from arl.engine.weights.mirror import MirrorStore, main, mirror_store

SIZE = 3 << 19
"""Numbers of bfloat16 in the model: a block and a half."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, pool: Executor) -> list[Replica]:
    """Four versions of a model; from one to the next a hundredth of its numbers change."""
    root = tmp_path_factory.mktemp("models")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(SIZE, generator=generator)
    out = []
    for version in range(4):
        directory = root / str(version)
        directory.mkdir()
        save_file({"weight": weight.bfloat16()}, directory / "model.safetensors")
        (directory / "config.json").write_text('{"model_type": "qwen3"}')
        out.append(survey(directory, pool))
        chosen = torch.randint(SIZE, (SIZE // 100,), generator=generator)
        weight[chosen] = torch.randn(len(chosen), generator=generator)
    return out


@pytest.fixture
async def mirror(tmp_path: Path) -> AsyncIterator[Mirror]:
    async with mirror_here(tmp_path / "mirror") as mirror:
        yield mirror


@pytest.fixture
def client(mirror: Mirror) -> MirrorClient:
    return MirrorClient(mirror.address, None)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[MirrorProcess]:
    process = MirrorProcess(tmp_path / "process")
    yield process
    process.kill()


@pytest.fixture
def send_to(models: list[Replica], pool: Executor):
    async def send(mirror: Mirror, version: int, base: int | None = None) -> Held:
        pieces = package(models[version], version, None if base is None else models[base], pool.map)
        return await put(MirrorClient(mirror.address, None), pieces)

    return send


async def test_it_holds_to_the_bit_what_was_sent_whole_and_then_in_part_and_the_version_before(
    send_to, client: MirrorClient, mirror: Mirror, models: list[Replica]
):
    assert await client.held() == Held(checksum=None, directory=None)
    for version, base in ((0, None), (1, 0), (2, 1)):
        held = await send_to(mirror, version, base)
        assert held == await client.held()
        assert held.checksum == models[version].checksum
        assert held.directory is not None
        assert held.directory.is_absolute()
        assert contents(held.directory) == contents(models[version].directory)
    assert mirror.versions == [1, 2]


async def test_a_base_that_is_not_held_is_refused_and_what_is_held_stays(send_to, client: MirrorClient, mirror: Mirror):
    before = await send_to(mirror, 0)
    with pytest.raises(WrongBaseError, match="not held here"):
        await send_to(mirror, 2, base=1)
    assert await client.held() == before
    assert (await send_to(mirror, 1, base=0)).directory is not None
    assert mirror.versions == [0, 1]


async def test_a_result_with_another_checksum_is_never_named(
    send_to, client: MirrorClient, mirror: Mirror, models: list[Replica], pool: Executor
):
    """As when a sender's memory fails: it says one thing and sends another."""
    before = await send_to(mirror, 0)
    pieces = list(package(models[1], 1, models[0], pool.map))
    pieces[0] = pieces[0].replace(models[1].checksum.encode(), models[2].checksum.encode())
    with pytest.raises(WrongBaseError, match="another checksum"):
        await put(client, pieces)
    assert await client.held() == before
    assert mirror.unfinished == []


@pytest.mark.parametrize(
    "body", [b"", b"arl", b"PK\3\4" + bytes(100), b"arldelta" + b"\xff" * 8, b"arldelta" + bytes(8)]
)
async def test_what_is_no_package_is_refused(client: MirrorClient, body: bytes):
    with pytest.raises(ServerError, match="HTTP 400: not a package"):
        await put(client, [body])


async def test_a_mirror_without_room_says_so_before_it_was_sent_everything(
    client: MirrorClient, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
):
    async def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MirrorStore, "_file", full)
    part = FilePart(name="model.safetensors", num_bytes=32 << 20, is_kept=False)
    header = PackageHeader(version=1, checksum="a" * 64, base=None, files=(part,)).to_bytes()
    with pytest.raises(ServerFailedError, match=f"no room in {mirror.directory}"):
        await put(client, [header, *[bytes(1 << 20)] * 32])


async def begin(mirror: Mirror, models: list[Replica], version: int) -> tuple[asyncio.StreamWriter, bytes]:
    """A sender that has sent all of a whole package but its last bytes, which it returns."""
    body = b"".join(package(models[version], version))
    url = urlsplit(mirror.address)
    _, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(f"PUT /version HTTP/1.1\r\nHost: mirror\r\nContent-Length: {len(body)}\r\n\r\n".encode())
    writer.write(body[:-10])
    await writer.drain()
    async with asyncio.timeout(20):
        while not mirror.unfinished:
            await asyncio.to_thread(time.sleep, 0.01)
    return writer, body[-10:]


async def test_a_mirror_killed_in_the_middle_begins_again_with_nothing(
    send_to, process: MirrorProcess, models: list[Replica]
):
    await send_to(process, 0)
    writer, _ = await begin(process, models, 1)
    process.kill()
    writer.close()
    assert (process.versions, len(process.unfinished)) == ([0], 1)
    process.start()
    assert (process.versions, process.unfinished) == ([], [])
    assert (await send_to(process, 1)).checksum == models[1].checksum


async def test_a_sender_that_goes_away_leaves_nothing_and_the_next_one_is_served(
    send_to, mirror: Mirror, models: list[Replica]
):
    writer, _ = await begin(mirror, models, 0)
    writer.close()
    await send_to(mirror, 1)
    assert mirror.versions == [1]
    assert mirror.unfinished == []


async def test_a_sender_that_froze_is_given_up_and_the_next_one_is_served(
    send_to, mirror: Mirror, models: list[Replica], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_STALL_S", 1.0)
    writer, _ = await begin(mirror, models, 0)
    monkeypatch.undo()
    await send_to(mirror, 1)
    assert mirror.versions == [1]
    writer.close()


async def test_two_senders_are_served_one_after_the_other(send_to, mirror: Mirror, models: list[Replica]):
    writer, rest = await begin(mirror, models, 0)
    other = asyncio.create_task(send_to(mirror, 1))
    await asyncio.sleep(0)
    writer.write(rest)
    assert (await other).checksum == models[1].checksum
    writer.close()
    assert mirror.versions == [0, 1]


async def test_without_its_key_an_open_mirror_tells_nothing_but_its_health(tmp_path: Path):
    (tmp_path / "key").write_text("secret\n")
    mirror = MirrorProcess(tmp_path / "mirror", "--host", "0.0.0.0", "--api-key-file", str(tmp_path / "key"))
    try:
        with pytest.raises(ServerError, match="set ARL_MIRROR_API_KEY"):
            await MirrorClient(mirror.address, "wrong").held()
        assert (await MirrorClient(mirror.address, "secret").held()).directory is None
        async with aiohttp.ClientSession() as session, session.get(f"{mirror.address}/health") as answer:
            assert answer.status == 200
    finally:
        mirror.kill()


async def test_stopping_it_removes_what_is_its_own_and_nothing_else(send_to, process: MirrorProcess):
    await send_to(process, 0)
    (process.directory / "notes.txt").write_text("mine")
    process.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.process.wait, 20) == 0
    assert [path.name for path in process.directory.iterdir()] == ["notes.txt"]


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"a model cannot be kept in .*file.*--directory"),
        mirror_store(tmp_path / "file" / "m", 1),
    ):
        pass


def test_mirrors_with_one_directory_keep_out_of_each_others_way(tmp_path: Path):
    with mirror_store(tmp_path, 1) as first, mirror_store(tmp_path, 1) as second:
        assert first.home != second.home
        assert first.home.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_it_ends_with_the_process_it_was_started_for(tmp_path: Path):
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mirror = MirrorProcess(tmp_path / "m", "--parent-pid", str(parent.pid))
    parent.kill()
    parent.communicate()
    assert mirror.process.wait(20) == 0
    assert list((tmp_path / "m").iterdir()) == []
    mirror.kill()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "open to other machines; give it a key"),
        (["--port", "70000"], "--port is 70000"),
        (["--num-threads", "0"], "--num-threads is 0"),
    ],
)
def test_what_cannot_be_is_refused(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("ARL_MIRROR_API_KEY", raising=False)
    assert main(options) == 2
    assert message in capsys.readouterr().err

"""What the delta transport sends to mirrors, and to which: the least that leads to the new version, once for each."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loaders import Mirror, Receiver, Servers, mirror_here
from safetensors.torch import load, save_file

from arl.api.errors import ServerError, ServerFailedError, TransportError
from arl.api.fakes import ScriptedTrainEngine
from arl.api.settings.engines import DeltaWeightsConfig
from arl.engine.weights import delta
from arl.engine.weights.delta import (
    Compared,
    DeltaTransport,
    DeltaWeights,
    Held,
    MirrorClient,
    PackageHeader,
    WrongBaseError,
)

SIZE = 1 << 16
FULL = 2 * SIZE


class Model(ScriptedTrainEngine):
    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(0)
        self.bits = self._random()

    def step(self, share: float = 0.01) -> None:
        """One version more, in which this share of the numbers is another."""
        self.bits = torch.where(torch.rand(SIZE, generator=self._generator) < share, self._random(), self.bits)
        self.train_batch([], None)  # type: ignore[arg-type]

    def _random(self) -> torch.Tensor:
        return torch.randint(1 << 14, (SIZE,), dtype=torch.int16, generator=self._generator)

    def snapshot(self) -> Any:
        return Copied(self.version, self.bits)


@dataclass
class Copied:
    version: int
    bits: torch.Tensor

    def write(self, directory: Path) -> int:
        directory.mkdir(parents=True)
        save_file({"weight": self.bits.view(torch.bfloat16)}, directory / "model.safetensors")
        (directory / "config.json").write_text("{}")
        return (directory / "model.safetensors").stat().st_size

    def release(self) -> None: ...


@pytest.fixture
async def mirrors(tmp_path: Path) -> AsyncIterator[list[Mirror]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(mirror_here(tmp_path / f"mirror-{i}")) for i in range(2)]


@pytest.fixture
def model() -> Model:
    return Model()


@dataclass
class Setup:
    """Servers 0 and 1 share mirror 0; server 2 has mirror 1; server 3 has none."""

    transport: DeltaTransport
    servers: list[Receiver]
    mirrors: list[Mirror]


@pytest.fixture
def setup(tmp_path: Path, mirrors: list[Mirror]) -> Iterator[Setup]:
    servers = [Receiver(f"http://server-{i}:30000") for i in range(4)]
    addresses = {server.address + "/": mirrors[i // 2].address for i, server in enumerate(servers[:3])}
    transport = DeltaTransport(DeltaWeightsConfig(mirrors=addresses, directory=tmp_path / "weights"), tmp_path)
    yield Setup(transport, servers, mirrors)
    transport.close()


async def publish(setup: Setup, model: Model, *numbers: int) -> DeltaWeights:
    """Deliver the model's version to these servers; nothing may fail, and each has to hold it to the bit."""
    engine = Servers(*(setup.servers[i] for i in numbers))
    update = setup.transport.snapshot(model)
    await setup.transport.deliver(update, engine)
    assert engine.failures == {}
    for server in engine.servers:
        assert server.names[-1] == model.version
        assert torch.equal(load(server.files[-1]["model.safetensors"])["weight"].view(torch.int16), model.bits)
    return update


Course = list[tuple[float, tuple[int, ...], int | str]]
COURSES: dict[str, Course] = {
    "whole, then what changed": [(0, (0,), 1), (0.01, (0,), "a delta"), (0.01, (0,), "a delta")],
    "once for servers of one mirror": [(0, (0, 1), 1), (0.01, (0, 1), "a delta"), (0.01, (0, 1, 2), 1)],
    "whole to a mirror two versions behind": [(0, (0, 2), 2), (0.01, (0,), "a delta"), (0.01, (0, 2), 1)],
    "whole where most of it changed": [(0, (0,), 1), (1, (0,), 1), (0.01, (0,), "a delta")],
    "nothing where nothing changed": [(0, (0,), 1), (0, (0,), "nothing")],
    "whole after a version that no server took": [(0, (0,), 1), (0.01, (), "nothing"), (0.01, (0,), 1)],
    "this machine's directory, to servers without a mirror": [(0, (0, 3), 2)],
}
"""Steps: which share of the model changes, which servers take it, and how many whole models, or what else, is sent."""


@pytest.mark.parametrize("course", COURSES.values(), ids=COURSES)
async def test_the_least_is_sent_that_leads_to_the_new_version(setup: Setup, model: Model, course: Course):
    for share, numbers, wanted in course:
        model.step(share)
        wholes, rest = divmod((await publish(setup, model, *numbers)).num_bytes, FULL)
        assert rest < FULL / 25
        assert wanted == (wholes or ("a delta" if rest else "nothing"))


async def test_a_mirror_that_lost_what_it_held_gets_all_of_it(setup: Setup, model: Model, tmp_path: Path):
    await publish(setup, model, 0)
    model.step()
    async with mirror_here(tmp_path / "again") as empty:
        setup.transport._mirrors = {setup.servers[0].address: empty.address}
        assert (await publish(setup, model, 0)).num_bytes > FULL


async def test_a_base_that_was_lost_between_question_and_delta_costs_all_of_it(
    setup: Setup, model: Model, monkeypatch: pytest.MonkeyPatch
):
    await publish(setup, model, 0)
    compare = setup.transport.compare

    def from_a_lost_base(directory: Path, version: int) -> Compared:
        header = PackageHeader(version=9, checksum="a" * 64, base="b" * 64, files=()).to_bytes()
        return replace(compare(directory, version), delta=[header])

    monkeypatch.setattr(setup.transport, "compare", from_a_lost_base)
    model.step()
    assert (await publish(setup, model, 0)).num_bytes > FULL


async def test_a_whole_package_that_a_mirror_refuses_or_loses_may_be_taken_later(
    setup: Setup, model: Model, monkeypatch: pytest.MonkeyPatch
):
    async def refuse(self: MirrorClient, pieces: object) -> Held:
        raise WrongBaseError("version 0 came out with another checksum than the package has")

    async def take_anothers(self: MirrorClient, pieces: object) -> Held:
        return Held(checksum="a" * 64, directory=setup.mirrors[0].directory)

    update = setup.transport.snapshot(model)
    for put, kind, sentence in (
        (refuse, ServerFailedError, "another checksum"),
        (take_anothers, ServerError, "is it shared"),
    ):
        monkeypatch.setattr(MirrorClient, "put", put)
        with pytest.raises(kind, match=sentence):
            await update.prepare(setup.servers[0])  # type: ignore[arg-type]
    monkeypatch.undo()
    await update.prepare(setup.servers[0])  # type: ignore[arg-type]
    assert setup.mirrors[0].versions == [0]


async def test_a_mirror_that_is_away_or_has_another_key_fails_its_own_servers_alone(
    setup: Setup, model: Model, tmp_path: Path
):
    mirrors, third = dict(setup.transport._mirrors), setup.servers[2].address
    async with mirror_here(tmp_path / "other", "another") as other:
        for address, sentence in (
            ("http://127.0.0.1:9", "http://127.0.0.1:9/version could not be reached"),
            (other.address, "set ARL_MIRROR_API_KEY"),
        ):
            setup.transport._mirrors = {**mirrors, third: address}
            engine = Servers(*setup.servers)
            await setup.transport.deliver(setup.transport.snapshot(model), engine)
            assert list(engine.failures) == [third]
            assert sentence in str(engine.failures[third])
            assert isinstance(engine.failures[third], ServerFailedError) is (address != other.address)
            assert setup.servers[3].names[-1] == 0
    setup.transport._mirrors = mirrors
    model.step()
    await publish(setup, model, 0, 1, 2, 3)


@asynccontextmanager
async def stuck_mirror(lives: bool) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """The address of an empty mirror that begins to read an update and then stops; and when it does so."""
    has_stopped, writers = asyncio.Event(), list[asyncio.StreamWriter]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        while not has_stopped.is_set() or lives:
            request = (await reader.readuntil(b"\r\n\r\n")).split()
            if request[0] == b"PUT":
                await reader.readexactly(1000)
                return has_stopped.set()
            body = b'{"version": null, "checksum": null, "directory": null}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", has_stopped
        for writer in writers:
            writer.transport.abort()


async def test_a_mirror_that_no_longer_answers_is_given_up_within_seconds(
    setup: Setup, model: Model, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(delta, "_HEALTH_S", 0.1)
    async with stuck_mirror(lives=False) as (address, _):
        setup.transport._mirrors = {setup.servers[0].address: address}
        update = setup.transport.snapshot(model)
        with pytest.raises(ServerFailedError, match="does not answer any more"):
            await update.prepare(setup.servers[0])  # type: ignore[arg-type]


async def test_a_mirror_that_lives_has_as_long_as_its_server_and_can_then_be_asked_again(
    setup: Setup, model: Model, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(delta, "_HEALTH_S", 0.05)
    asked, send = asyncio.Event(), MirrorClient.send

    async def noting(self: MirrorClient, method: str, path: str, *arguments: Any) -> Any:
        answer = await send(self, method, path, *arguments)
        if path == "/health":
            asked.set()
        return answer

    monkeypatch.setattr(MirrorClient, "send", noting)
    async with stuck_mirror(lives=True) as (address, has_stopped):
        setup.transport._mirrors = {setup.servers[0].address: address}
        update = setup.transport.snapshot(model)
        preparing = asyncio.create_task(update.prepare(setup.servers[0]))  # type: ignore[arg-type]
        await has_stopped.wait()
        await asked.wait()
        assert not preparing.done()
        preparing.cancel()
        await asyncio.wait([preparing])
        mirror = setup.transport.mirror_of(setup.servers[0].address)
        assert mirror is not None
        assert not mirror.in_use.locked()
        assert await mirror.held() == Held(None, None)


async def test_mirrors_of_servers_that_wait_for_their_turns_get_it_at_once(setup: Setup, model: Model):
    update = setup.transport.snapshot(model)
    async with stuck_mirror(lives=True) as (address, has_stopped):
        setup.transport._mirrors = {**setup.transport._mirrors, setup.servers[3].address: address}
        update.expect(setup.servers)  # type: ignore[arg-type]
        await update.prepare(setup.servers[0])  # type: ignore[arg-type]
        await update.prepare(setup.servers[2])  # type: ignore[arg-type]
        assert 2 * FULL <= update.num_bytes < 2.1 * FULL + 2 * FULL
        await has_stopped.wait()
        update.end()
        stuck = setup.transport.mirror_of(setup.servers[3].address)
        assert stuck is not None
        async with stuck.in_use:  # nothing goes on there
            pass


async def test_an_update_can_be_loaded_again_until_a_newer_one_was_delivered(setup: Setup, model: Model):
    update = await publish(setup, model, 0)
    sent = update.num_bytes
    await update.prepare(setup.servers[0])  # type: ignore[arg-type]
    await update.load(setup.servers[0], flush_cache=True)  # type: ignore[arg-type]
    assert update.num_bytes == sent
    assert setup.servers[0].names == [0, 0]


async def test_a_discarded_snapshot_leaves_the_row_of_deltas_as_it_was(setup: Setup, model: Model):
    await publish(setup, model, 0)
    model.step()
    setup.transport.discard(setup.transport.snapshot(model))
    model.step()
    assert (await publish(setup, model, 0)).num_bytes < FULL / 25


async def test_weights_that_were_not_prepared_or_removed_behind_its_back_are_errors(setup: Setup, model: Model):
    update = setup.transport.snapshot(model)
    with pytest.raises(TransportError, match="call prepare before load"):
        await update.load(setup.servers[0], flush_cache=False)  # type: ignore[arg-type]
    await update.prepare(setup.servers[3])  # type: ignore[arg-type]
    shutil.rmtree(update.directory)
    with pytest.raises(TransportError, match="version 0 can no longer be read"):
        await update.prepare(setup.servers[0])  # type: ignore[arg-type]


async def test_closing_removes_what_is_here_and_leaves_the_mirrors(setup: Setup, model: Model, tmp_path: Path):
    await publish(setup, model, 0, 3)
    setup.transport.close()
    setup.transport.close()
    assert list((tmp_path / "weights").iterdir()) == []
    assert setup.mirrors[0].versions == [0]

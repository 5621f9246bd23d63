"""A tree of mirrors: each passes on what it receives, and a mirror that fails loses nothing for those below it."""

import asyncio
import errno
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from loaders import contents
from mirrors import Mirror, MirrorProcess, mirror_here, put, sent
from safetensors.torch import save_file

from arl.api.errors import ServerError, ServerFailedError
from arl.engine.weights import mirror_client, relay, waves
from arl.engine.weights.mirror import MirrorStore
from arl.engine.weights.mirror_client import Held, MirrorClient
from arl.engine.weights.mirror_tree import Branch, branches, route_of, route_to_bytes
from arl.engine.weights.package import (
    PREAMBLE,
    DeltaError,
    Replica,
    delta_package,
    survey,
    whole_package,
)
from arl.engine.weights.waves import MirrorTrees, Package, Waves

KEY = "secret"
SIZE = 3 << 19
"""Numbers of bfloat16 in the model: a block and a half."""


@pytest.mark.parametrize(("count", "fanout"), [(0, 2), (1, 2), (3, 4), (7, 2), (300, 3), (400, 1)])
def test_a_tree_has_everybody_once_and_nobody_sends_to_more_than_fanout(count: int, fanout: int):
    addresses = [f"http://mirror-{i}" for i in range(count)]
    tree = branches(addresses, fanout)
    assert sorted(address for branch in tree for address in branch.addresses) == sorted(addresses)
    left = [tree]
    while left:
        below = left.pop()
        assert len(below) <= fanout
        left += [branch.below for branch in below]
    route = route_to_bytes(tree)
    parsed = route_of(route[PREAMBLE.size :]) if tree else ()
    assert [branch.addresses for branch in parsed] == [branch.addresses for branch in tree]
    assert [branch.height for branch in parsed] == [branch.height for branch in tree]


@pytest.mark.parametrize(
    "body",
    [b"", b"[1]", b'[["ftp://a", -1]]', b'[["http://a", 0]]', b'[["http://a", -1], ["http://a", 0]]', b"[" * 5000],
)
def test_what_is_no_route_is_refused(body: bytes):
    with pytest.raises(DeltaError):
        route_of(body)


class Pool:
    """Works at once, on the calling thread."""

    def map(self, work: Any, items: Any) -> Iterator[Any]:
        return map(work, items)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Replica]:
    """Three versions of a model, a hundredth of which changes each time."""
    generator = torch.Generator().manual_seed(0)
    weight, out = torch.randn(SIZE, generator=generator), []
    for version in range(3):
        directory = tmp_path_factory.mktemp(f"version-{version}")
        save_file({"weight": weight.bfloat16()}, directory / "model.safetensors")
        out.append(survey(directory, Pool()))  # type: ignore[arg-type]
        chosen = torch.randint(SIZE, (SIZE // 100,), generator=generator)
        weight[chosen] = torch.randn(len(chosen), generator=generator)
    return out


async def given_up() -> Path:
    raise ServerError("it lives")


@dataclass
class Mirrors:
    """Seven mirrors, of which the first two have the others below them: 2 to 3 and 4 to 6 below 0 and 1, and so on."""

    mirrors: list[Mirror]
    models: list[Replica]
    trees: MirrorTrees = field(default_factory=lambda: MirrorTrees(fanout=2, has_key=True))

    def __post_init__(self) -> None:
        self.clients = [MirrorClient(mirror.address, KEY) for mirror in self.mirrors]

    async def bring(self, version: int, stuck: int | None = None) -> tuple[int, list[Path | ServerError]]:
        """Bring all to a version of the model; returns the bytes sent from here, and what came of each.

        stuck: the number of one that lives and never ends, on which its server gives up.
        """
        new, delta, base = self.models[version], None, None
        if version:
            base = self.models[version - 1]
            pieces = delta_package(base, new, version, Pool(), max_bytes=1 << 30)  # type: ignore[arg-type]
            assert pieces is not None
            delta = Package(num_bytes=sum(map(len, pieces)), pieces=lambda: pieces, is_delta=True)
        self.trees.begin_update()
        wave = Waves(self.trees, new, version, delta, base and base.checksum)
        asked = [asyncio.create_task(wave.bring(client, self.clients)) for client in self.clients]
        async with asyncio.timeout(30):
            await asyncio.wait([task for i, task in enumerate(asked) if i != stuck])
        if stuck is not None and not asked[stuck].done():
            asked[stuck].cancel()
            asked[stuck] = asyncio.create_task(given_up())
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(outcome, Path | ServerError) for outcome in outcomes)
        return wave.num_sent, outcomes  # type: ignore[return-value]

    def assert_hold(self, version: int, outcomes: list[Path | ServerError], *numbers: int) -> None:
        """These mirrors hold the version, to the bit; all others failed."""
        right = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Path)]
        assert right == list(numbers)
        for i in numbers:
            assert contents(outcomes[i]) == contents(self.models[version].directory)  # type: ignore[arg-type]
            assert self.mirrors[i].unfinished == []


@pytest.fixture
async def fleet(tmp_path: Path, models: list[Replica], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mirrors]:
    monkeypatch.setattr(waves, "is_loopback", lambda host: False)
    monkeypatch.setattr(relay, "_PIPE_BYTES", 1 << 16)
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(mirror_here(tmp_path / f"mirror-{i}", KEY)) for i in range(7)]
        yield Mirrors(made, models)


async def test_all_mirrors_get_it_to_the_bit_and_the_trainer_sends_it_twice(fleet: Mirrors):
    num_sent, outcomes = await fleet.bring(0)
    fleet.assert_hold(0, outcomes, *range(7))
    whole = whole_package(fleet.models[0], 0)[0]
    assert num_sent == 2 * whole
    num_sent, outcomes = await fleet.bring(1)
    fleet.assert_hold(1, outcomes, *range(7))
    assert 0 < num_sent < whole / 5
    assert (await fleet.bring(1))[0] == 0


async def test_mirrors_without_a_key_or_at_loopback_pass_nothing_on(fleet: Mirrors, monkeypatch: pytest.MonkeyPatch):
    addresses = [client.address for client in fleet.clients]
    without_key = MirrorTrees(fanout=2, has_key=False)
    assert list(without_key.arrange(fleet.clients)) == [Branch(address) for address in addresses]
    monkeypatch.undo()
    assert list(fleet.trees.arrange(fleet.clients)) == [Branch(address) for address in addresses]
    named = [MirrorClient(f"http://{host}:1", KEY) for host in ("localhost", "[::1]", "10.0.0.1", "node-1")]
    assert [waves._is_local(client) for client in named] == [True, True, False, False]


async def test_a_mirror_without_a_key_refuses_to_pass_on(tmp_path: Path, models: list[Replica]):
    num_bytes, pieces = whole_package(models[0], 0)
    async with mirror_here(tmp_path / "open") as mirror:
        with pytest.raises(ServerError, match="HTTP 403: this mirror has no key"):
            await MirrorClient(mirror.address, None).put(num_bytes, sent(pieces), [Branch("http://10.0.0.1:9")])


async def test_a_mirror_that_lost_the_base_gets_the_whole_model_and_those_below_it_the_delta(
    fleet: Mirrors, tmp_path: Path
):
    await fleet.bring(0)
    async with mirror_here(tmp_path / "again", KEY) as empty:
        fleet.mirrors[0], fleet.clients[0] = empty, MirrorClient(empty.address, KEY)
        num_sent, outcomes = await fleet.bring(1)
        fleet.assert_hold(1, outcomes, *range(7))
        whole = whole_package(fleet.models[1], 1)[0]
        assert whole < num_sent < 1.2 * whole


async def test_a_mirror_without_room_still_passes_on(fleet: Mirrors, monkeypatch: pytest.MonkeyPatch):
    check = MirrorStore._check_room

    def full(store: MirrorStore, header: Any) -> None:
        if store.home == fleet.mirrors[0].directory:
            raise OSError(errno.ENOSPC, "No space left on device")
        check(store, header)

    monkeypatch.setattr(MirrorStore, "_check_room", full)
    num_sent, outcomes = await fleet.bring(0)
    fleet.assert_hold(0, outcomes, *range(1, 7))
    assert isinstance(outcomes[0], ServerFailedError)
    assert "there is no room" in str(outcomes[0])
    assert num_sent == 2 * whole_package(fleet.models[0], 0)[0]


@asynccontextmanager
async def broken(takes: int, answers_health: bool) -> AsyncIterator[str]:
    """The address of an empty mirror that reads so many bytes of an update, and then nothing more.

    If `takes` is 0 it reads on for ever, and never answers.
    """

    writers: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /version") or (answers_health and head.startswith(b"GET /health")):
            body = b'{"version": null, "checksum": null, "directory": null}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        elif head.startswith(b"PUT"):
            await reader.readexactly(takes)
            while not takes and await reader.read(1 << 16):  # noqa: ASYNC110 - it is slow
                await asyncio.sleep(0.05)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for writer in writers:
            writer.transport.abort()


@pytest.mark.parametrize(("place", "is_alive"), [(0, False), (2, True), (6, False)])
async def test_a_mirror_that_stalls_loses_nothing_for_the_others_and_is_sent_to_directly_later(
    fleet: Mirrors, place: int, is_alive: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mirror_client, "STALL_S", 0.5)
    monkeypatch.setattr(mirror_client, "WATCH_S", 0.05)
    monkeypatch.setattr(mirror_client, "_HEALTH_TIMEOUT_S", 0.5)
    async with broken(100_000, is_alive) as address:
        fleet.clients[place] = MirrorClient(address, KEY)
        _, outcomes = await fleet.bring(0, stuck=place if is_alive else None)
    fleet.assert_hold(0, outcomes, *sorted({*range(7)} - {place}))
    assert ("it lives" if is_alive else "has taken nothing for") in str(outcomes[place])
    assert f"the trainer itself sends to {address} " in caplog.text
    later = list(fleet.trees.arrange(fleet.clients))
    assert Branch(address) in later
    assert len(later) == 3


async def test_a_mirror_that_is_far_slower_than_others_holds_up_nobody(fleet: Mirrors, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waves, "patience_s", lambda branch: 1.0)
    async with broken(0, answers_health=True) as address:
        fleet.clients[0] = MirrorClient(address, KEY)
        _, outcomes = await fleet.bring(0, stuck=0)
    fleet.assert_hold(0, outcomes, *range(1, 7))
    assert "it lives" in str(outcomes[0])


async def test_a_mirror_that_dies_in_the_middle_loses_nothing_for_the_others(fleet: Mirrors, tmp_path: Path):
    (tmp_path / "key").write_text(KEY)
    process = MirrorProcess(tmp_path / "process", "--api-key-file", str(tmp_path / "key"))
    fleet.clients[1] = MirrorClient(process.address, KEY)
    whole = Package.sent

    async def killing(package: Package) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for piece in whole(package):
            yield piece
            if (num_bytes := num_bytes + len(piece)) > package.num_bytes / 2:
                while not process.unfinished:  # noqa: ASYNC110 - nobody is told
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(process.kill)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Package, "sent", killing)
        _, outcomes = await fleet.bring(0)
    await asyncio.to_thread(process.kill)
    fleet.assert_hold(0, outcomes, 0, *range(2, 7))
    assert isinstance(outcomes[1], ServerFailedError)


async def test_what_comes_damaged_through_a_mirror_is_never_named_and_sent_again(
    fleet: Mirrors, monkeypatch: pytest.MonkeyPatch
):
    damaged = fleet.clients[2].address
    pass_on = relay.pass_on

    async def flip(client: MirrorClient, branch: Branch, num_bytes: int, pieces: AsyncIterator[bytes]) -> Any:
        async def flipped() -> AsyncIterator[bytes]:
            number = 0
            async for piece in pieces:
                is_end = (number := number + len(piece)) == num_bytes and client.address == damaged
                yield piece[:-1] + bytes([piece[-1] ^ 1]) if is_end else piece

        return await pass_on(client, branch, num_bytes, flipped())

    monkeypatch.setattr(relay, "pass_on", flip)
    num_sent, outcomes = await fleet.bring(0)
    fleet.assert_hold(0, outcomes, *range(7))
    assert num_sent == 4 * whole_package(fleet.models[0], 0)[0]  # its own, and that of the mirror below it


async def test_a_mirror_with_another_key_fails_alone(fleet: Mirrors, tmp_path: Path):
    async with mirror_here(tmp_path / "other", "another") as other:
        fleet.mirrors[0] = other
        fleet.clients[0] = MirrorClient(other.address, KEY)
        _, outcomes = await fleet.bring(0)
    fleet.assert_hold(0, outcomes, *range(1, 7))
    assert "set weights.api_key" in str(outcomes[0])


async def test_a_sender_that_goes_away_leaves_nothing_in_the_whole_tree(fleet: Mirrors):
    num_bytes, pieces = whole_package(fleet.models[0], 0)
    tree = branches([client.address for client in fleet.clients], 1)
    route, body = route_to_bytes(tree[0].below), b"".join(pieces)
    url = urlsplit(fleet.clients[0].address)
    _, writer = await asyncio.open_connection(url.hostname, url.port)
    head = f"PUT /version HTTP/1.1\r\nHost: m\r\nAuthorization: Bearer {KEY}\r\n"
    writer.write(f"{head}Content-Length: {len(route) + num_bytes}\r\n\r\n".encode() + route + body[:-10])
    async with asyncio.timeout(20):
        while not all(mirror.unfinished for mirror in fleet.mirrors):  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0.01)
        writer.close()
        while any(mirror.unfinished for mirror in fleet.mirrors):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [mirror.versions for mirror in fleet.mirrors] == [[]] * 7


async def test_those_that_give_up_do_not_end_it_for_the_others(fleet: Mirrors):
    wave = Waves(fleet.trees, fleet.models[0], 0, None, None)
    first, second = (asyncio.create_task(wave.bring(client, fleet.clients)) for client in fleet.clients[:2])
    await asyncio.sleep(0.02)
    first.cancel()
    assert contents(await second) == contents(fleet.models[0].directory)


async def test_when_all_give_up_nothing_goes_on_and_mirrors_can_be_asked_again(fleet: Mirrors):
    async with broken(1, answers_health=True) as address:
        fleet.clients = [MirrorClient(address, KEY)]
        wave = Waves(fleet.trees, fleet.models[0], 0, None, None)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await wave.bring(fleet.clients[0])
    async with asyncio.timeout(5):
        await fleet.clients[0].busy.acquire()


async def test_a_slow_mirror_that_is_given_up_gets_its_update_directly(fleet: Mirrors, monkeypatch: pytest.MonkeyPatch):
    slow, pass_on = fleet.clients[0], waves.pass_on

    async def stalling(client: MirrorClient, branch: Branch, num_bytes: int, pieces: Any, **options: Any) -> Any:
        async def first() -> AsyncIterator[bytes]:
            yield await anext(pieces)
            await asyncio.Event().wait()

        stalls = client is slow and branch.below
        return await pass_on(client, branch, num_bytes, first() if stalls else pieces, **options)

    monkeypatch.setattr(waves, "pass_on", stalling)
    monkeypatch.setattr(waves, "patience_s", lambda branch: 0.2)
    monkeypatch.setattr(waves, "_SLOW_TIMES", 0.0)
    _, outcomes = await fleet.bring(0)
    fleet.assert_hold(0, outcomes, *range(7))


async def test_a_mirror_that_is_asked_again_is_not_failed_by_the_wave_that_failed_it_before(
    fleet: Mirrors, monkeypatch: pytest.MonkeyPatch
):
    again, other = fleet.clients[:2]
    may_go = {again.address: asyncio.Event(), other.address: asyncio.Event()}
    began, pass_on = asyncio.Event(), waves.pass_on

    async def gated(client: MirrorClient, *arguments: Any, **options: Any) -> Any:
        if client is again:
            began.set()
        await may_go[client.address].wait()
        return await pass_on(client, *arguments, **options)

    async def refused() -> Held:
        raise ServerFailedError("not yet")

    monkeypatch.setattr(waves, "pass_on", gated)
    wave = Waves(MirrorTrees(fanout=2, has_key=False), fleet.models[0], 0, None, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(again, "held", refused)
        slow = asyncio.create_task(wave.bring(other, [again]))
        with pytest.raises(ServerFailedError, match="not yet"):
            await wave.bring(again)
    (first_wave,) = wave._tasks
    second = asyncio.create_task(wave.bring(again))
    await began.wait()
    may_go[other.address].set()
    await slow
    await first_wave
    may_go[again.address].set()
    assert contents(await second) == contents(fleet.models[0].directory)


async def test_when_an_update_is_over_the_last_that_waits_ends_what_goes_on_for_others(fleet: Mirrors):
    async with broken(1, answers_health=True) as address:
        stuck, well = MirrorClient(address, KEY), fleet.clients[0]
        wave = Waves(fleet.trees, fleet.models[0], 0, None, None)
        waiting = asyncio.create_task(wave.bring(well, [stuck]))
        await asyncio.sleep(0)
        wave.end()
        await waiting
        async with asyncio.timeout(5):
            await stuck.busy.acquire()


async def test_a_sender_that_froze_gives_way_to_the_one_that_comes_after_it(
    fleet: Mirrors, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(relay, "_GIVING_WAY_S", 0.0)
    num_bytes, pieces = whole_package(fleet.models[0], 0)
    body = b"".join(pieces)
    url = urlsplit(fleet.clients[0].address)
    _, frozen = await asyncio.open_connection(url.hostname, url.port)
    head = f"PUT /version HTTP/1.1\r\nHost: m\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {num_bytes}\r\n\r\n"
    frozen.write(head.encode() + body[:-10])
    async with asyncio.timeout(20):
        while not fleet.mirrors[0].unfinished:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0.01)
        held = await put(fleet.clients[0], num_bytes, [body])
    assert held.directory is not None
    assert contents(held.directory) == contents(fleet.models[0].directory)
    frozen.close()

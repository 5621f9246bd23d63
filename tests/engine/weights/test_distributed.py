"""One exchange with one server: groups that are made, broken and made again, and updates that are told from mixtures.

The server is a thread of this process that joins the group for real and receives what is broadcast.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loaders import Servers
from published import HookedEngine, Trainee, trainee
from safetensors.torch import load_file

from arl.api.engine import TensorSpec, WeightGroup, WeightUpdate
from arl.api.engine_config import DistributedWeightsConfig
from arl.api.errors import NoSuchPathError, ServerError, ServerFailedError, TransportError
from arl.api.scripted import ScriptedTrainEngine
from arl.engine.weights import distributed
from arl.engine.weights import sender as weight_sender
from arl.engine.weights.distributed import DistributedTransport
from arl.engine.weights.sender import byte_size, views

TIMEOUT = timedelta(seconds=30)


def receive(rank: dist.ProcessGroupGloo, num_bytes: int) -> torch.Tensor:
    flat = torch.empty(num_bytes, dtype=torch.uint8)
    rank.broadcast([flat], dist.BroadcastOptions()).wait()
    return flat


@dataclass
class Receiver:
    """A WeightServer of `num_ranks` ranks. `calls` is what it was asked for; `errors` are raised instead, once each."""

    address: str = "http://127.0.0.1:1"
    num_ranks: int = 1
    calls: list[str] = field(default_factory=list[str])
    errors: dict[str, Exception] = field(default_factory=dict[str, Exception])
    groups: dict[str, list[dist.ProcessGroupGloo]] = field(default_factory=dict[str, list[dist.ProcessGroupGloo]])
    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    labels: list[int | None] = field(default_factory=list[int | None])
    flushes: list[bool] = field(default_factory=list[bool])

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if error := self.errors.pop(call, None):
            raise error

    async def join_group(self, group: WeightGroup) -> None:
        self._note("join")

        def join(rank: int) -> dist.ProcessGroupGloo:
            store = dist.TCPStore(group.address, group.port, group.world_size, False, timeout=TIMEOUT)
            # As torch's own groups meet; but that keeps one of a name in a process, and the trainer is here too.
            for prefix in (group.name, f"{group.name}/", "cpu/"):
                store = dist.PrefixStore(prefix, store)
            return dist.ProcessGroupGloo(store, rank, group.world_size, TIMEOUT)

        ranks = [asyncio.to_thread(join, rank) for rank in range(1, group.world_size)]
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
        self.labels.append(version)
        self.flushes.append(flush_cache)

    async def end_update(self) -> None:
        self._note("end")

    async def load_directory(self, directory: Path, *, version: int, flush_cache: bool) -> None:
        raise NotImplementedError


@pytest.fixture(scope="module")
def trainer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainee]:
    """One for all tests, whatever its version is by then."""
    with trainee(model, tmp_path_factory.mktemp("trainer")) as made:
        yield made


@pytest.fixture
async def server() -> AsyncIterator[Receiver]:
    server = Receiver()
    yield server
    for name in list(server.groups):
        await server.leave_group(name)


@pytest.fixture
def transport():
    transport = DistributedTransport(DistributedWeightsConfig(), bucket_bytes=20_000)
    yield transport
    transport.close()


@dataclass
class Pair:
    """A trainer with its transport, and a server."""

    transport: DistributedTransport
    trainer: Trainee
    server: Receiver

    async def publish(self) -> WeightUpdate:
        update = self.transport.snapshot(self.trainer.engine)
        await self.transport.deliver(update, Servers(self.server))
        return update

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.trainer.directory / f"version-{self.trainer.engine.version}" / "model.safetensors")

    def is_served(self, server: Receiver | None = None) -> bool:
        """Whether the server holds the newest weights, and nothing else."""
        held, weights = (server or self.server).tensors, self.weights
        return held.keys() == weights.keys() and all(torch.equal(held[name], weights[name]) for name in weights)


@pytest.fixture
def pair(transport: DistributedTransport, trainer: Trainee, server: Receiver) -> Pair:
    return Pair(transport, trainer, server)


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_every_rank_of_the_server_receives_every_tensor_whole(pair: Pair, num_ranks: int):
    pair.server.num_ranks = num_ranks
    pair.trainer.train()
    update = await pair.publish()
    assert pair.is_served()
    assert update.num_bytes == sum(tensor.nbytes for tensor in pair.weights.values())


async def test_only_the_last_bucket_names_the_version_and_flushes_the_cache(pair: Pair):
    await pair.publish()
    assert len(pair.server.labels) > 2
    assert pair.server.labels == [None] * (len(pair.server.labels) - 1) + [pair.trainer.engine.version]
    assert pair.server.flushes == [False] * (len(pair.server.flushes) - 1) + [True]


async def test_the_group_is_met_once_and_serves_later_versions(pair: Pair):
    await pair.publish()
    pair.trainer.train()
    await pair.publish()
    assert pair.is_served()
    assert (pair.server.calls.count("join"), pair.server.calls.count("leave")) == (1, 0)


@pytest.mark.parametrize("call", ["begin", "receive", "end"])
async def test_a_group_in_which_something_failed_is_left_and_another_is_met(pair: Pair, call: str):
    update = pair.transport.snapshot(pair.trainer.engine)
    pair.server.errors[call] = ServerFailedError("it broke")
    with pytest.raises(ServerFailedError, match="it broke"):
        await pair.transport.deliver(update, Servers(pair.server))
    await pair.transport.deliver(update, Servers(pair.server))
    assert pair.is_served()
    assert (pair.server.calls.count("join"), pair.server.calls.count("leave")) == (2, 1)
    assert len(pair.server.groups) == 1


async def test_a_server_that_did_not_answer_is_told_again_to_leave(pair: Pair):
    pair.server.errors = {"receive": ServerFailedError("it broke"), "leave": ServerFailedError("it is away")}
    with pytest.raises(ServerFailedError, match="it broke"):
        await pair.publish()
    await pair.publish()
    assert (pair.server.calls.count("leave"), len(pair.server.groups)) == (1, 2)
    for _ in range(2):
        await pair.publish()
    assert (pair.server.calls.count("leave"), len(pair.server.groups)) == (2, 1)


async def test_a_group_that_is_being_opened_when_the_time_is_over_is_left(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    update = pair.transport.snapshot(pair.trainer.engine)
    opened, left, may_open = queue.Queue[str](), queue.Queue[str](), threading.Event()
    open_group, leave = update.snapshot.open_group, update.snapshot.leave

    def open_late(*arguments: Any) -> WeightGroup:
        opened.put("begun")
        may_open.wait(10)
        group = open_group(*arguments)
        opened.put(group.name)
        return group

    def note(name: str) -> None:
        leave(name)
        left.put(name)

    monkeypatch.setattr(update.snapshot, "open_group", open_late)
    monkeypatch.setattr(update.snapshot, "leave", note)
    preparing = asyncio.create_task(update.prepare(pair.server))
    assert await asyncio.to_thread(opened.get, timeout=10) == "begun"
    preparing.cancel()
    await asyncio.wait([preparing])
    may_open.set()
    assert await asyncio.to_thread(left.get, timeout=10) == opened.get(timeout=10)


async def test_a_refusal_by_a_server_that_was_just_met_is_one(pair: Pair):
    pair.server.errors["receive"] = ServerError("no such tensor")
    with pytest.raises(ServerError, match="no such tensor") as failure:
        await pair.publish()
    assert not isinstance(failure.value, ServerFailedError)


async def test_a_refusal_by_a_server_that_was_met_before_may_be_mended_by_meeting_it_again(pair: Pair):
    await pair.publish()
    pair.server.errors["receive"] = ServerError("no such group")  # as after a restart
    with pytest.raises(ServerFailedError, match="no such group"):
        await pair.publish()
    await pair.publish()
    assert pair.is_served()


async def test_a_server_that_refuses_to_join_is_told_at_once(pair: Pair):
    pair.server.errors["join"] = ServerError("backend 'gloo' is not available here")
    async with asyncio.timeout(5):
        with pytest.raises(ServerError, match="is not available here"):
            await pair.publish()


async def test_an_update_that_was_left_open_is_ended_first(pair: Pair):
    pair.server.errors["begin"] = ServerError("a weight-update session is already open")
    await pair.publish()
    assert pair.server.calls[:4] == ["join", "begin", "end", "begin"]
    assert pair.is_served()


async def test_a_server_without_transactions_is_refused_with_what_to_do(pair: Pair):
    pair.server.errors["begin"] = NoSuchPathError("HTTP 404")
    with pytest.raises(ServerError, match=r"SGLang 0\.5\.23 or newer.*transport=disk"):
        await pair.publish()


async def test_what_fails_on_the_trainers_side_ends_the_servers_waiting(pair: Pair):
    def fail(address: str, start: int) -> None:
        if start:
            raise TransportError("the weights are gone")

    failing = HookedEngine(pair.trainer)
    failing.before_send = fail
    async with asyncio.timeout(20):
        with pytest.raises(TransportError, match="the weights are gone"):
            await pair.transport.deliver(pair.transport.snapshot(failing), Servers(pair.server))
        (group,) = pair.server.groups.values()
        with pytest.raises(RuntimeError):  # not blocked: the sender has left
            await asyncio.to_thread(receive, group[0], 1 << 20)
    await pair.publish()
    assert pair.is_served()


def test_an_engine_that_has_nothing_to_send_is_refused(transport: DistributedTransport):
    with pytest.raises(TransportError, match=r"ScriptedTrainEngine cannot send.*transport=disk"):
        transport.snapshot(ScriptedTrainEngine())


async def test_an_address_that_is_not_the_trainers_is_refused(
    trainer: Trainee, server: Receiver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(weight_sender, "_JOIN_TIMEOUT_S", 0.5)
    transport = DistributedTransport(DistributedWeightsConfig(address="192.0.2.1"))
    with pytest.raises(TransportError, match=r"at 192\.0\.2\.1: .*; set weights\.address"):
        await Pair(transport, trainer, server).publish()
    transport.close()


async def test_snapshots_before_a_delivered_one_are_released_and_it_stays(pair: Pair, tmp_path: Path):
    first, second = pair.transport.snapshot(pair.trainer.engine), None
    pair.trainer.train()
    second = pair.transport.snapshot(pair.trainer.engine)
    await pair.transport.deliver(second, Servers(pair.server))
    with pytest.raises(TransportError, match="released"):
        first.snapshot.write(tmp_path / "first")
    again = Receiver(address="http://127.0.0.1:2")  # one that was away
    await second.prepare(again)
    await second.load(again, flush_cache=False)
    assert pair.is_served(again)
    for name in list(again.groups):
        await again.leave_group(name)


def test_a_discarded_snapshot_is_released_at_once(transport: DistributedTransport, trainer: Trainee, tmp_path: Path):
    kept, discarded = transport.snapshot(trainer.engine), transport.snapshot(trainer.engine)
    for _ in range(2):
        transport.discard(discarded)
    with pytest.raises(TransportError, match="released"):
        discarded.snapshot.write(tmp_path / "discarded")
    assert kept.snapshot.write(tmp_path / "kept") > 0
    assert transport._updates == [kept]


@pytest.mark.timeout(30)
async def test_closing_does_not_wait_for_what_is_stuck(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(distributed, "_LEAVING_S", 0.1)
    await pair.publish()
    update, goes_on, left = pair.transport.snapshot(pair.trainer.engine), threading.Event(), list[str]()

    def stuck(name: str) -> None:
        left.append(name)
        goes_on.wait()

    for each in pair.transport._updates:
        monkeypatch.setattr(each.snapshot, "leave", stuck)
    pair.transport.close()
    assert left == list(pair.server.groups)
    with pytest.raises(TransportError, match="released"):
        update.snapshot.send("", 0, 1)
    goes_on.set()


async def test_a_closed_transport_says_so(pair: Pair):
    update = pair.transport.snapshot(pair.trainer.engine)
    pair.transport.close()
    with pytest.raises(TransportError, match="closed"):
        await update.prepare(pair.server)

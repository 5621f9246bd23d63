"""One exchange with one server: groups that are made, broken and made again, and updates that are told from mixtures.

The server is a thread of this process that joins the group for real and receives what is broadcast.
"""

from __future__ import annotations

import asyncio
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

from arl.api.config import DistributedWeightsConfig
from arl.api.engine import TensorSpec, WeightGroup, WeightUpdate
from arl.api.errors import NoSuchPathError, ServerError, ServerFailedError, TransportError
from arl.api.scripted import ScriptedTrainEngine
from arl.engine.weights import distributed
from arl.engine.weights import sender as weight_sender
from arl.engine.weights.distributed import DistributedTransport, SendableSnapshot
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


@dataclass
class SlowlyOpened:
    """What opens and leaves groups as its snapshot does, once it may. names: of what was opened, and then left."""

    snapshot: SendableSnapshot
    is_opening: threading.Event = field(default_factory=threading.Event)
    may_open: threading.Event = field(default_factory=threading.Event)
    has_left: threading.Event = field(default_factory=threading.Event)
    names: list[str] = field(default_factory=list[str])

    def open_group(self, *arguments: Any) -> WeightGroup:
        self.is_opening.set()
        self.may_open.wait(10)
        group = self.snapshot.open_group(*arguments)
        self.names.append(group.name)
        return group

    def leave(self, group: str) -> None:
        self.names.append(group)
        self.snapshot.leave(group)
        self.has_left.set()

    def release(self) -> None:
        self.snapshot.release()


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


async def publish(transport: DistributedTransport, trainer: Trainee, server: Receiver) -> WeightUpdate:
    update = transport.snapshot(trainer.engine)
    await transport.deliver(update, Servers(server))
    return update


def newest(trainer: Trainee) -> dict[str, torch.Tensor]:
    return load_file(trainer.directory / f"version-{trainer.engine.version}" / "model.safetensors")


def holds(server: Receiver, trainer: Trainee) -> bool:
    weights = newest(trainer)
    return server.tensors.keys() == weights.keys() and all(
        torch.equal(server.tensors[name], weights[name]) for name in weights
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_every_rank_of_the_server_receives_every_tensor_whole(
    transport: DistributedTransport, trainer: Trainee, server: Receiver, num_ranks: int
):
    server.num_ranks = num_ranks
    trainer.train()
    update = await publish(transport, trainer, server)
    assert holds(server, trainer)
    assert update.num_bytes == sum(tensor.nbytes for tensor in newest(trainer).values())


async def test_only_the_last_bucket_names_the_version_and_flushes_the_cache(
    transport: DistributedTransport, trainer: Trainee, server: Receiver
):
    await publish(transport, trainer, server)
    assert len(server.labels) > 2
    assert server.labels == [None] * (len(server.labels) - 1) + [trainer.engine.version]
    assert server.flushes == [False] * (len(server.flushes) - 1) + [True]


async def test_the_group_is_met_once_and_serves_later_versions(
    transport: DistributedTransport, trainer: Trainee, server: Receiver
):
    await publish(transport, trainer, server)
    trainer.train()
    await publish(transport, trainer, server)
    assert holds(server, trainer)
    assert (server.calls.count("join"), server.calls.count("leave")) == (1, 0)


@pytest.mark.parametrize("call", ["begin", "receive", "end"])
async def test_a_group_in_which_something_failed_is_left_and_another_is_met(
    transport: DistributedTransport, trainer: Trainee, server: Receiver, call: str
):
    update = transport.snapshot(trainer.engine)
    server.errors[call] = ServerFailedError("it broke")
    with pytest.raises(ServerFailedError, match="it broke"):
        await transport.deliver(update, Servers(server))
    await transport.deliver(update, Servers(server))
    assert holds(server, trainer)
    assert (server.calls.count("join"), server.calls.count("leave")) == (2, 1)
    assert len(server.groups) == 1


async def test_a_server_that_did_not_answer_is_told_again_to_leave(
    transport: DistributedTransport, trainer: Trainee, server: Receiver
):
    server.errors = {"receive": ServerFailedError("it broke"), "leave": ServerFailedError("it is away")}
    with pytest.raises(ServerFailedError, match="it broke"):
        await publish(transport, trainer, server)
    await publish(transport, trainer, server)
    assert (server.calls.count("leave"), len(server.groups)) == (1, 2)
    for _ in range(2):
        await publish(transport, trainer, server)
    assert (server.calls.count("leave"), len(server.groups)) == (2, 1)


async def test_a_group_that_is_being_opened_when_the_time_is_over_is_left(
    transport: DistributedTransport, trainer: Trainee, server: Receiver
):
    update = transport.snapshot(trainer.engine)
    slow = SlowlyOpened(update.snapshot)
    update.snapshot = slow  # type: ignore[assignment]
    preparing = asyncio.create_task(update.prepare(server))
    assert await asyncio.to_thread(slow.is_opening.wait, 10)
    preparing.cancel()
    await asyncio.wait([preparing])
    slow.may_open.set()
    assert await asyncio.to_thread(slow.has_left.wait, 10)
    assert slow.names[0] == slow.names[1]


async def test_a_refusal_by_a_server_that_was_just_met_is_one(
    transport: DistributedTransport, trainer: Trainee, server: Receiver
):
    server.errors["receive"] = ServerError("no such tensor")
    with pytest.raises(ServerError, match="no such tensor") as failure:
        await publish(transport, trainer, server)
    assert not isinstance(failure.value, ServerFailedError)


async def test_a_refusal_by_a_server_that_was_met_before_may_be_mended_by_meeting_it_again(
    transport: DistributedTransport, trainer: Trainee, server: Receiver
):
    await publish(transport, trainer, server)
    server.errors["receive"] = ServerError("no such group")  # as after a restart
    with pytest.raises(ServerFailedError, match="no such group"):
        await publish(transport, trainer, server)
    await publish(transport, trainer, server)
    assert holds(server, trainer)


async def test_a_server_that_refuses_to_join_is_told_at_once(
    transport: DistributedTransport, trainer: Trainee, server: Receiver
):
    server.errors["join"] = ServerError("backend 'gloo' is not available here")
    async with asyncio.timeout(5):
        with pytest.raises(ServerError, match="is not available here"):
            await publish(transport, trainer, server)


async def test_an_update_that_was_left_open_is_ended_first(
    transport: DistributedTransport, trainer: Trainee, server: Receiver
):
    server.errors["begin"] = ServerError("a weight-update session is already open")
    await publish(transport, trainer, server)
    assert server.calls[:4] == ["join", "begin", "end", "begin"]
    assert holds(server, trainer)


async def test_a_server_without_transactions_is_refused_with_what_to_do(
    transport: DistributedTransport, trainer: Trainee, server: Receiver
):
    server.errors["begin"] = NoSuchPathError("HTTP 404")
    with pytest.raises(ServerError, match=r"SGLang 0\.5\.23 or newer.*transport=disk"):
        await publish(transport, trainer, server)


async def test_what_fails_on_the_trainers_side_ends_the_servers_waiting(
    transport: DistributedTransport, trainer: Trainee, server: Receiver
):
    def fail(address: str, start: int) -> None:
        if start:
            raise TransportError("the weights are gone")

    failing = HookedEngine(trainer)
    failing.before_send = fail
    async with asyncio.timeout(20):
        with pytest.raises(TransportError, match="the weights are gone"):
            await transport.deliver(transport.snapshot(failing), Servers(server))
        (group,) = server.groups.values()
        with pytest.raises(RuntimeError):  # not blocked: the sender has left
            await asyncio.to_thread(receive, group[0], 1 << 20)
    await publish(transport, trainer, server)
    assert holds(server, trainer)


def test_an_engine_that_has_nothing_to_send_is_refused(transport: DistributedTransport):
    with pytest.raises(TransportError, match=r"ScriptedTrainEngine has nothing to send.*transport=disk"):
        transport.snapshot(ScriptedTrainEngine())


async def test_an_address_that_is_not_the_trainers_is_refused(
    trainer: Trainee, server: Receiver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(weight_sender, "_JOIN_TIMEOUT_S", 0.5)
    transport = DistributedTransport(DistributedWeightsConfig(address="192.0.2.1"))
    with pytest.raises(TransportError, match=r"at 192\.0\.2\.1: .*; set weights\.address"):
        await publish(transport, trainer, server)
    transport.close()


async def test_snapshots_before_a_delivered_one_are_released_and_it_stays(
    transport: DistributedTransport, trainer: Trainee, server: Receiver, tmp_path: Path
):
    first, second = transport.snapshot(trainer.engine), None
    trainer.train()
    second = transport.snapshot(trainer.engine)
    await transport.deliver(second, Servers(server))
    with pytest.raises(TransportError, match="released"):
        first.snapshot.write(tmp_path / "first")
    again = Receiver(address="http://127.0.0.1:2")  # one that was away
    await second.prepare(again)
    await second.load(again, flush_cache=False)
    assert holds(again, trainer)
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
async def test_closing_does_not_wait_for_what_is_stuck(
    transport: DistributedTransport, trainer: Trainee, server: Receiver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(distributed, "_LEAVING_S", 0.1)
    await publish(transport, trainer, server)
    update, goes_on, left = transport.snapshot(trainer.engine), threading.Event(), list[str]()

    def stuck(name: str) -> None:
        left.append(name)
        goes_on.wait()

    for each in transport._updates:
        monkeypatch.setattr(each.snapshot, "leave", stuck)
    transport.close()
    assert left == list(server.groups)
    with pytest.raises(TransportError, match="released"):
        update.snapshot.send("", 0, 1)
    goes_on.set()


async def test_a_closed_transport_says_so(transport: DistributedTransport, trainer: Trainee, server: Receiver):
    update = transport.snapshot(trainer.engine)
    transport.close()
    with pytest.raises(TransportError, match="closed"):
        await update.prepare(server)

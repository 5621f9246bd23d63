"""One exchange with one server: groups that are made, broken and made again, and updates that are told from mixtures.

The server is a thread of this process that joins the group for real and receives what is broadcast.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from loaders import Receiver, Servers, receive
from published import HookedEngine, Trainee, trainee
from safetensors.torch import load_file

from arl.api.engine import TensorSpec, WeightGroup, WeightUpdate
from arl.api.errors import NoSuchPathError, ServerError, ServerFailedError, TransportError
from arl.api.fakes import ScriptedTrainEngine
from arl.api.settings.engines import DistributedWeightsConfig
from arl.engine.local.weight_receiver import WeightsError, _buffer
from arl.engine.weights import distributed
from arl.engine.weights import process_groups as weight_sender
from arl.engine.weights.distributed import DistributedTransport, byte_size, ranges, rows_of, views
from arl.engine.weights.process_groups import WeightSender


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


async def test_every_rank_receives_every_tensor_whole_and_the_last_bucket_names_the_version(pair: Pair):
    server = pair.server
    server.num_ranks = 2
    for num_updates in (1, 2):
        pair.trainer.train()
        update = await pair.publish()
        assert pair.is_served()
        assert update.num_bytes == sum(tensor.nbytes for tensor in pair.weights.values())
        buckets = len(server.names) // num_updates
        assert buckets > 2
        assert server.names[-buckets:] == [None] * (buckets - 1) + [pair.trainer.engine.version]
        assert server.flushes[-buckets:] == [False] * (buckets - 1) + [True]
    assert (server.calls.count("join"), server.calls.count("leave")) == (1, 0)


FAILED = ServerFailedError("it broke")
FAULTS: dict[str, tuple[bool, str, Exception, type[Exception], str]] = {
    "begin fails": (False, "begin", FAILED, ServerFailedError, "it broke"),
    "receive fails": (False, "receive", FAILED, ServerFailedError, "it broke"),
    "end fails": (False, "end", FAILED, ServerFailedError, "it broke"),
    "a server that was just met refuses": (False, "receive", ServerError("no tensor"), ServerError, "no tensor"),
    # As after a restart: to meet it again may mend it.
    "a server that was met before refuses": (True, "receive", ServerError("no group"), ServerFailedError, "no group"),
    "joining is refused": (False, "join", ServerError("no gloo here"), ServerError, "no gloo here"),
    "without transactions": (
        False, "begin", NoSuchPathError("HTTP 404"), ServerError, r"SGLang 0\.5\.23 or newer.*use disk"
    ),
}  # fmt: skip
"""Whether there is a group already, the call that fails and how; then what that raises."""


@pytest.mark.parametrize(("is_met", "call", "error", "kind", "sentence"), FAULTS.values(), ids=FAULTS)
async def test_a_group_in_which_something_failed_is_left_and_another_is_met(
    pair: Pair, is_met: bool, call: str, error: Exception, kind: type[Exception], sentence: str
):
    if is_met:
        await pair.publish()
    pair.server.errors[call] = error
    async with asyncio.timeout(5):
        with pytest.raises(ServerError, match=sentence) as failure:
            await pair.publish()
    assert type(failure.value) is kind
    await pair.publish()
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


async def test_an_update_that_was_left_open_is_ended_first(pair: Pair):
    pair.server.errors["begin"] = ServerError("a weight-update session is already open")
    await pair.publish()
    assert pair.server.calls[:4] == ["join", "begin", "end", "begin"]
    assert pair.is_served()


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


async def test_snapshots_that_no_server_will_need_are_released(pair: Pair, tmp_path: Path):
    def is_released(update: Any) -> bool:
        try:
            update.snapshot.write(tmp_path / f"{id(update)}")
        except TransportError as error:
            return "released" in str(error)
        return False

    transport, engine = pair.transport, pair.trainer.engine
    first = transport.snapshot(engine)
    pair.trainer.train()
    second, discarded = transport.snapshot(engine), transport.snapshot(engine)
    for _ in range(2):
        transport.discard(discarded)
    assert [is_released(update) for update in (first, second, discarded)] == [False, False, True]
    await transport.deliver(second, Servers(pair.server))
    assert is_released(first)
    assert transport._updates == [second]
    again = Receiver(address="http://127.0.0.1:2")  # one that was away
    await second.prepare(again)
    await second.load(again, flush_cache=False)
    assert pair.is_served(again)
    transport.close()
    with pytest.raises(TransportError, match="closed"):
        await second.prepare(Receiver())


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


# Tensors end to end: how they are split, and which rows of them a rank has.


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def test_ranges_are_filled_up_and_a_larger_tensor_goes_alone():
    specs = [spec("a", 2), spec("b", 2), spec("c", 100), spec("d", 1), spec("e")]
    assert ranges(specs, 16) == [(0, 2), (2, 3), (3, 5)]
    assert ranges(specs, 1) == [(i, i + 1) for i in range(5)]
    assert ranges([], 16) == []


def test_a_range_is_of_one_dtype_so_that_every_tensor_begins_where_its_dtype_may():
    specs = [spec("a", 3, dtype="bfloat16"), spec("b", 2), spec("c", 1), spec("d", 1, dtype="bfloat16")]
    assert ranges(specs, 1 << 20) == [(0, 1), (1, 3), (3, 4)]


def test_views_share_the_memory_they_are_of():
    specs = [spec("a", 2, 3), spec("b"), spec("c", 0, 5), spec("d", 4)]
    flat = torch.zeros(sum(map(byte_size, specs)), dtype=torch.uint8)
    a, b, c, d = views(specs, flat)
    for tensor, value in ((a, 1.0), (b, 2.0), (c, 3.0), (d, 4.0)):
        tensor.fill_(value)
    assert flat.view(torch.float32).tolist() == [1.0] * 6 + [2.0] + [4.0] * 4
    assert (a.shape, b.shape, c.shape) == ((2, 3), (), (0, 5))


def test_ranks_have_rows_as_torch_chunks_them():
    for num_rows in range(12):
        for num_ranks in range(1, 6):
            chunks = torch.arange(num_rows).chunk(num_ranks) if num_rows else ()
            expected = [chunk.tolist() for chunk in chunks] + [[]] * (num_ranks - len(chunks))
            assert [list(rows_of(num_rows, rank, num_ranks)) for rank in range(num_ranks)] == expected


def test_a_server_refuses_a_bucket_in_which_a_tensor_would_begin_between_two_numbers():
    flat, tensors = _buffer([("a", "float32", [2]), ("b", "bfloat16", [3])], "cpu", most_bytes=100)
    assert (flat.nbytes, tensors["b"].shape) == (14, (3,))
    with pytest.raises(WeightsError, match="b would begin at byte 6"):
        _buffer([("a", "bfloat16", [3]), ("b", "float32", [2])], "cpu", most_bytes=100)


@pytest.mark.parametrize("is_left", [True, False])
def test_a_server_that_dies_while_nccl_forms_the_group_pins_no_thread(monkeypatch: pytest.MonkeyPatch, is_left: bool):
    begun, may_end = threading.Event(), threading.Event()

    def wait_for_ever(*args: object) -> None:
        begun.set()
        may_end.wait(60)

    monkeypatch.setattr(weight_sender, "_SEND_TIMEOUT_S", 60.0 if is_left else 0.2)
    monkeypatch.setattr(WeightSender, "_broadcast_from_gpu", wait_for_ever)
    sender = WeightSender(torch.device("cpu"))
    group = sender.open("http://127.0.0.1:1", 1, "gloo")
    link = sender._links[group.name]
    link.is_nccl, link.group = True, cast("dist.ProcessGroup", object())  # it can be neither aborted nor destroyed now
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(sender.send, group.name, torch.zeros(4, dtype=torch.uint8))
        assert begun.wait(20)
        if is_left:
            sender.leave(group.name)
        with pytest.raises(ServerFailedError, match="did not take weights"):
            sending.result(20)
        sender.close()
    may_end.set()

"""Servers that share a group: one broadcast for all, and after any failure each gets the same update by itself."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import loaders
import pytest
import torch
from loaders import Receiver, ServersAtOnce
from published import Trainee, trainee
from safetensors.torch import load_file

from arl.api.config import Config
from arl.api.engine_config import DistributedWeightsConfig
from arl.api.errors import ServerError, ServerFailedError
from arl.engine.weights import sender as weight_sender
from arl.engine.weights import teams
from arl.engine.weights.distributed import DistributedTransport
from arl.engine.weights.teams import Teams


@pytest.fixture(scope="module")
def trainer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainee]:
    with trainee(model, tmp_path_factory.mktemp("trainer")) as made:
        yield made


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Iterator[DistributedTransport]:
    """Whatever waits in a group ends after 2 s, as embedded servers do when they are told to leave."""
    monkeypatch.setattr(weight_sender, "_SEND_TIMEOUT_S", 2.0)
    monkeypatch.setattr(loaders, "TIMEOUT", timedelta(seconds=2))
    transport = DistributedTransport(DistributedWeightsConfig(servers_per_group=3), bucket_bytes=20_000)
    yield transport
    transport.close()


@pytest.fixture
async def servers() -> AsyncIterator[list[Receiver]]:
    made = [Receiver(f"http://127.0.0.1:{port}", num_ranks) for port, num_ranks in ((1, 2), (2, 1), (3, 1))]
    yield made
    for server in made:
        server.groups.clear()


async def publish(
    transport: DistributedTransport, trainer: Trainee, *servers: Receiver, absent: tuple[Receiver, ...] = ()
) -> dict[str, ServerError]:
    """One version more; returns the failures. All other servers hold it."""
    trainer.train()
    engine = ServersAtOnce(*servers)
    engine.absent = frozenset(server.address for server in absent)
    for server in servers:
        server.tensors.clear()
    update = transport.snapshot(trainer.engine)
    async with asyncio.timeout(30):
        await transport.deliver(update, engine)
    weights = load_file(trainer.directory / f"version-{trainer.engine.version}" / "model.safetensors")
    for server in servers:
        if server.address not in {*engine.failures, *engine.absent}:
            assert server.tensors.keys() == weights.keys()
            assert all(torch.equal(server.tensors[name], weights[name]) for name in weights)
            assert server.names[-1] == trainer.engine.version
    return engine.failures


def joins(*servers: Receiver) -> list[int]:
    return [server.calls.count("join") for server in servers]


def shared(transport: DistributedTransport) -> list[tuple[str, ...]]:
    """The members of the teams that have a group."""
    return [team.members for team in transport.teams.all if team.places and not team.broken.is_set()]


async def test_servers_of_a_team_receive_one_broadcast_and_keep_their_group(
    transport: DistributedTransport, trainer: Trainee, servers: list[Receiver]
):
    for _ in range(2):
        assert await publish(transport, trainer, *servers) == {}
        size = sum(tensor.nbytes for tensor in servers[0].tensors.values())
        assert transport._updates[-1].num_bytes == size
    assert joins(*servers) == [1, 1, 1]
    assert shared(transport) == [tuple(server.address for server in servers)]
    assert len({name for server in servers for name in server.groups}) == 1


FAULTS = ["join", "begin", "receive", "end"]


@pytest.mark.parametrize("call", FAULTS)
async def test_after_a_failure_each_gets_the_same_update_alone_and_they_come_together_again_later(
    transport: DistributedTransport, trainer: Trainee, servers: list[Receiver], call: str
):
    if call != "join":
        await publish(transport, trainer, *servers)
    servers[1].errors[call] = ServerFailedError("it broke")
    assert await publish(transport, trainer, *servers) == {}
    assert shared(transport) == []
    for _ in range(2):
        assert await publish(transport, trainer, *servers) == {}
    assert shared(transport) == [tuple(server.address for server in servers)]


class Stuck(Receiver):
    """From some call on it does not answer any more."""

    stuck_at = ""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in ("leave_group", self.stuck_at if name != "stuck_at" else ""):

            async def never(*arguments: Any, **named: Any) -> None:
                await asyncio.Event().wait()

            return never if self.stuck_at else value
        return value


@pytest.mark.parametrize("call", ["begin_update", "receive"])
async def test_one_that_is_stuck_fails_alone_and_stays_alone_for_longer(
    transport: DistributedTransport,
    trainer: Trainee,
    servers: list[Receiver],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
):
    monkeypatch.setattr(teams, "PATIENCE_S", 0.5)
    servers[2] = stuck = Stuck("http://127.0.0.1:3", 1)
    await publish(transport, trainer, *servers)
    stuck.stuck_at = call
    failures = await publish(transport, trainer, *servers)
    assert [*failures] == [stuck.address]
    assert "does not leave a group that broke" in str(failures[stuck.address])
    stuck.stuck_at = ""
    assert await publish(transport, trainer, *servers) == {}
    assert shared(transport) == [(servers[0].address, servers[1].address)]


async def test_one_that_never_comes_costs_the_others_a_moment(
    transport: DistributedTransport, trainer: Trainee, servers: list[Receiver], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("arl.engine.weights.distributed.PATIENCE_S", 1.0)
    monkeypatch.setattr(teams, "PATIENCE_S", 1.0)
    assert await publish(transport, trainer, *servers, absent=(servers[0],)) == {}
    assert shared(transport) == []


async def test_a_server_that_asks_again_gets_it_alone_and_the_team_stays(
    transport: DistributedTransport, trainer: Trainee, servers: list[Receiver]
):
    await publish(transport, trainer, *servers)
    update, server = transport._updates[-1], servers[1]
    server.tensors.clear()
    await update.prepare(server)  # type: ignore[arg-type]
    await update.load(server, flush_cache=False)  # type: ignore[arg-type]
    assert server.tensors.keys() == servers[0].tensors.keys()
    assert await publish(transport, trainer, *servers) == {}
    assert joins(*servers) == [1, 2, 1]


def test_teams_are_made_of_those_that_are_there_and_not_better_alone():
    made = Teams(2)
    assert made.arrange([["a", "b", "c", "d", "e"]]) == []
    first, second = made.all
    assert [first.members, second.members] == [("a", "b"), ("c", "d")]
    assert made.arrange([["b", "c", "d", "e"]]) == [first]
    assert [team.members for team in made.all] == [("c", "d"), ("b", "e")]
    made.break_up(second, "it broke")
    made.blame("d")
    assert made.arrange([["a", "b", "c", "d", "e"]]) == []
    assert [team.members for team in made.all] == [("b", "e")]
    for address in ("c", "d"):
        made.note_load(address)
    made.arrange([["a", "b", "c", "d", "e"]])
    assert [team.members for team in made.all] == [("b", "e"), ("a", "c")]


def test_small_teams_take_in_servers_that_are_free_and_one_another():
    made = Teams(3)
    made.arrange([["a", "b"]])
    (first,) = made.all
    assert made.arrange([["a", "b", "c"]]) == [first]
    assert [team.members for team in made.all] == [("a", "b", "c")]
    made.arrange([["a", "b", "c", "d", "e"]])
    assert [team.members for team in made.all] == [("a", "b", "c"), ("d", "e")]
    assert made.arrange([["a", "b", "c", "d", "e"]]) == []


def test_a_bucket_may_take_ten_times_as_long_as_the_slowest_for_its_size():
    made = Teams(2)
    made.arrange([["a", "b"]])
    (team,) = made.all
    assert team.limit_s(1000) == 60
    team.note_bucket(1000, 0.5)
    team.note_bucket(100, 0.01)
    assert [team.limit_s(num_bytes) for num_bytes in (10, 1000, 2000, 10**9)] == [5, 5, 10, 60]


def test_no_team_spans_two_turns():
    made = Teams(4)
    made.arrange([["a", "b"], ["c"]])
    assert [team.members for team in made.all] == [("a", "b")]


def test_servers_that_are_updated_one_after_another_share_no_group():
    weights = {"transport": "distributed", "servers_per_group": 4}
    engine = {"kind": "local", "num_servers": 4, "update_order": "rolling"}
    with pytest.raises(ValueError, match=r"servers_per_group is 4, but engine\.update_order=rolling"):
        Config(model="m", weights=weights, engine=engine)  # type: ignore[arg-type]

"""Requests reach their role's policy alone, and weights reach all policies' servers, or count for none."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from arl.api.engine import DiskWeights, InferenceEngine, UpdateStats, WeightUpdate
from arl.api.errors import ProcessLostError, RoleError, ServerError, TransportError
from arl.api.fakes import ScriptedEngine
from arl.api.settings.engines import PolicyRoles
from arl.api.types import ModelRequest
from arl.training.policies import PolicyEngine, PolicyTransport, PolicyWeights

ROLES = PolicyRoles({"author": "writer", "editor": "writer", "critic": "reader"})


def engines() -> dict[str, ScriptedEngine]:
    return {"writer": ScriptedEngine(lambda _: [1]), "reader": ScriptedEngine(lambda _: [2])}


def update(version: int) -> DiskWeights:
    return DiskWeights(version=version, directory=Path("/nowhere"), num_bytes=10)


async def test_a_request_is_answered_by_the_policy_of_its_role() -> None:
    of = engines()
    engine = PolicyEngine(of, ROLES)
    for role, said in (("critic", 2), ("author", 1), ("editor", 1)):
        assert (await engine.agenerate(ModelRequest(input_ids=[5], role=role))).output_ids == (said,)
    assert [request.role for request in of["writer"].requests] == ["author", "editor"]
    with pytest.raises(RoleError, match=r"no policy plays the role 'agent'; .* author \(writer\), editor \(writer\)"):
        await engine.agenerate(ModelRequest(input_ids=[5]))


class Weights:
    def __init__(self, version: int = 1, fails: Exception | None = None) -> None:
        self.version = version
        self.fails = fails

    def snapshot(self) -> Any:
        raise NotImplementedError


class Transport:
    """Brings an update to an engine; fails as it is told to."""

    def __init__(self, *, fails: Exception | None = None) -> None:
        self.fails = fails
        self.discarded: list[int] = []
        self.is_closed = False

    def snapshot(self, engine: Any) -> WeightUpdate:
        if engine.fails:
            raise engine.fails
        return update(engine.version)

    async def deliver(self, update: WeightUpdate, engine: InferenceEngine) -> UpdateStats:
        await asyncio.sleep(0)
        if self.fails:
            raise self.fails
        return await engine.update_weights(update)

    def discard(self, update: WeightUpdate) -> None:
        self.discarded.append(update.version)

    def close(self) -> None:
        self.is_closed = True


def weights(**of: Weights) -> PolicyWeights:
    made: Any = of
    return PolicyWeights(made)


async def test_the_version_is_published_once_all_policies_servers_hold_it() -> None:
    of, transports = engines(), {"writer": Transport(), "reader": Transport(fails=TransportError("no room"))}
    engine, transport = PolicyEngine(of, ROLES), PolicyTransport(transports)
    taken = transport.snapshot(weights(writer=Weights(), reader=Weights()))
    assert (taken.version, taken.num_bytes) == (1, 20)
    with pytest.raises(TransportError, match="no room"):
        await transport.deliver(taken, engine)
    assert (of["writer"].version, engine.version) == (1, 0)
    transports["reader"].fails = None
    await transport.deliver(transport.snapshot(weights(writer=Weights(), reader=Weights())), engine)
    assert engine.version == 1


async def test_of_several_failures_the_one_that_ends_the_run_is_raised() -> None:
    losses = {"writer": Transport(fails=ProcessLostError("killed")), "reader": Transport(fails=ServerError("gone"))}
    transport = PolicyTransport(losses)
    taken = transport.snapshot(weights(writer=Weights(), reader=Weights()))
    with pytest.raises(ServerError, match="gone"):
        await transport.deliver(taken, PolicyEngine(engines(), ROLES))


def test_a_snapshot_that_one_policy_could_not_give_leaves_none_behind() -> None:
    transports = {"writer": Transport(), "reader": Transport()}
    transport = PolicyTransport(transports)
    with pytest.raises(ProcessLostError):
        transport.snapshot(weights(writer=Weights(), reader=Weights(fails=ProcessLostError("killed"))))
    assert (transports["writer"].discarded, transports["reader"].discarded) == ([1], [])
    transport.close()
    assert all(one.is_closed for one in transports.values())


async def test_pauses_and_counts_are_of_all_policies() -> None:
    of = engines()
    engine = PolicyEngine(of, ROLES)
    await engine.pause()
    waiting = [asyncio.create_task(engine.agenerate(ModelRequest(input_ids=[5], role=role))) for role in ROLES.by_role]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    await engine.resume()
    assert [(await task).output_ids for task in waiting] == [(1,), (1,), (2,)]
    for number, one in enumerate(of.values(), start=1):
        one.counters = lambda number=number: {"servers/serving": number}  # type: ignore[method-assign]
    assert engine.counters() == {"servers/serving": 3}
    await engine.aclose()


def test_servers_that_policies_share_count_once() -> None:
    """Each client of a server tells all that the server did, and its own failures."""
    of = engines()
    told = [
        {"servers/serving": 2, "servers/fenced": 0, "servers/generated_tokens": 90, "servers/failed_requests": 1},
        {"servers/serving": 1, "servers/fenced": 1, "servers/generated_tokens": 95, "servers/failed_requests": 2},
    ]
    for one, numbers in zip(of.values(), told, strict=True):
        one.counters = lambda numbers=numbers: numbers  # type: ignore[method-assign]
    assert PolicyEngine(of, ROLES, are_shared=True).counters() == {
        "servers/serving": 1,
        "servers/fenced": 1,
        "servers/generated_tokens": 95,
        "servers/failed_requests": 3,
    }

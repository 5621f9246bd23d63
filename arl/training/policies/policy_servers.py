"""The inference engines of several policies, as one: a request goes to the engine of its role's policy.

Each policy's weights travel as in a run of one policy, to its own engine, all at the same time. The version is the
oldest of theirs: the newest that every policy's servers hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from arl.api.engine import InferenceEngine, UpdateStats, WeightServer, WeightTransport, WeightUpdate
from arl.api.errors import ProcessLostError, TransportError
from arl.api.settings.engines import PolicyRoles
from arl.api.train_engine import WeightSource
from arl.api.types import ModelRequest, ModelResponse
from arl.training.policies.policy_learners import PolicyProbes, PolicyWeights
from arl.training.weight_sync import CheckedEngine

ResultT = TypeVar("ResultT")

_OF_SHARED: Mapping[str, Callable[[list[float]], float]] = {
    "servers/serving": min,
    "servers/fenced": max,
    "servers/generated_tokens": max,
}
"""Metric of servers that policies share -> its value, from what the engine of each says."""


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """A WeightUpdate of each policy."""

    of: Mapping[str, WeightUpdate]

    @property
    def version(self) -> int:
        return min(update.version for update in self.of.values())

    @property
    def adapter(self) -> str | None:
        return None

    @property
    def num_bytes(self) -> int:
        return sum(update.num_bytes for update in self.of.values())

    async def prepare(self, server: WeightServer) -> None:
        raise TransportError(f"{server.address} belongs to one policy; give it that policy's update")

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None:
        await self.prepare(server)


class PolicyEngine:
    """An InferenceEngine over those of several policies. are_shared: all of these have the same servers."""

    def __init__(self, of: Mapping[str, InferenceEngine], roles: PolicyRoles, *, are_shared: bool = False) -> None:
        self.of = of
        self._roles = roles
        self._counted: Mapping[str, Callable[[list[float]], float]] = _OF_SHARED if are_shared else {}

    @property
    def version(self) -> int:
        return min(engine.version for engine in self.of.values())

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Raises RoleError for a role that no policy plays."""
        return await self.of[self._roles.policy_of(request.role)].agenerate(request)

    async def pause(self) -> None:
        await each(self.of, lambda name: self.of[name].pause())

    async def resume(self) -> None:
        await each(self.of, lambda name: self.of[name].resume())

    async def update_weights(self, update: WeightUpdate) -> UpdateStats:
        own = _of_policies(update, PolicyUpdate).of
        return _costs(await each(self.of, lambda name: self.of[name].update_weights(own[name])))

    def counters(self) -> dict[str, float]:
        """Sums over the policies; what each of them says of the same servers counts once."""
        found = [engine.counters() for engine in self.of.values()]
        names = dict.fromkeys(name for own in found for name in own)
        return {name: self._counted.get(name, sum)([own[name] for own in found if name in own]) for name in names}

    def wants_probe(self, version: int) -> bool:
        return any(isinstance(engine, CheckedEngine) and engine.wants_probe(version) for engine in self.of.values())

    async def check_weights(self, probes: PolicyProbes) -> None:
        """Raises ServerError for a server that computes with other weights than its policy's."""

        async def check(name: str) -> None:
            engine, probe = self.of[name], probes.of[name]
            if probe is not None and isinstance(engine, CheckedEngine) and engine.wants_probe(probe.version):
                await engine.check_weights(probe)

        await each(self.of, check)

    async def aclose(self) -> None:
        await each(self.of, lambda name: self.of[name].aclose())


class PolicyTransport:
    """A WeightTransport over those of several policies."""

    def __init__(self, of: Mapping[str, WeightTransport]) -> None:
        self._of = of

    def snapshot(self, engine: WeightSource) -> PolicyUpdate:
        """All policies' weights, of one version, or none."""
        sources = _of_policies(engine, PolicyWeights).of
        taken: dict[str, WeightUpdate] = {}
        try:
            for name, transport in self._of.items():
                taken[name] = transport.snapshot(sources[name])
        except BaseException:
            self.discard(PolicyUpdate(taken))
            raise
        return PolicyUpdate(taken)

    async def deliver(self, update: WeightUpdate, engine: InferenceEngine) -> UpdateStats:
        """On return all policies' servers hold the version. An error is raised once all deliveries have ended."""
        updates, engines = _of_policies(update, PolicyUpdate).of, _of_policies(engine, PolicyEngine).of
        return _costs(await each(self._of, lambda name: self._of[name].deliver(updates[name], engines[name])))

    def discard(self, update: WeightUpdate) -> None:
        for name, own in _of_policies(update, PolicyUpdate).of.items():
            self._of[name].discard(own)

    def close(self) -> None:
        with ExitStack() as stack:
            for transport in self._of.values():
                stack.callback(transport.close)


def _of_policies(one: object, kind: type[ResultT]) -> ResultT:
    if not isinstance(one, kind):
        raise TypeError(f"a {type(one).__name__} is of one policy; several policies need a {kind.__name__}")
    return one


async def each(names: Mapping[str, Any], act: Callable[[str], Awaitable[ResultT]]) -> list[ResultT]:
    """Do it for all policies at the same time. Of several errors, one that another try would not mend is raised."""
    ended = await asyncio.gather(*map(act, names), return_exceptions=True)
    if errors := [one for one in ended if isinstance(one, BaseException)]:
        raise min(errors, key=lambda error: isinstance(error, ProcessLostError | TransportError))
    return [one for one in ended if not isinstance(one, BaseException)]


def _costs(stats: Sequence[UpdateStats]) -> UpdateStats:
    """Policies are updated at the same time: the largest of each."""
    return UpdateStats(
        pause_s=max(one.pause_s for one in stats),
        load_s=max(one.load_s for one in stats),
        resume_s=max(one.resume_s for one in stats),
    )

"""Several policies as one: their learners, weights, inference engines and weight transports.

    prepare, train --shares of the batch--> RecoveringLearner of each policy, on a thread of its own

The version is the oldest of theirs. Learners differ only while a batch is trained, or after a step that failed; such a
step is never saved. A learner that is replaced loads the newest checkpoint and trains its kept batches again, to the
version of the others.

A request goes to the engine of its role's policy. Each policy's weights travel as in a run of one policy, to its own
engine, all at the same time. The version is the oldest of theirs: the newest that every policy's servers hold.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar, cast

from msgspec.structs import replace as replaced

from arl.api.engine import InferenceEngine, UpdateStats, WeightProbe, WeightServer, WeightTransport, WeightUpdate
from arl.api.errors import CheckpointError, ProcessLostError, TrainingError, TransportError
from arl.api.events import Placed, TokenFrame
from arl.api.settings.engines import PolicyRoles
from arl.api.train_engine import ModelLimits, Saving, Snapshot, WeightSource
from arl.api.types import Group, ModelRequest, ModelResponse
from arl.training.learner_process import RemoteBatch
from arl.training.learner_recovery import RecoveringLearner
from arl.training.token_log import ReportedBatch, named
from arl.training.weight_sync import CheckedEngine

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPolicies:
    """A batch that the learners have prepared, each its share."""

    advantages: list[float | None]
    """PreparedBatch's, of all policies' trajectories."""
    shares: Shares
    """Of the new groups."""
    of: Mapping[str, RemoteBatch]


class PolicyLearners:
    """Stands for one Learner (see RunLearner). Calls block. Make them all from one thread."""

    def __init__(self, starts: Mapping[str, Callable[[], RecoveringLearner]], roles: PolicyRoles) -> None:
        """starts: policy -> starts its learner. Raises what these raise, with no learner left behind."""
        self._roles = roles
        self._threads = {name: ThreadPoolExecutor(1, f"arl-train-{name}") for name in starts}
        self._of: dict[str, RecoveringLearner] = {}
        self._unasked = set(starts)
        """Policies that have had no trajectory in any batch of this process."""
        self._has_told = False

        def start(name: str) -> None:
            self._of[name] = starts[name]()

        try:
            self._each(start)
        except BaseException:
            self.close()
            raise
        self._of = {name: self._of[name] for name in starts}
        self.engine = PolicyWeights({name: learner.engine for name, learner in self._of.items()})

    @property
    def version(self) -> int:
        return min(learner.version for learner in self._of.values())

    @property
    def num_recoveries(self) -> int:
        return sum(learner.num_recoveries for learner in self._of.values())

    @property
    def pulse(self) -> int:
        return sum(learner.pulse for learner in self._of.values())

    @property
    def is_full(self) -> bool:
        return any(learner.is_full for learner in self._of.values())

    def placed(self) -> dict[str, Placed]:
        """Where each policy's trainer is."""
        return self._each(lambda name: self._of[name].placed())

    def prepare(self, groups: Sequence[Group], replayed: Sequence[Group] = ()) -> PreparedPolicies:
        """Raises RoleError for a trajectory of no policy, TrainingError after a step that some policies trained."""
        self._check_in_step()
        shares = Shares.of(groups, self._roles)
        self._tell_of_unasked(shares)
        of = self._each(
            lambda name: self._of[name].prepare(
                share_of(name, groups, self._roles), share_of(name, replayed, self._roles)
            )
        )
        of_all = Shares.of([*groups, *replayed], self._roles)
        advantages = of_all.joined({name: batch.advantages for name, batch in of.items()})
        return PreparedPolicies(advantages=advantages, shares=shares, of=of)

    def train(self, batch: PreparedPolicies) -> ReportedBatch:
        """Train all policies. One without trained tokens makes no optimizer step, and its version goes on."""
        done = self._each(lambda name: self._of[name].train(batch.of[name]))
        rewards = {f"policies/{name}/reward": mean for name, mean in batch.shares.rewards().items()}
        return ReportedBatch(
            metrics=_metrics({name: one.metrics for name, one in done.items()}) | rewards,
            numbers=_numbers(batch.shares, done),
            tokens=[frame for name, one in done.items() for frame in _renamed(one.tokens, batch.shares.names(name))],
            cpu_s=sum(one.cpu_s for one in done.values()),
        )

    def offload(self) -> None:
        self._each(lambda name: self._of[name].offload())

    def onload(self) -> None:
        self._each(lambda name: self._of[name].onload())

    def save(self, directory: Path) -> Saving:
        """A directory for each policy."""
        self._check_in_step()
        directory.mkdir(parents=True, exist_ok=True)
        begun: list[Saving] = []

        def save(name: str) -> None:
            begun.append(self._of[name].save(directory / name))

        try:
            self._each(save)
        except BaseException:
            for saving in begun:  # the caller removes the directory
                try:
                    saving.wait()
                except CheckpointError as error:
                    log.warning("a policy could not be saved either: %s", error)
            raise
        return PolicySavings(tuple(begun))

    def load(self, directory: Path) -> None:
        """Raises CheckpointError, which names the mismatch."""
        self._each(lambda name: self._of[name].load(directory / name))
        versions = {name: learner.version for name, learner in self._of.items()}
        if len({*versions.values()}) > 1:
            raise CheckpointError(f"{directory} holds policies of different versions: {_told(versions)}")

    def whereabouts(self) -> str:
        """Where the trainers' processes are. Any thread may ask."""
        return "; ".join(f"{name}: {learner.whereabouts()}" for name, learner in self._of.items())

    def close(self) -> None:
        """Close all, whichever fails."""
        with ExitStack() as stack:
            for thread in self._threads.values():
                stack.callback(thread.shutdown)
            for learner in self._of.values():
                stack.callback(learner.close)

    def _each(self, act: Callable[[str], ResultT]) -> dict[str, ResultT]:
        """The result for each policy. All run at the same time; an error is raised once all have ended."""
        calls = {name: thread.submit(act, name) for name, thread in self._threads.items()}
        wait(calls.values())
        return {name: call.result() for name, call in calls.items()}

    def _check_in_step(self) -> None:
        versions = {name: learner.version for name, learner in self._of.items()}
        if len({*versions.values()}) > 1:
            raise TrainingError(
                f"a step failed after some policies were trained, so their versions differ: {_told(versions)}; start "
                "the run again, which continues from its newest checkpoint"
            )

    def _tell_of_unasked(self, shares: Shares) -> None:
        """Warn, after the first batch, of policies without a trajectory in it."""
        self._unasked -= {*shares.owners}
        if self._unasked and not self._has_told:
            log.warning(
                "no agent of the first %d groups had a role of the policy %s; the roles were: %s. A policy that is "
                "never asked is never trained: see policies.NAME.roles",
                len(shares.groups),
                " or ".join(sorted(self._unasked)),
                ", ".join(sorted({t.role for group in shares.groups for t in group.trajectories})),
            )
        self._has_told = True


class PolicyWeights:
    """The weights of all policies, as the run's loop sees them. of: those of each, as its transport does."""

    def __init__(self, of: Mapping[str, RecoveringLearner]) -> None:
        self.of = of

    @property
    def version(self) -> int:
        return min(weights.version for weights in self.of.values())

    @property
    def limits(self) -> ModelLimits:
        """What all of them can train. The limits of each policy's trajectories are its own."""
        all_limits = [weights.limits for weights in self.of.values()]
        lengths = [limits.context_length for limits in all_limits if limits.context_length is not None]
        size = min(limits.vocab_size for limits in all_limits)
        return replace(all_limits[0], vocab_size=size, context_length=min(lengths, default=None))

    def snapshot(self) -> PolicySnapshot:
        taken: dict[str, Snapshot] = {}
        try:
            for name, weights in self.of.items():
                taken[name] = weights.snapshot()
        except BaseException:
            PolicySnapshot(taken).release()
            raise
        return PolicySnapshot(taken)

    def probe(self) -> PolicyProbes:
        return PolicyProbes({name: weights.probe() for name, weights in self.of.items()})


@dataclass(frozen=True, slots=True)
class PolicyProbes:
    """A WeightProbe of each policy; None of one that cannot be probed."""

    of: Mapping[str, WeightProbe | None]


@dataclass(frozen=True, slots=True)
class PolicySnapshot:
    """A copy of all policies' weights of one version."""

    of: Mapping[str, Snapshot]

    @property
    def version(self) -> int:
        return min(snapshot.version for snapshot in self.of.values())

    def write(self, directory: Path) -> int:
        """Write a directory with a Hugging Face model for each policy, whole or not at all; return its bytes."""
        aside = directory.with_name(f".{directory.name}.policies")
        shutil.rmtree(aside, ignore_errors=True)  # left by a kill
        try:
            aside.mkdir(parents=True)
            num_bytes = sum(snapshot.write(aside / name) for name, snapshot in self.of.items())
            if directory.exists():
                shutil.rmtree(directory)
            aside.rename(directory)
        except OSError as error:
            raise TransportError(f"cannot write the policies to {directory}: {error}") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return num_bytes

    def release(self) -> None:
        """Free the memory. Idempotent."""
        with ExitStack() as stack:
            for snapshot in self.of.values():
                stack.callback(snapshot.release)


@dataclass(frozen=True, slots=True)
class PolicySavings:
    parts: tuple[Saving, ...]

    def wait(self) -> None:
        with ExitStack() as stack:
            for saving in reversed(self.parts):
                stack.callback(saving.wait)


def _told(versions: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


_COUNTS = ("nonfinite_grads", "tokens", "forwarded_tokens", "trained_tokens", "microbatches")


def _metrics(by_policy: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """policies/NAME/METRIC of each; and METRIC of the run: the sum of counts, the largest of maxima, and else the mean
    over the policies that made an optimizer step.
    """
    own = {f"policies/{name}/{key}": value for name, found in by_policy.items() for key, value in found.items()}
    trained = [found for found in by_policy.values() if found.get("trained_tokens")] or [*by_policy.values()]
    merged: dict[str, float] = {}
    for key in dict.fromkeys(key for found in by_policy.values() for key in found):
        counted = key.removeprefix("critic/") in _COUNTS
        values = [found[key] for found in (by_policy.values() if counted else trained) if key in found]
        if values:
            merged[key] = sum(values) if counted else max(values) if "max" in key else fmean(values)
    return merged | own


def _numbers(shares: Shares, done: Mapping[str, ReportedBatch]) -> list[tuple[float, float, float, float]]:
    """Those of all trajectories; none where a step keeps none."""
    numbers = {name: one.numbers for name, one in done.items()}
    is_whole = all(len(own) == shares.owners.count(name) for name, own in numbers.items())
    return shares.joined(numbers) if is_whole else []


def _renamed(frames: Sequence[TokenFrame], names: Mapping[tuple[str, int], tuple[str, int]]) -> list[TokenFrame]:
    rows = [[names[episode, number] for episode, number in cast("Any", frame.rows)] for frame in frames]
    return [replaced(frame, rows=own, is_renamed=True) for frame, own in zip(frames, rows, strict=True)]


def share_of(policy: str, groups: Sequence[Group], roles: PolicyRoles) -> list[Group]:
    """The groups with the trajectories of one policy's roles alone; a group without any stays, as it keeps its place in
    a minibatch. Raises RoleError for a role that no policy plays.
    """

    def own(group: Group) -> Group:
        is_own = [roles.policy_of(trajectory.role) == policy for trajectory in group.trajectories]
        return replace(
            group,
            trajectories=tuple(compress(group.trajectories, is_own)),
            episode_indices=tuple(compress(group.episode_indices, is_own)),
            greedy_rewards={role: r for role, r in group.greedy_rewards.items() if roles.by_role.get(role) == policy},
        )

    return [own(group) for group in groups]


@dataclass(frozen=True, slots=True)
class Shares:
    """Groups of a batch, and whose each of their trajectories is."""

    groups: Sequence[Group]
    owners: Sequence[str]
    """The policy of each trajectory, in order."""

    @classmethod
    def of(cls, groups: Sequence[Group], roles: PolicyRoles) -> Shares:
        return cls(groups, [roles.policy_of(t.role) for group in groups for t in group.trajectories])

    def joined(self, by_policy: Mapping[str, Sequence[ResultT]]) -> list[ResultT]:
        """One value for each trajectory, in order, from the values that each policy has for its own."""
        left = {policy: iter(values) for policy, values in by_policy.items()}
        return [next(left[owner]) for owner in self.owners]

    def rewards(self) -> dict[str, float]:
        """The mean reward of each policy's trajectories, if it has any."""
        rewards = [t.reward for group in self.groups for t in group.trajectories]
        own: dict[str, list[float]] = {}
        for owner, reward in zip(self.owners, rewards, strict=True):
            own.setdefault(owner, []).append(reward)
        return {name: fmean(values) for name, values in own.items()}

    def names(self, policy: str) -> dict[tuple[str, int], tuple[str, int]]:
        """How the policy's learner names its trajectories (by episode, and number there) -> how the run does."""
        counts = Counter[str]()
        found: dict[tuple[str, int], tuple[str, int]] = {}
        names = ((episode, number) for group in self.groups for episode, number, _ in named(group))
        for (episode, number), owner in zip(names, self.owners, strict=True):
            if owner == policy:
                found[episode, counts[episode]] = episode, number
                counts[episode] += 1
        return found


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

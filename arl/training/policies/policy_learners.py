"""The learners of several policies, as one: all train their shares of a batch at the same time, in step.

    prepare, train --shares of the batch--> RecoveringLearner of each policy, on a thread of its own

The version is the oldest of theirs. Learners differ only while a batch is trained, or after a step that failed; such a
step is never saved. A learner that is replaced loads the newest checkpoint and trains its kept batches again, to the
version of the others.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from msgspec.structs import replace as replaced

from arl.api.engine import WeightProbe
from arl.api.errors import CheckpointError, TrainingError, TransportError
from arl.api.events import Placed, TokenFrame
from arl.api.settings.engines import PolicyRoles
from arl.api.train_engine import ModelLimits, Saving, Snapshot
from arl.api.types import Group
from arl.training.learner_process import RemoteBatch
from arl.training.learner_recovery import RecoveringLearner, RecoveringWeights
from arl.training.policies.shares import Shares, share_of
from arl.training.token_log import ReportedBatch

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
            _wait_for(begun)  # the caller removes the directory
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

    def __init__(self, of: Mapping[str, RecoveringWeights]) -> None:
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


def _wait_for(savings: Sequence[Saving]) -> None:
    for saving in savings:
        try:
            saving.wait()
        except CheckpointError as error:
            log.warning("a policy could not be saved either: %s", error)


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
    is_whole = all(len(own) == shares.count(name) for name, own in numbers.items())
    return shares.joined(numbers) if is_whole else []


def _renamed(frames: Sequence[TokenFrame], names: Mapping[tuple[str, int], tuple[str, int]]) -> list[TokenFrame]:
    rows = [[names[row] for row in map(_pair, frame.rows)] for frame in frames]
    return [replaced(frame, rows=own, is_renamed=True) for frame, own in zip(frames, rows, strict=True)]


def _pair(row: Any) -> tuple[str, int]:
    episode, number = row
    return episode, number

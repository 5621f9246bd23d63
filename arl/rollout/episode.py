"""One run of a workflow on an example: what it samples from, its time limit, its retries, and how it ended.

EpisodeRunner is the one place where an exception in user code becomes data.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from statistics import fmean
from typing import Any, TypeVar, cast

from arl.api.engine import ModelLimits, Sampler
from arl.api.episode_clock import CLOCK, EpisodeClock
from arl.api.errors import ArlError, ConfigError, EpisodeTimeoutError, RoleError, TrajectoryError
from arl.api.events import NOWHERE, Events
from arl.api.types import Example, ModelRequest, ModelResponse, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.rollout.constrained import check_images, check_response, check_trajectory
from arl.rollout.failure_log import FailureLog
from arl.rollout.report import EpisodeReport
from arl.rollout.token_ledger import TokenLedger
from arl.rollout.trained_policies import TrainedPolicies

ErrorT = TypeVar("ErrorT", bound=Exception)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """How one run of a workflow ended: with trajectories, with an error, or with neither, which means rejected."""

    name: str = ""
    """In the event log."""
    example: Example = field(default_factory=dict[str, Any])
    trajectories: tuple[Trajectory, ...] = ()
    seen: Trajectory | None = None
    """For a failed episode: what the model last saw and said; None if it said nothing."""
    error: Exception | None = None
    attempts: int = 1
    elapsed_s: float
    """The seconds of all attempts."""

    @property
    def reward(self) -> float:
        """See episode_reward; 0.0 when it was rejected or failed."""
        return episode_reward(self.trajectories) if self.trajectories else 0.0

    @property
    def is_finished(self) -> bool:
        return bool(self.trajectories)

    @property
    def is_rejected(self) -> bool:
        return not self.trajectories and self.error is None


def episode_reward(trajectories: Sequence[Trajectory]) -> float:
    """The mean over roles: an agent whose transcript branched counts once."""
    if len(trajectories) == 1:
        return float(trajectories[0].reward)
    return fmean(rewards_by_role(trajectories).values())


def rewards_by_role(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """role -> the mean reward of its trajectories, all of one episode."""
    rewards: dict[str, list[float]] = {}
    for trajectory in trajectories:
        rewards.setdefault(trajectory.role, []).append(trajectory.reward)
    return {role: fmean(values) for role, values in rewards.items()}


class EpisodeSampler:
    """The Sampler that one episode gets: it passes requests on to `engine`, and can set how they are sampled.

    is_greedy: every request is answered at temperature 0. The logprobs are those of temperature 1.
    seed: a request without a seed gets one, a function of this text and of the number of requests before it. Retries of
    an episode share the sampler, so they do not sample the same tokens again.
    """

    def __init__(self, engine: Sampler, *, is_greedy: bool = False, seed: str | None = None) -> None:
        self._engine = engine
        self._is_greedy = is_greedy
        self._seed = seed
        self._num_requests = 0

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        sampling = self._steered(request.sampling)
        if sampling is not request.sampling:
            request = replace(request, sampling=sampling)
        return await self._engine.agenerate(request)

    def _steered(self, sampling: SamplingParams) -> SamplingParams:
        number, self._num_requests = self._num_requests, self._num_requests + 1
        if self._is_greedy:
            return replace(sampling, temperature=0.0)
        if self._seed is None or sampling.seed is not None:
            return sampling
        return replace(sampling, seed=_seed_of(f"{self._seed}-{number}"))


@dataclass(slots=True)
class Pulse:
    """Counts the answers of engines and the ends of episodes."""

    beats: int = 0


class _Felt:
    """A Sampler whose answers `pulse` counts and `report` gets. constrained: gets those with kept ids or routes. seen:
    gets requests with images and their answers. asked: gets the roles of the requests."""

    def __init__(
        self,
        engine: Sampler,
        pulse: Pulse,
        report: EpisodeReport | None,
        constrained: list[ModelResponse],
        seen: list[tuple[ModelRequest, ModelResponse]],
        asked: set[str],
    ) -> None:
        self._seen = seen
        self._asked = asked
        self._engine = engine
        self._pulse = pulse
        self._report = report
        self._constrained = constrained

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        began = time.monotonic()
        self._asked.add(request.role)
        try:
            response = await self._engine.agenerate(request)
        except BaseException as error:
            if self._report:
                self._report.unanswered(request, error, time.monotonic() - began)
            raise
        self._pulse.beats += 1
        if self._report:
            self._report.answered(request, response, time.monotonic() - began)
        check_response(request, response)
        if response.output_ids and not (response.kept_ids is None and response.routes is None):
            self._constrained.append(response)
        if response.output_ids and request.images:
            self._seen.append((request, response))
        return response


def _seed_of(text: str) -> int:
    """31 bits, which every server takes for a seed; the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest()) >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRunner:
    """Runs episodes of one workflow."""

    workflow: RolloutWorkflow
    workflow_name: str = ""
    """For messages; "": that of its class."""
    timeout_s: float
    """The longest an episode may take, retries included."""
    retries: int = 0
    """How often an episode that failed runs again; one that timed out never does."""
    failures: FailureLog = field(default_factory=FailureLog)
    pulse: Pulse = field(default_factory=Pulse)
    events: Events = NOWHERE
    """Where callers have their episodes reported."""
    tokens: TokenLedger = field(default_factory=TokenLedger)
    """Where callers account for what their episodes receive."""
    limits: ModelLimits | None = None
    """The trained model's; None: not checked."""
    policies: TrainedPolicies | None = None
    """In a run of several: their roles, and the limits of each instead of `limits`."""
    newest_version: Callable[[], int] | None = None
    """The newest version that any server can have. A trained token of a newer one is an error. None: not checked."""
    of_tasks: Mapping[str, EpisodeRunner] = field(default_factory=dict[str, "EpisodeRunner"])
    """In a run of tasks: the runners of each task's episodes."""

    @property
    def called(self) -> str:
        """The workflow, in messages."""
        return self.workflow_name or type(self.workflow).__name__

    def of(self, task: str) -> EpisodeRunner:
        """The runner of a task's episodes: this one, in a run without tasks."""
        return self.of_tasks[task] if self.of_tasks else self

    def without_retries(self) -> EpisodeRunner:
        return replace(self, retries=0, of_tasks={name: replace(one, retries=0) for name, one in self.of_tasks.items()})

    async def run(
        self,
        sampler: Sampler,
        example: Example,
        *,
        name: str,
        report: EpisodeReport | None = None,
        oldest_allowed: int = 0,
    ) -> Episode:
        """Run one episode. What it raises is noted once and returned; a cancellation from outside passes.

        sampler: of this episode alone. name: what the log calls the episode. report: gets what happens in it; the
        caller reports a cancellation. oldest_allowed: a trained token of an older version is an error.
        """
        now = asyncio.get_running_loop().time
        clock = EpisodeClock(self.timeout_s)
        report = report or EpisodeReport()
        report.begin()
        ended = partial(Episode, name=report.episode, example=example)
        for attempt in range(1, self.retries + 2):
            result = await self.attempt(sampler, example, clock, oldest_allowed, report)
            self.pulse.beats += 1
            if not isinstance(result, Exception):
                report.end(result, episode_reward(result) if result else None, attempt, None)
                return ended(trajectories=result, attempts=attempt, elapsed_s=now() - clock.began)
            is_last = attempt > self.retries or isinstance(result, EpisodeTimeoutError)
            which = f"{name} (attempt {attempt} of {self.retries + 1})"
            self.failures.note(result, which, "it does not run again" if is_last else "it runs again")
            report.attempt_failed(attempt, result, is_last=is_last)
            if is_last:
                report.end((), None, attempt, result)
                return ended(error=result, seen=report.seen, attempts=attempt, elapsed_s=now() - clock.began)
        raise AssertionError("the last attempt returns")

    async def attempt(
        self,
        sampler: Sampler,
        example: Example,
        clock: EpisodeClock | None = None,
        oldest_allowed: int = 0,
        report: EpisodeReport | None = None,
    ) -> tuple[Trajectory, ...] | Exception:
        """One attempt of `run`, which notes nothing. clock: of the episode; None: it has no time limit."""
        clock = clock or EpisodeClock()
        CLOCK.set(clock)
        limit = clock.begin()
        constrained: list[ModelResponse] = []
        seen: list[tuple[ModelRequest, ModelResponse]] = []
        asked = set[str]()
        felt = _Felt(sampler, self.pulse, report, constrained, seen, asked)
        try:
            async with limit:
                returned: object = await self.workflow.arun_episode(felt, example)
            trajectories = _trajectories(returned)
            self._check(trajectories, oldest_allowed, asked)
            for trajectory in trajectories if constrained else ():
                check_trajectory(trajectory, constrained)
            for trajectory in trajectories if seen else ():
                check_images(trajectory, seen)
        except asyncio.CancelledError as error:
            if _is_cancelled_from_outside():
                del limit  # it has the task, which keeps the error, which keeps this frame: a circle for the collector
                raise
            return _with_cause(RuntimeError("arun_episode raised CancelledError, but nobody cancelled it"), error)
        except GeneratorExit:
            raise
        except BaseException as error:  # the one boundary where an episode's failure becomes data
            if _is_cancelled_from_outside():  # its cleanup failed under the cancellation; it must not run again
                raise asyncio.CancelledError from error
            if isinstance(error, RoleError):  # no other try, and no other episode, would mend the settings
                raise
            if isinstance(error, KeyboardInterrupt):  # it would stop the event loop before anything is saved
                raise ArlError(f"{self.called} raised KeyboardInterrupt: the run ends") from error
            return self._timed_out(error) if limit.expired() else _as_exception(error)
        finally:
            clock.end()
        return self._timed_out(None) if limit.expired() else trajectories

    def _check(self, trajectories: Sequence[Trajectory], oldest_allowed: int, asked: Collection[str]) -> None:
        """Raise TrajectoryError for tokens that no server can have sampled here, or that the model cannot train."""
        newest = self.newest_version() if self.newest_version else None
        for trajectory in trajectories:
            _check_versions(trajectory, oldest_allowed, newest)
            if self.policies is not None:
                self.policies.check_asked(trajectory, asked)
                _check_room(trajectory, self.policies.limits_of(trajectory))
            elif self.limits is not None:
                _check_room(trajectory, self.limits)

    def _timed_out(self, cause: BaseException | None) -> EpisodeTimeoutError:
        message = f"{self.called} took longer than rollout.episode_timeout_s={self.timeout_s:g}"
        return _with_cause(EpisodeTimeoutError(message), cause)


def check_workflow(workflow: object) -> None:
    """Raise ConfigError unless it is an instance of RolloutWorkflow whose arun_episode is a coroutine function."""
    if isinstance(workflow, type):
        raise ConfigError(f"workflow is the class {workflow.__name__}; pass an instance: {workflow.__name__}(...)")
    if not isinstance(workflow, RolloutWorkflow):
        raise ConfigError(f"workflow is a {type(workflow).__name__}; it must be an arl.RolloutWorkflow")
    if not inspect.iscoroutinefunction(inspect.unwrap(workflow.arun_episode, stop=inspect.iscoroutinefunction)):
        raise ConfigError(
            f"{type(workflow).__name__}.arun_episode is not a coroutine function; declare it with `async def`"
        )


def _with_cause(error: ErrorT, cause: BaseException | None) -> ErrorT:
    error.__cause__ = cause
    return error


def _is_cancelled_from_outside() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _as_exception(error: BaseException) -> Exception:
    """An error such as SystemExit, a panic of a library, or one without a text becomes the failure of this episode."""
    try:
        str(error)
    except Exception as failure:  # noqa: BLE001 - of an error of users' own, which is about to be logged
        name = type(error).__name__
        return _with_cause(RuntimeError(f"arun_episode raised {name}, whose text raised {failure!r:.100}"), error)
    if isinstance(error, Exception):
        return error
    return _with_cause(RuntimeError(f"arun_episode raised {error!r}"), error)


def _trajectories(returned: Any) -> tuple[Trajectory, ...]:
    if returned is None:
        return ()
    if isinstance(returned, Trajectory):
        return (returned,)
    is_sequence = isinstance(returned, Sequence) and not isinstance(returned, str)
    items = tuple(cast("Sequence[Any]", returned if is_sequence else (returned,)))
    wrong = [type(item).__name__ for item in items if not isinstance(item, Trajectory)]
    if wrong or not items:
        what = (f"a sequence with a {wrong[0]}" if is_sequence else f"a {wrong[0]}") if wrong else "an empty sequence"
        raise TrajectoryError(f"arun_episode returned {what}; return a Trajectory, several, or None to reject")
    return items


def _check_versions(trajectory: Trajectory, oldest_allowed: int, newest_allowed: int | None) -> None:
    oldest, newest = trajectory.oldest_version, trajectory.newest_version
    if oldest is not None and oldest < oldest_allowed:
        raise TrajectoryError(
            f"arun_episode returned a token of version {oldest}, but its group was admitted at version "
            f"{oldest_allowed}; train only on tokens sampled within the episode (loss_mask 0 for others)"
        )
    if newest is not None and newest_allowed is not None and newest > newest_allowed:
        raise TrajectoryError(
            f"arun_episode returned a token of version {newest}, but the newest weights are of version "
            f"{newest_allowed}; take versions from responses as they are, and share no server with another training"
        )


def _check_room(trajectory: Trajectory, limits: ModelLimits) -> None:
    if frozenset(trajectory.arrays) != limits.arrays:
        has, needed = (", ".join(sorted(names)) or "none" for names in (trajectory.arrays, limits.arrays))
        raise TrajectoryError(
            f"arun_episode returned a trajectory with the arrays: {has}; the trained model needs: {needed} "
            "(Trajectory.arrays)"
        )
    ids, room = trajectory.token_ids, limits.context_length
    place = int(ids.argmax())
    if (highest := ids.item(place)) >= limits.vocab_size:
        raise TrajectoryError(
            f"arun_episode returned a trajectory with token_ids[{place}] = {highest}, but the model has "
            f"{limits.vocab_size} tokens (0 to {limits.vocab_size - 1}); encode prompts with the model's own tokenizer"
        )
    if room is not None and trajectory.loss_mask[room:].any():
        last = int(trajectory.loss_mask.nonzero()[0][-1]) + 1
        raise TrajectoryError(
            f"arun_episode returned a trajectory with {last} tokens up to the last trained one, but the model has room "
            f"for {room} (max_position_embeddings in its config.json); shorten its prompts, or end it sooner"
        )

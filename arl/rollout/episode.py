"""One run of a workflow on an example: what it samples from, its time limit, its retries, its end and the checks of it.

EpisodeRunner is the one place where an exception in user code becomes data.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from statistics import fmean
from typing import Any, TypeVar, cast

from arl.api.engine import Sampler
from arl.api.errors import ArlError, ConfigError, EpisodeTimeoutError, RoleError, TrajectoryError
from arl.api.events import NOWHERE, Events
from arl.api.settings.engines import PolicyRoles
from arl.api.train_engine import ModelLimits
from arl.api.types import Example, ModelRequest, ModelResponse, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.rollout.episode_events import EpisodeReport, FailureLog
from arl.rollout.token_ledger import TokenLedger
from arl.runtime.clocks import CLOCK, EpisodeClock

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
        number, self._num_requests = self._num_requests, self._num_requests + 1
        if self._is_greedy:
            request = replace(request, sampling=replace(request.sampling, temperature=0.0))
        elif self._seed is not None and request.sampling.seed is None:
            # 31 bits, which every server takes for a seed; the same in every process.
            digest = blake2b(f"{self._seed}-{number}".encode(), digest_size=4).digest()
            request = replace(request, sampling=replace(request.sampling, seed=int.from_bytes(digest) >> 1))
        return await self._engine.agenerate(request)


@dataclass(slots=True)
class Pulse:
    """Counts the answers of engines and the ends of episodes."""

    beats: int = 0


@dataclass(slots=True, kw_only=True)
class _Sampled:
    """What an episode's trajectories must agree with."""

    constrained: list[ModelResponse] = field(default_factory=list[ModelResponse])
    """Responses with kept ids or routes."""
    seen: list[tuple[ModelRequest, ModelResponse]] = field(default_factory=list[tuple[ModelRequest, ModelResponse]])
    """Requests with images, and their responses."""
    asked: set[str] = field(default_factory=set[str])
    """The roles of all requests."""


class _Felt:
    """A Sampler whose answers `pulse` counts, and `report` and `sampled` get."""

    def __init__(self, engine: Sampler, pulse: Pulse, report: EpisodeReport | None, sampled: _Sampled) -> None:
        self._engine = engine
        self._pulse = pulse
        self._report = report
        self._sampled = sampled

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        began = time.monotonic()
        self._sampled.asked.add(request.role)
        try:
            response = await self._engine.agenerate(request)
        except BaseException as error:
            if self._report:
                self._report.unanswered(request, error, time.monotonic() - began)
            raise
        self._pulse.beats += 1
        if self._report:
            self._report.answered(request, response, time.monotonic() - began)
        if request.sampling.grammar is not None and response.output_ids and response.kept_ids is None:
            raise TrajectoryError(
                "the engine answered a request with a grammar, but its response has no kept_ids, which training needs "
                "to compute the same logprobs; an engine that cannot decode under a grammar must raise"
            )
        if response.output_ids and not (response.kept_ids is None and response.routes is None):
            self._sampled.constrained.append(response)
        if response.output_ids and request.images:
            self._sampled.seen.append((request, response))
        return response


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
        sampled = _Sampled()
        felt = _Felt(sampler, self.pulse, report, sampled)
        try:
            async with limit:
                returned: object = await self.workflow.arun_episode(felt, example)
            trajectories = _trajectories(returned)
            self._check(trajectories, oldest_allowed, sampled)
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

    def _check(self, trajectories: Sequence[Trajectory], oldest_allowed: int, sampled: _Sampled) -> None:
        """Raise TrajectoryError for tokens that no server can have sampled here, or that the model cannot train."""
        newest = self.newest_version() if self.newest_version else None
        for trajectory in trajectories:
            check_versions(trajectory, oldest_allowed, newest)
            if self.policies is not None:
                check_room(trajectory, self.policies.limits_of(trajectory, sampled.asked))
            elif self.limits is not None:
                check_room(trajectory, self.limits)
            if sampled.constrained:
                check_trajectory(trajectory, sampled.constrained)
            if sampled.seen:
                check_images(trajectory, sampled.seen)

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


def check_trajectory(trajectory: Trajectory, responses: Sequence[ModelResponse]) -> None:
    """Raise TrajectoryError if the trajectory trains one of these responses without its kept ids, or has no routes.

    responses: of its episode, those with kept ids or routes. One is found by its ids and logprobs, wherever it begins.
    """
    if trajectory.routes is None and trajectory.num_trained_tokens and any(r.routes is not None for r in responses):
        raise TrajectoryError(
            "arun_episode returned a trajectory without the routes of its responses: training would use other experts "
            "than the sampler did. Pass routes=response.routes for a prompt and its response; after several responses, "
            "let arl.Conversation make the trajectories, or set engine.replay_routing=false"
        )

    kept = trajectory.kept_ids
    is_bare = trajectory.loss_mask if kept is None else trajectory.loss_mask & (kept.index < 0)
    if not is_bare.any():
        return
    for response in responses:
        if response.kept_ids is None:
            continue
        is_constrained = response.kept_ids.index >= 0
        for start, stop in _places(response, trajectory):
            if (is_bare[start:stop] & is_constrained[: stop - start]).any():
                raise TrajectoryError(
                    f"arun_episode returned a trajectory whose tokens from {start} on were sampled under a grammar, "
                    "top_p, top_k or min_p, but without their kept_ids: training would compute other logprobs than the "
                    "sampler did; after n tokens of a prompt, pass "
                    "kept_ids=response.kept_ids.joined([n, response.kept_ids])"
                )


def check_images(trajectory: Trajectory, seen: Sequence[tuple[ModelRequest, ModelResponse]]) -> None:
    """Raise TrajectoryError if the trajectory trains a response after its request's tokens, but not its images.

    seen: of its episode, the requests with images, and their responses, which have tokens.
    """
    for request, response in seen:
        prompt = [*request.input_ids]
        for start, stop in _places(response, trajectory):
            first = start - len(prompt)
            is_trained = trajectory.loss_mask[start:stop].any()
            if first < 0 or not is_trained or trajectory.token_ids[first:start].tolist() != prompt:
                continue
            wanted = [(one.image, first + one.start, first + one.stop) for one in request.images]
            found = [(one.image, one.start, one.stop) for one in trajectory.images if first <= one.start < start]
            if found != wanted:
                raise TrajectoryError(
                    f"arun_episode returned a trajectory whose tokens from {start} on were sampled with "
                    "images in view, but without all of these in their places: training would compute "
                    "other logprobs than the sampler did; pass images=request.images for a prompt and its response, or "
                    "let arl.Conversation make the trajectories"
                )


def _places(response: ModelResponse, trajectory: Trajectory) -> Iterator[tuple[int, int]]:
    """Where the response's tokens lie: [start, stop), which may be cut at the trajectory's end."""
    import numpy as np

    ids, logprobs = np.array(response.output_ids, np.int32), np.array(response.output_logprobs, np.float32)
    begins = (trajectory.token_ids == ids[0]) & (trajectory.behavior_logprobs == logprobs[0])
    for start in begins.nonzero()[0].tolist():
        place = slice(start, start + len(ids))
        n = len(trajectory.token_ids[place])
        is_it = (trajectory.token_ids[place] == ids[:n]) & (trajectory.behavior_logprobs[place] == logprobs[:n])
        if is_it.all():
            yield start, start + n


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPolicies:
    """The policies of a run, as the end of an episode sees them."""

    roles: PolicyRoles
    limits: Mapping[str, ModelLimits]
    """Of each policy's model."""

    def limits_of(self, trajectory: Trajectory, asked: Iterable[str]) -> ModelLimits:
        """Of the policy that plays its role.

        Raises RoleError if no policy does, or if it trains a policy that the episode did not ask: another one sampled
        its tokens. asked: the roles of the episode's requests.
        """
        policy = self.roles.policy_of(trajectory.role)
        if trajectory.num_trained_tokens and policy not in {self.roles.policy_of(role) for role in asked}:
            raise RoleError(
                f"arun_episode returned a trajectory of the role {trajectory.role!r}, but asked for "
                f"{', '.join(sorted({*asked})) or 'none'} alone: the policy {policy} would be trained on tokens that "
                "it did not sample. Give the conversation (or ModelRequest) the role of its trajectory"
            )
        return self.limits[policy]


def check_versions(trajectory: Trajectory, oldest_allowed: int, newest_allowed: int | None) -> None:
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


def check_room(trajectory: Trajectory, limits: ModelLimits) -> None:
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

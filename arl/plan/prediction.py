"""The prediction of a simulated run for a deployment: throughput, who waits for whom, staleness, memory and money."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from arl.plan.ceilings import buffers_ceiling, servers_ceiling, trainers_ceiling
from arl.plan.costs import Costs, Deployment, Range
from arl.plan.simulated_run import SimulatedRun, SimulatedStep, simulate
from arl.plan.workload import Record

NUM_STEPS = 12
"""Steps that a prediction is taken from, unless it is told otherwise."""
_ABOUT = 1.1
"""Batches differ: a tenth more than was measured is no extrapolation."""


class Waits(Record, frozen=True, kw_only=True):
    """Shares of the time, 0 to 1."""

    trainer_trains: float
    trainer_waits_for_batch: float
    """No batch can be taken: too few episodes have finished."""
    trainer_copies: float
    """Snapshots of the weights."""
    trainer_waits_for_delivery: float
    """With max_staleness 0: until the servers have the new weights. These four add up to 1."""
    servers_compute: float
    """The mean over servers."""
    servers_load: float
    """They stand still for new weights."""
    servers_idle: float
    """They have no requests: the workflow's tools, the buffer's room or the controller hold them up."""
    controller: float
    """The controller's one event loop is busy. Near 1 it is the limit."""
    rollout_waits_for_room: float
    """The buffer is full: the bound on staleness, not max_concurrent_episodes, decides how many episodes run."""

    @property
    def trainer_idle(self) -> float:
        return self.trainer_waits_for_batch + self.trainer_waits_for_delivery


class Prediction(Record, frozen=True, kw_only=True):
    """One deployment, predicted from `num_steps` steps after the first ones, which fill the pipeline."""

    deployment: Deployment
    num_steps: int
    step_s: float
    """Seconds from one step to the next; below, per second likewise."""
    episodes_per_s: float
    """Episodes trained."""
    tokens_per_s: float
    """Sampled tokens trained."""
    requests_per_s: float
    request_s: float
    """Mean seconds of a request, waits included."""
    running_requests: float
    """The mean over one server's iterations."""
    most_running: int
    in_flight: float
    """Mean number of requests that were asked and not answered."""
    running_episodes: float
    """Mean number of episodes that run, in their tools included."""
    waits: Waits
    staleness: dict[int, float]
    """Versions behind -> share of the trained tokens."""
    rejected: float
    """Share of the episodes that ended and were not trained: rejected, failed, in groups that were refused."""
    server_bytes: int
    """Weights, and the most keys and values of one server at once; 0: unknown."""
    rank_bytes: int
    step_cost: float
    """Money; 0: no prices are known."""
    episodes_cost: float
    """For 1,000 trained episodes."""
    hour_cost: float
    limit: Literal["controller", "trainer", "servers", "staleness", "episodes"]
    """What more of would make it faster: see `_limit`."""
    extrapolated: tuple[str, ...]
    """The numbers outside the measured ranges; empty if there are none."""

    @property
    def mean_staleness(self) -> float:
        return sum(versions * share for versions, share in self.staleness.items())


def predict(costs: Costs, deployment: Deployment, *, num_steps: int = NUM_STEPS, seed: int = 0) -> Prediction:
    """Simulate the deployment. Raises StarvedError where no group can be trained."""
    filling = deployment.max_staleness + 2
    return told_by(simulate(costs, deployment, filling + num_steps, seed=seed), costs, filling)


def told_by(run: SimulatedRun, costs: Costs, filling: int) -> Prediction:
    """filling: the first steps, which are left out."""
    deployment, before, steps = run.deployment, run.steps[filling - 1], run.steps[filling:]
    last = steps[-1]
    seconds = last.ended - before.ended
    episodes, tokens = sum(s.num_episodes for s in steps), sum(s.num_tokens for s in steps)
    answered, iterations = last.num_answered - before.num_answered, last.servers_iterations - before.servers_iterations
    step_s, cost_per_s = seconds / len(steps), hour_cost(costs, deployment) / 3600
    ended = run.counters["episodes_rejected"] + run.counters["episodes_dropped"]
    waits = _waits(before, steps, deployment.num_servers)
    return Prediction(
        deployment=deployment,
        num_steps=len(steps),
        step_s=step_s,
        episodes_per_s=episodes / seconds,
        tokens_per_s=tokens / seconds,
        requests_per_s=answered / seconds,
        request_s=(last.request_s - before.request_s) / max(answered, 1),
        running_requests=(last.servers_decoded - before.servers_decoded) / max(iterations, 1),
        most_running=run.most_running,
        in_flight=(last.in_flight_s - before.in_flight_s) / seconds,
        running_episodes=(last.episodes_s - before.episodes_s) / seconds,
        waits=waits,
        staleness=_staleness(steps),
        rejected=ended / (ended + run.counters["episodes_trained"]),
        server_bytes=_server_bytes(costs, run),
        rank_bytes=rank_bytes(costs, deployment),
        step_cost=cost_per_s * step_s,
        episodes_cost=1000 * cost_per_s * seconds / episodes,
        hour_cost=3600 * cost_per_s,
        limit=_limit(costs, deployment, waits),
        extrapolated=_beyond(costs, run, steps),
    )


def hour_cost(costs: Costs, deployment: Deployment) -> float:
    """Money for an hour."""
    return deployment.num_servers * costs.prices.server_hour + deployment.num_ranks * costs.prices.rank_hour


def _waits(before: SimulatedStep, steps: Sequence[SimulatedStep], num_servers: int) -> Waits:
    last, seconds = steps[-1], steps[-1].ended - before.ended
    compute = (last.servers_busy_s - before.servers_busy_s) / seconds / num_servers
    load = (last.servers_stood_still_s - before.servers_stood_still_s) / seconds / num_servers
    return Waits(
        trainer_trains=sum(s.trained - s.taken for s in steps) / seconds,
        trainer_waits_for_batch=sum(s.taken - s.began for s in steps) / seconds,
        trainer_copies=sum(s.copied - s.trained for s in steps) / seconds,
        trainer_waits_for_delivery=sum(s.ended - s.copied for s in steps) / seconds,
        servers_compute=compute,
        servers_load=load,
        servers_idle=max(1 - compute - load, 0.0),
        controller=(last.controller_s - before.controller_s) / seconds,
        rollout_waits_for_room=(last.full_s - before.full_s) / seconds,
    )


def _limit(
    costs: Costs, deployment: Deployment, waits: Waits
) -> Literal["controller", "trainer", "servers", "staleness", "episodes"]:
    """The part that hardly rests; the bound on staleness, where none does; else the part with the lowest ceiling."""
    if waits.controller > 0.9:
        return "controller"
    if waits.trainer_idle < 0.05:
        return "trainer"
    if waits.rollout_waits_for_room > 0.5 and waits.servers_idle > 0.1:
        return "staleness"  # nothing is used up, and a full buffer waits for its slowest episodes
    buffers = buffers_ceiling(costs, deployment)
    if servers_ceiling(costs, deployment) < min(buffers, trainers_ceiling(costs, deployment)):
        return "servers"
    if trainers_ceiling(costs, deployment) < buffers:
        return "trainer"
    unbounded = msgspec.structs.replace(deployment, max_concurrent_episodes=10**9)
    return "episodes" if buffers < buffers_ceiling(costs, unbounded) else "staleness"


def _staleness(steps: Sequence[SimulatedStep]) -> dict[int, float]:
    counts: Counter[int] = Counter()
    for step in steps:
        counts.update(step.staleness)
    return {versions: counts[versions] / counts.total() for versions in sorted(counts)}


def _server_bytes(costs: Costs, run: SimulatedRun) -> int:
    memory = costs.memory
    return memory.server_weights + memory.kv_per_token * run.most_context if memory.kv_per_token else 0


def rank_bytes(costs: Costs, deployment: Deployment) -> int:
    """The bytes of one rank; 0 if unknown."""
    memory = costs.memory
    return memory.trainer_state // deployment.num_ranks + memory.per_rank if memory.trainer_state else 0


def _beyond(costs: Costs, run: SimulatedRun, steps: Sequence[SimulatedStep]) -> tuple[str, ...]:
    measured, deployment = costs.measured, run.deployment
    tokens = max(step.forwarded for step in steps)
    seen: list[tuple[str, float, Range | None, float]] = [
        ("servers", deployment.num_servers, measured.num_servers, 1.0),
        ("trainer ranks", deployment.num_ranks, measured.num_ranks, 1.0),
        ("requests on a server", run.most_running, measured.running_requests, _ABOUT),
        ("tokens on a server", run.most_context, measured.context_tokens, _ABOUT),
        ("tokens in a step", tokens, measured.step_tokens, _ABOUT),
    ]
    if not any(known for _, _, known, _ in seen):
        return ("nothing of this was measured",)
    return tuple(
        f"{number:,.0f} {what}" + (f" ({known[0]:,.0f} to {known[1]:,.0f} measured)" if known else " (not measured)")
        for what, number, known, about in seen
        if known is None or not known[0] / about <= number <= known[1] * about
    )

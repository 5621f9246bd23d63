"""What the model says of a deployment, how far off it may be, and the search for the best deployment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from arl.api.errors import ConfigError
from arl.cluster.plan.costs import Costs, Deployment, Range, Record
from arl.cluster.plan.steady_state import Steady

_ABOUT = 1.1
"""Batches differ: a tenth more than was measured is no extrapolation."""
_EQUAL = 0.05
"""Of deployments that are as fast, up to this share, the cheapest is the best."""
_COARSE = 6
"""Numbers of servers, and of ranks, that a search begins with."""
Limit = Literal["controller", "trainer", "servers", "staleness", "episodes"]


class Errors(Record, frozen=True, kw_only=True):
    """How far off nine of ten predictions are at most, on the stored settings of tests/cluster/plan."""

    throughput: float = 0.10
    """As a share of the number, below likewise: of episodes, tokens and requests a second, steps, and costs."""
    running_episodes: float = 0.16
    request_s: float = 0.25
    trainer_idle: float = 0.05
    """As a difference, below likewise."""
    servers_idle: float = 0.09
    controller: float = 0.02
    staleness: float = 0.3


class Prediction(Record, frozen=True, kw_only=True):
    """One deployment. Shares of the time are 0 to 1."""

    deployment: Deployment
    step_s: float
    episodes_per_s: float
    """Trained ones; below, sampled tokens of these."""
    tokens_per_s: float
    requests_per_s: float
    request_s: float
    running_episodes: float
    """Those in their tools included."""
    trainer_trains: float
    trainer_copies: float
    """Snapshots of the weights."""
    trainer_idle: float
    """It waits for a batch; with max_staleness 0, also until the servers have the new weights."""
    servers_compute: float
    servers_load: float
    """They stand still for new weights."""
    servers_idle: float
    controller: float
    """The controller's one event loop is busy."""
    staleness: dict[int, float]
    """Versions behind -> share of the trained tokens."""
    mean_staleness: float
    untrained: float
    """Share of the episodes."""
    server_bytes: float
    """Weights, and the most keys and values at once; below, of one rank. 0: unknown."""
    rank_bytes: float
    hour_cost: float
    """Money; below, for 1,000 trained episodes. 0: unknown."""
    episodes_cost: float
    extrapolated: tuple[str, ...]
    """The numbers outside the measured ranges."""


def predict(costs: Costs, deployment: Deployment) -> Prediction:
    """Raises ConfigError where no group can be trained."""
    run = Steady(costs, deployment)
    episodes, memory, prices, period_s = run.episodes, costs.memory, costs.prices, run.period_s
    trains, copies, loads = run.trains_s / period_s, costs.trainer.snapshot_s / period_s, float(run.loading.mean())
    most_running = min(float(run.running.max()), run.most_running)
    has, staleness, groups_per_s = episodes.has_turn, run.staleness(), deployment.batch_size / period_s
    episodes_per_s = groups_per_s * episodes.group_episodes
    hour_cost = deployment.num_servers * prices.server_hour + deployment.num_ranks * prices.rank_hour
    return Prediction(
        deployment=deployment,
        step_s=period_s,
        episodes_per_s=episodes_per_s,
        tokens_per_s=groups_per_s * episodes.group_sampled,
        requests_per_s=run.weight * float(has.sum()) / period_s,
        request_s=float((run.ended - run.begun)[has].mean()) + costs.controller.latency_s,
        running_episodes=float(run.playing.mean()),
        trainer_trains=trains,
        trainer_copies=copies,
        trainer_idle=max(1 - trains - copies, 0.0),
        servers_compute=run.computing,
        servers_load=loads,
        servers_idle=max(1 - run.computing - loads, 0.0),
        controller=run.controlling,
        staleness=staleness,
        mean_staleness=sum(versions * share for versions, share in staleness.items()),
        untrained=max(1 - deployment.batch_size * episodes.group_episodes / (run.num_groups * episodes.size), 0.0),
        server_bytes=memory.server_weights + memory.kv_per_token * episodes.context * most_running,
        rank_bytes=memory.trainer_state / deployment.num_ranks + memory.per_rank if memory.trainer_state else 0.0,
        hour_cost=hour_cost,
        episodes_cost=hour_cost / 3.6 / episodes_per_s,
        extrapolated=_beyond(run, most_running),
    )


def _beyond(run: Steady, most_running: float) -> tuple[str, ...]:
    measured, deployment = run.costs.measured, run.deployment
    seen: list[tuple[str, float, Range | None, float]] = [
        ("servers", deployment.num_servers, measured.num_servers, 1.0),
        ("trainer ranks", deployment.num_ranks, measured.num_ranks, 1.0),
        ("requests on a server", most_running, measured.running_requests, _ABOUT),
        ("tokens in a step", deployment.batch_size * run.episodes.group_forwarded, measured.step_tokens, _ABOUT),
    ]
    if not any(known for _, _, known, _ in seen):
        return ("nothing of this was measured",)
    return tuple(
        f"{number:,.0f} {what}" + (f" ({known[0]:,.0f} to {known[1]:,.0f} measured)" if known else " (not measured)")
        for what, number, known, about in seen
        if known is None or not known[0] / about <= number <= known[1] * about
    )


def errors_of(costs: Costs) -> Errors | None:
    """How far off predictions with these costs may be: as on the stored settings, or as far as on the measured run
    itself, whichever is more. None where nothing was measured."""
    measured, errors = costs.measured, Errors()
    if not measured.episodes_per_s:
        return errors if measured.num_servers else None
    own = abs(predict(costs, costs.deployment).episodes_per_s / measured.episodes_per_s - 1)
    return replace(errors, throughput=max(errors.throughput, own))


def limit_of(costs: Costs, deployment: Deployment) -> tuple[Limit, float]:
    """What to have more of, and by which share throughput grows at most: with twice the servers, ranks or episodes at
    once, one more version of staleness, or a controller that is twice as fast."""
    controller = costs.controller
    faster = replace(controller, per_request_s=controller.per_request_s / 2, per_episode_s=controller.per_episode_s / 2)
    before_s = Steady(costs, deployment).period_s
    after_s: dict[Limit, float] = {"controller": Steady(replace(costs, controller=faster), deployment).period_s}
    more: dict[Limit, dict[str, int]] = {
        "trainer": {"num_ranks": 2 * deployment.num_ranks},
        "servers": {"num_servers": 2 * deployment.num_servers},
        "staleness": {"max_staleness": deployment.max_staleness + 1},
        "episodes": {"max_concurrent_episodes": 2 * deployment.max_concurrent_episodes},
    }
    after_s |= {limit: Steady(costs, deployment.changed(**change)).period_s for limit, change in more.items()}
    best = min(after_s, key=lambda limit: after_s[limit])
    return best, max(before_s / after_s[best] - 1, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The servers and ranks that may be rented: the fewest and the most of each, and GPUs in total."""

    servers: tuple[int, int]
    ranks: tuple[int, int]
    budget: int | None = None

    def holds(self, deployment: Deployment) -> bool:
        numbers = ((deployment.num_servers, self.servers), (deployment.num_ranks, self.ranks))
        is_within = all(fewest <= number <= most for number, (fewest, most) in numbers)
        return is_within and (self.budget is None or deployment.num_gpus <= self.budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    best: Prediction
    tried: tuple[Prediction, ...]
    """By servers and ranks."""
    errors: Errors | None


def search(costs: Costs, base: Deployment, choice: Choice, note: Callable[[Deployment], object]) -> Plan:
    """The cheapest split of about the highest throughput. note: is told what is computed next.

    A coarse grid first, then the neighbours of the best, ever nearer. Raises ConfigError if the budget holds none.
    """
    tried: dict[tuple[int, int], Prediction] = {}

    def look_at(servers: int, ranks: int) -> None:
        if (servers, ranks) in tried or min(servers, ranks) < 1:
            return
        deployment = base.changed(num_servers=servers, num_ranks=ranks)
        if choice.holds(deployment):
            note(deployment)
            tried[servers, ranks] = predict(costs, deployment)

    def best() -> Prediction:
        """Of those whose trainer fits into its memory; if none does, of all."""
        fitting = [one for one in tried.values() if not 0 < costs.memory.rank_total < one.rank_bytes]
        enough = (1 - _EQUAL) * max(one.episodes_per_s for one in fitting or tried.values())
        fast = [one for one in fitting or tried.values() if one.episodes_per_s >= enough]
        return min(fast, key=lambda one: (one.hour_cost, one.deployment.num_gpus, one.deployment.num_servers))

    for ranks in _spread(*choice.ranks):
        most = choice.servers[1]
        if choice.budget is not None and base.gpus_per_server:
            most = min(most, (choice.budget - ranks * base.gpus_per_rank) // base.gpus_per_server)
        for servers in _spread(choice.servers[0], most):
            look_at(servers, ranks)
    if not tried:
        raise ConfigError(
            f"{choice.budget} GPUs hold no {choice.servers[0]} servers of {base.gpus_per_server} and "
            f"{choice.ranks[0]} ranks of {base.gpus_per_rank}; raise --budget"
        )
    reach = max(choice.servers[1] - choice.servers[0], choice.ranks[1] - choice.ranks[0]) // _COARSE + 1
    while reach:
        chosen = best().deployment
        far = -(-reach * chosen.num_ranks // chosen.num_servers)
        for x, y in ((-1, 0), (1, 0), (0, -1), (0, 1), (-1, 1), (1, -1)):
            look_at(chosen.num_servers + x * reach, chosen.num_ranks + y * far)
        reach = reach if best().deployment != chosen else reach // 2
    return Plan(best=best(), tried=tuple(tried[split] for split in sorted(tried)), errors=errors_of(costs))


def _spread(fewest: int, most: int) -> list[int]:
    """At most _COARSE numbers, each about as many times as large as the one before."""
    ratio = most / fewest
    return sorted({round(fewest * ratio ** (i / (_COARSE - 1))) for i in range(_COARSE)}) if ratio >= 1 else []

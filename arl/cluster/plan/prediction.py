"""What the model says of a deployment, how far off it may be, and the best deployment: numbers, text and a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec.structs import replace
from rich.console import Group, RenderableType
from rich.table import Table

from arl.api.errors import ConfigError
from arl.api.version import install_command
from arl.cluster.plan.costs import Costs, Deployment, Range, Record
from arl.cluster.plan.steady_state import Steady

_ABOUT = 1.1
"""Batches differ: a tenth more than was measured is no extrapolation."""
_EQUAL = 0.05
"""Of deployments that are as fast, up to this share, the cheapest is the best."""
_COARSE = 6
"""Numbers of servers, and of ranks, that a search begins with."""
_BAR = 30
"""Characters of the longest bar."""
Limit = Literal["controller", "trainer", "servers", "staleness", "episodes"]
_LIMITS: dict[Limit, str] = {
    "controller": "the controller's one event loop: fewer, longer turns, or rollout.num_workers",
    "trainer": "the trainer: more ranks",
    "servers": "the servers: more of them",
    "staleness": "max_staleness, which bounds how many episodes run at once: raise it, or batch_size",
    "episodes": "how many episodes run at once: raise max_concurrent_episodes",
}
Bounds = tuple[int, int]


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
    measured = costs.measured
    seen: list[tuple[str, float, Range | None, float]] = [
        ("servers", deployment.num_servers, measured.num_servers, 1.0),
        ("trainer ranks", deployment.num_ranks, measured.num_ranks, 1.0),
        ("requests on a server", most_running, measured.running_requests, _ABOUT),
        ("tokens in a step", deployment.batch_size * episodes.group_forwarded, measured.step_tokens, _ABOUT),
    ]
    beyond = tuple(
        f"{number:,.0f} {what}" + (f" ({known[0]:,.0f} to {known[1]:,.0f} measured)" if known else " (not measured)")
        for what, number, known, about in seen
        if known is None or not known[0] / about <= number <= known[1] * about
    )
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
        extrapolated=beyond if any(known for _, _, known, _ in seen) else ("nothing of this was measured",),
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
class Plan:
    best: Prediction
    tried: tuple[Prediction, ...]
    """By servers and ranks."""
    errors: Errors | None


def search(
    costs: Costs,
    base: Deployment,
    *,
    servers: Bounds,
    ranks: Bounds,
    budget: int | None = None,
    note: Callable[[Deployment], object] = lambda deployment: None,
) -> Plan:
    """The cheapest split of about the highest throughput, with so many servers and ranks, and GPUs in total.

    A coarse grid first, then the neighbours of the best, ever nearer. note: is told what is computed next. Raises
    ConfigError if the budget holds none.
    """
    tried: dict[Bounds, Prediction] = {}

    def look_at(split: Bounds) -> None:
        is_within = all(low <= n <= high for n, (low, high) in zip(split, (servers, ranks), strict=True))
        if split in tried or not is_within:
            return
        deployment = base.changed(num_servers=split[0], num_ranks=split[1])
        if budget is None or deployment.num_gpus <= budget:
            note(deployment)
            tried[split] = predict(costs, deployment)

    def best() -> Prediction:
        """Of those whose trainer fits into its memory; if none does, of all."""
        fitting = [one for one in tried.values() if not 0 < costs.memory.rank_total < one.rank_bytes]
        enough = (1 - _EQUAL) * max(one.episodes_per_s for one in fitting or tried.values())
        fast = [one for one in fitting or tried.values() if one.episodes_per_s >= enough]
        return min(fast, key=lambda one: (one.hour_cost, one.deployment.num_gpus, one.deployment.num_servers))

    def spread(fewest: int, most: int) -> list[int]:
        """At most _COARSE numbers, each about as many times as large as the one before."""
        shares = [i / (_COARSE - 1) for i in range(_COARSE)] if most >= fewest else []
        return sorted({round(fewest * (most / fewest) ** share) for share in shares})

    for num_ranks in spread(*ranks):
        most = servers[1]
        if budget is not None and base.gpus_per_server:
            most = min(most, (budget - num_ranks * base.gpus_per_rank) // base.gpus_per_server)
        for num_servers in spread(servers[0], most):
            look_at((num_servers, num_ranks))
    if not tried:
        raise ConfigError(
            f"{budget} GPUs hold no {servers[0]} servers of {base.gpus_per_server} and {ranks[0]} ranks of "
            f"{base.gpus_per_rank}; raise --budget"
        )
    reach = max(servers[1] - servers[0], ranks[1] - ranks[0]) // _COARSE + 1
    while reach:
        chosen = best().deployment
        far = -(-reach * chosen.num_ranks // chosen.num_servers)
        for x, y in ((-1, 0), (1, 0), (0, -1), (0, 1), (-1, 1), (1, -1)):
            look_at((chosen.num_servers + x * reach, chosen.num_ranks + y * far))
        reach = reach if best().deployment != chosen else reach // 2
    return Plan(best=best(), tried=tuple(tried[split] for split in sorted(tried)), errors=errors_of(costs))


# As text for the terminal, and as a picture: every number with its error, where that is known


def told(plan: Plan, costs: Costs) -> RenderableType:
    best, deployment, memory = plan.best, plan.best.deployment, costs.memory
    said, (limit, gain) = _Said(best, plan.errors), limit_of(costs, deployment)
    price = f", ${best.hour_cost:.4g} an hour" if best.hour_cost else ""
    headline = (
        f"{_counted(deployment.num_servers, 'server')} and {_counted(deployment.num_ranks, 'rank')}, max_staleness "
        f"{deployment.max_staleness}: {said.rate('episodes_per_s')} episodes/s, {said.rate('tokens_per_s')} sampled "
        f"tokens/s,\na step of {deployment.batch_size} x {deployment.group_size} episodes every {said.rate('step_s')} s"
        f"{price}\nThe limit is {_LIMITS[limit]} (up to {gain:+.0%} episodes/s)"
    )
    parts: list[RenderableType] = [headline]
    if len(plan.tried) > 1:
        parts += ["", _table(plan, costs)]
    rows = Table(box=None, show_header=False, pad_edge=False)
    trainer = f"{said.share('trainer_trains', 'trainer_idle')} trains, {said.share('trainer_idle')} idle"
    rows.add_row("trainer", f"{trainer}, {100 * best.trainer_copies:.0f} % copies weights")
    servers = f"{said.share('servers_compute', 'servers_idle')} compute, {said.share('servers_idle')} idle"
    rows.add_row("servers", f"{servers}, {100 * best.servers_load:.0f} % load weights")
    rows.add_row("requests", f"{said.rate('requests_per_s')}/s, {said.rate('request_s', 'request_s')} s each")
    rows.add_row("controller", f"busy {said.share('controller')} of the time")
    untrained = f"; {100 * best.untrained:.0f} % end without being trained" if best.untrained >= 0.005 else ""
    rows.add_row("episodes", f"{said.rate('running_episodes', 'running_episodes')} run at once{untrained}")
    parts += ["", rows, "", f"staleness of trained tokens: {said.staleness} versions"]
    highest = max(best.staleness.values())
    for versions, share in best.staleness.items():
        parts.append(f"{versions:>4} {'#' * round(_BAR * share / highest):<{_BAR}} {100 * share:.0f} %")
    parts.append("")
    for what, used, total in (
        ("server", best.server_bytes, memory.server_total),
        ("rank", best.rank_bytes, memory.rank_total),
    ):
        room = f" of {total / 1e9:.3g}" if total else ""
        if used:
            parts.append(f"memory of a {what}: {used / 1e9:.3g} GB{room}{'  MORE THAN IT HAS' * (0 < total < used)}")
    parts += [f"costs: {costs.source}"] * bool(costs.source)
    errors = "errors: nine of ten stored settings are within them" if plan.errors else "errors: unknown"
    own = costs.measured.episodes_per_s
    parts.append(errors + (f", and the measured run with its {own:.3g} episodes/s" if own else ""))
    if best.extrapolated:
        parts.append(f"extrapolated, so errors may be larger: {'; '.join(best.extrapolated)}")
    if not best.hour_cost:
        parts.append("note: no prices are known; with --server-hour and --rank-hour, steps have a cost")
    return Group(*parts, *(f"note: {note}" for note in costs.measured.notes))


class _Said:
    """The numbers of a prediction as text, with their errors."""

    def __init__(self, one: Prediction, errors: Errors | None) -> None:
        self._one, self._errors = one, errors
        off = f" ± {errors.staleness:.2f}" if errors and one.mean_staleness else ""
        self.staleness = f"{one.mean_staleness:.2f}{off}"

    def rate(self, name: str, error: str = "throughput") -> str:
        value = getattr(self._one, name)
        off = f" ± {_rounded(value * getattr(self._errors, error), 2)}" if self._errors else ""
        return _rounded(value, 3) + off

    def share(self, name: str, error: str = "") -> str:
        off = f" ± {100 * getattr(self._errors, error or name):.0f}" if self._errors else ""
        return f"{100 * getattr(self._one, name):.0f}{off} %"


def _table(plan: Plan, costs: Costs) -> Table:
    """The best, and the nearest few with more or fewer servers or ranks."""
    table, best = Table(box=None, header_style="bold", pad_edge=False), plan.best.deployment
    for name in (
        *("", "servers", "ranks", "GPUs", "episodes\na second", "step s", "trainer\nidle", "servers\nidle"),
        *("control-\nler", "stale-\nness", "$ for\n1,000", "extra-\npolated", "limit"),
    ):
        table.add_column(name, justify="left" if name in ("", "limit") else "right", no_wrap=True)

    def distance(one: Prediction) -> float:
        other = one.deployment
        return abs(other.num_servers / best.num_servers - 1) + abs(other.num_ranks / best.num_ranks - 1)

    for one in sorted(sorted(plan.tried, key=distance)[:9], key=plan.tried.index):
        said, deployment = _Said(one, plan.errors), one.deployment
        table.add_row(
            "best" if one is plan.best else "",
            *map(str, (deployment.num_servers, deployment.num_ranks, deployment.num_gpus)),
            *(said.rate(name) for name in ("episodes_per_s", "step_s")),
            *(said.share(name) for name in ("trainer_idle", "servers_idle", "controller")),
            said.staleness,
            said.rate("episodes_cost") if one.hour_cost else "",
            "yes" if one.extrapolated else "",
            limit_of(costs, deployment)[0],
        )
    return table


def _rounded(value: float, digits: int) -> str:
    return f"{float(f'{value:.{digits}g}'):,.10g}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def draw(plan: Plan, path: Path) -> None:
    """Throughput over servers, who waits, and staleness. Raises ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(f"--plot draws with matplotlib; {install_command('examples')}") from None
    figure, best = Figure(figsize=(8, 10), layout="constrained"), plan.best
    throughput, waits, staleness = figure.subplots(3, 1)
    error = plan.errors.throughput if plan.errors else 0.0
    for ranks in sorted({one.deployment.num_ranks for one in plan.tried}):
        row = {p.deployment.num_servers: p.episodes_per_s for p in plan.tried if p.deployment.num_ranks == ranks}
        off = [error * rate for rate in row.values()]
        throughput.errorbar(list(row), list(row.values()), off, fmt="o-", capsize=2, label=_counted(ranks, "rank"))
    throughput.plot(best.deployment.num_servers, best.episodes_per_s, "k*", ms=12, label="best", zorder=3)
    throughput.set(xlabel="servers", ylabel="episodes trained per second", ylim=(0, None))
    throughput.set_title("arl plan" + (" (extrapolated)" if best.extrapolated else ""))
    throughput.legend(loc="lower right")
    rows = {
        "controller": (best.controller, 0.0, 1 - best.controller),
        "servers": (best.servers_compute, best.servers_load, best.servers_idle),
        "trainer": (best.trainer_trains, best.trainer_copies, best.trainer_idle),
    }
    for place, (label, color) in enumerate([("busy", "tab:blue"), ("weights", "tab:orange"), ("idle", "lightgray")]):
        left = [sum(shares[:place]) for shares in rows.values()]
        waits.barh(list(rows), [shares[place] for shares in rows.values()], left=left, color=color, label=label)
    waits.set(xlim=(0, 1), xlabel="share of the time")
    waits.legend(loc="lower right")
    staleness.bar(list(best.staleness), list(best.staleness.values()))
    staleness.set(xlabel="staleness (versions)", ylabel="share of trained tokens")
    figure.savefig(path, dpi=120)

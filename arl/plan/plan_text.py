"""A plan as text for the terminal, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table

from arl.api.installing import install_command
from arl.plan.ceilings import servers_ceiling, trainers_ceiling
from arl.plan.costs import Costs
from arl.plan.prediction import Prediction
from arl.plan.search import Plan

_BAR = 30
"""Characters of the longest bar."""
_LIMITS = {
    "controller": "the controller's one event loop: fewer, longer turns, or rollout.num_workers",
    "trainer": "the trainer: more ranks",
    "servers": "the servers: more of them",
    "staleness": "max_staleness, which bounds how many episodes run at once: raise it, or batch_size",
    "episodes": "how many episodes run at once: raise max_concurrent_episodes",
}


def told(plan: Plan, costs: Costs) -> RenderableType:
    best = plan.best
    parts: list[RenderableType] = [_headline(best, costs)]
    if len(plan.tried) > 1:
        parts += ["", _table(plan, costs.prices.currency)]
    parts += ["", _who_waits(best, costs), "", "staleness of trained tokens", *_histogram(best.staleness)]
    parts += ["", *_memory(best, costs), *_warnings(plan, costs)]
    return Group(*parts)


def _headline(best: Prediction, costs: Costs) -> str:
    deployment, money = best.deployment, costs.prices.currency
    size = f"{deployment.batch_size} x {deployment.group_size} episodes"
    price = f", {money}{best.step_cost:.3g} a step, {money}{best.hour_cost:.4g} an hour" if best.hour_cost else ""
    return (
        f"{_counted(deployment.num_servers, 'server')} and {_counted(deployment.num_ranks, 'rank')}, max_staleness "
        f"{deployment.max_staleness}: {best.episodes_per_s:.4g} episodes/s, {best.tokens_per_s:,.0f} sampled tokens/s, "
        f"a step of {size} every {best.step_s:.3g} s{price}\nThe limit is {_LIMITS[best.limit]}"
    )


def _table(plan: Plan, currency: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    names = ["", "servers", "ranks", "GPUs", "episodes\na second", "step s", "trainer\nidle", "servers\nidle"]
    names += ["control-\nler", "stale-\nness", f"{currency} for\n1,000", "extra-\npolated", "limit"]
    for name in names:
        table.add_column(name, justify="left" if name in ("", "limit") else "right", no_wrap=True)
    for one in plan.neighbours:
        deployment, waits = one.deployment, one.waits
        table.add_row(
            "best" if one is plan.best else "",
            str(deployment.num_servers),
            str(deployment.num_ranks),
            str(deployment.num_gpus),
            f"{one.episodes_per_s:.4g}",
            f"{one.step_s:.3g}",
            _percent(waits.trainer_idle),
            _percent(waits.servers_idle),
            _percent(waits.controller),
            f"{one.mean_staleness:.2f}",
            f"{one.episodes_cost:.3g}" if one.hour_cost else "",
            "yes" if one.extrapolated else "",
            one.limit,
        )
    return table


def _who_waits(best: Prediction, costs: Costs) -> Table:
    waits, deployment = best.waits, best.deployment
    table = Table(box=None, show_header=False, pad_edge=False)
    trainer = [(waits.trainer_trains, "trains"), (waits.trainer_waits_for_batch, "waits for a batch")]
    trainer += [(waits.trainer_copies, "copies weights")]
    trainer += [(waits.trainer_waits_for_delivery, "waits for their delivery")] * (deployment.max_staleness == 0)
    servers = [(waits.servers_compute, "compute"), (waits.servers_load, "load weights"), (waits.servers_idle, "idle")]
    table.add_row("trainer", _shares(trainer))
    running = f"{best.running_requests:.3g} requests run on each, {best.most_running} at most"
    table.add_row("servers", f"{_shares(servers)}; {running} (of {costs.decode.max_running_requests})")
    table.add_row("requests", f"{best.requests_per_s:.4g}/s, {best.request_s:.3g} s each, {best.in_flight:.4g} at once")
    table.add_row("controller", f"busy {_percent(waits.controller)} of the time")
    table.add_row("buffer", f"full {_percent(waits.rollout_waits_for_room)} of the time")
    untrained = f"; {_percent(best.rejected)} end without being trained" if best.rejected >= 0.005 else ""
    table.add_row("episodes", f"{best.running_episodes:,.4g} run at once{untrained}")
    return table


def _shares(shares: Sequence[tuple[float, str]]) -> str:
    return ", ".join(f"{_percent(share)} {what}" for share, what in shares)


def _histogram(staleness: dict[int, float]) -> list[str]:
    highest = max(staleness.values())
    return [
        f"{versions:>4} {'#' * round(_BAR * share / highest):<{_BAR}} {_percent(share)}"
        for versions, share in staleness.items()
    ]


def _memory(best: Prediction, costs: Costs) -> list[str]:
    lines: list[str] = []
    for what, used, total in (
        ("a server", best.server_bytes, costs.memory.server_total),
        ("a rank", best.rank_bytes, costs.memory.rank_total),
    ):
        if used:
            beyond = "  MORE THAN IT HAS" if 0 < total < used else ""
            lines.append(f"memory of {what}: {used / 1e9:.3g} GB{f' of {total / 1e9:.3g}' if total else ''}{beyond}")
    return lines


def _warnings(plan: Plan, costs: Costs) -> list[str]:
    lines = [f"costs: {costs.source}"] if costs.source else []
    if plan.best.extrapolated:
        lines.append(f"extrapolated: {'; '.join(plan.best.extrapolated)}")
    if not plan.best.hour_cost:
        lines.append("note: no prices are known; with --server-hour and --rank-hour, steps have a cost")
    return [*lines, *(f"note: {note}" for note in costs.measured.notes)]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share >= 5e-4 else "0 %"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def draw(plan: Plan, costs: Costs, path: Path) -> None:
    """Throughput over servers, who waits, and staleness. Raises ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(f"--plot draws with matplotlib; {install_command('examples')}") from None
    figure = Figure(figsize=(8, 10), layout="constrained")
    throughput, waits, staleness = figure.subplots(3, 1)
    for ranks in sorted({one.deployment.num_ranks for one in plan.tried}):
        row = [one for one in plan.tried if one.deployment.num_ranks == ranks]
        servers = [one.deployment.num_servers for one in row]
        (line,) = throughput.plot(servers, [one.episodes_per_s for one in row], "o-", label=_counted(ranks, "rank"))
        throughput.axhline(trainers_ceiling(costs, row[0].deployment), color=line.get_color(), lw=0.5, ls=":")
    deployments = [one.deployment for one in plan.tried]
    ceiling = sorted({d.num_servers: servers_ceiling(costs, d) for d in deployments}.items())
    throughput.plot([n for n, _ in ceiling], [c for _, c in ceiling], "k:", lw=0.5, label="ceilings")
    best = plan.best
    throughput.plot(best.deployment.num_servers, best.episodes_per_s, "k*", ms=12, label="best")
    highest = max(one.episodes_per_s for one in plan.tried)
    throughput.set(xlabel="servers", ylabel="episodes trained per second", ylim=(0, 1.3 * highest))
    throughput.legend(loc="lower right")
    throughput.set_title("arl plan" + (" (extrapolated)" if best.extrapolated else ""))
    _draw_waits(waits, best)
    staleness.bar(list(best.staleness), list(best.staleness.values()))
    staleness.set(xlabel="staleness (versions)", ylabel="share of trained tokens")
    figure.savefig(path, dpi=120)


def _draw_waits(axes: object, best: Prediction) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    told = best.waits
    rows = {
        "controller": [("busy", told.controller), ("idle", 1 - told.controller)],
        "servers": [("busy", told.servers_compute), ("weights", told.servers_load), ("idle", told.servers_idle)],
        "trainer": [("busy", told.trainer_trains), ("weights", told.trainer_copies), ("idle", told.trainer_idle)],
    }
    colors = {"busy": "tab:blue", "weights": "tab:orange", "idle": "lightgray"}
    for row, shares in rows.items():
        left = 0.0
        for what, share in shares:
            axes.barh(row, share, left=left, color=colors[what], label=what if row == "servers" else None)
            left += share
    axes.set(xlim=(0, 1), xlabel="share of the time")
    axes.legend(loc="lower right")

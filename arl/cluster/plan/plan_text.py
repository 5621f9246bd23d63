"""A plan as text for the terminal, and as a picture: every number of the model with its error, where that is known."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table

from arl.api.version import install_command
from arl.cluster.plan.costs import Costs
from arl.cluster.plan.prediction import Errors, Plan, Prediction, limit_of

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
    best, deployment, money = plan.best, plan.best.deployment, costs.prices.currency
    said, (limit, gain) = _Said(best, plan.errors), limit_of(costs, deployment)
    price = f", {money}{best.hour_cost:.4g} an hour" if best.hour_cost else ""
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
    rows.add_row("trainer", f"{trainer}, {said.exact('trainer_copies')} copies weights")
    servers = f"{said.share('servers_compute', 'servers_idle')} compute, {said.share('servers_idle')} idle"
    rows.add_row("servers", f"{servers}, {said.exact('servers_load')} load weights")
    rows.add_row("requests", f"{said.rate('requests_per_s')}/s, {said.rate('request_s', 'request_s')} s each")
    rows.add_row("controller", f"busy {said.share('controller')} of the time")
    untrained = f"; {said.exact('untrained')} end without being trained" if best.untrained >= 0.005 else ""
    rows.add_row("episodes", f"{said.rate('running_episodes', 'running_episodes')} run at once{untrained}")
    parts += ["", rows, "", f"staleness of trained tokens: {said.staleness} versions", *_histogram(best), ""]
    return Group(*parts, *_memory(best, costs), *_notes(plan, costs))


class _Said:
    """The numbers of a prediction as text, with their errors."""

    def __init__(self, one: Prediction, errors: Errors | None) -> None:
        self._one, self._errors = one, errors

    def rate(self, name: str, error: str = "throughput") -> str:
        value = getattr(self._one, name)
        off = f" ± {_rounded(value * getattr(self._errors, error), 2)}" if self._errors else ""
        return _rounded(value, 3) + off

    def share(self, name: str, error: str = "") -> str:
        off = f" ± {100 * getattr(self._errors, error or name):.0f}" if self._errors else ""
        return f"{100 * getattr(self._one, name):.0f}{off} %"

    def exact(self, name: str) -> str:
        return f"{100 * getattr(self._one, name):.0f} %"

    @property
    def staleness(self) -> str:
        off = f" ± {self._errors.staleness:.2f}" if self._errors and self._one.mean_staleness else ""
        return f"{self._one.mean_staleness:.2f}{off}"


def _table(plan: Plan, costs: Costs) -> Table:
    """The best, and the nearest few with more or fewer servers or ranks."""
    table, best = Table(box=None, header_style="bold", pad_edge=False), plan.best.deployment
    names = ["", "servers", "ranks", "GPUs", "episodes\na second", "step s", "trainer\nidle", "servers\nidle"]
    names += ["control-\nler", "stale-\nness", f"{costs.prices.currency} for\n1,000", "extra-\npolated", "limit"]
    for name in names:
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


def _histogram(best: Prediction) -> list[str]:
    highest = max(best.staleness.values())
    return [
        f"{versions:>4} {'#' * round(_BAR * share / highest):<{_BAR}} {100 * share:.0f} %"
        for versions, share in best.staleness.items()
    ]


def _memory(best: Prediction, costs: Costs) -> list[str]:
    memory = costs.memory
    parts = [("server", best.server_bytes, memory.server_total), ("rank", best.rank_bytes, memory.rank_total)]
    return [
        f"memory of a {what}: {used / 1e9:.3g} GB"
        + (f" of {total / 1e9:.3g}" if total else "")
        + ("  MORE THAN IT HAS" if 0 < total < used else "")
        for what, used, total in parts
        if used
    ]


def _notes(plan: Plan, costs: Costs) -> list[str]:
    lines = [f"costs: {costs.source}"] if costs.source else []
    lines.append("errors: nine of ten stored settings are within them" if plan.errors else "errors: unknown")
    if own := costs.measured.episodes_per_s:
        lines[-1] += f", and the measured run with its {own:.3g} episodes/s"
    if plan.best.extrapolated:
        lines.append(f"extrapolated, so errors may be larger: {'; '.join(plan.best.extrapolated)}")
    if not plan.best.hour_cost:
        lines.append("note: no prices are known; with --server-hour and --rank-hour, steps have a cost")
    return [*lines, *(f"note: {note}" for note in costs.measured.notes)]


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

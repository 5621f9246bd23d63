"""A run on one screen, for `arl top`: how far it is, who waits, what fails. `arl view` shows the same run in full."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from arl.api import events
from arl.observe.events.run_record import RunRecord
from arl.observe.health.digest import mean, values
from arl.observe.view.episode_table import Row
from arl.observe.view.viewed_run import Ending, ViewedRun

_STEPS = 20
"""The last steps, over which shares and rates are."""
_MOST = 4
"""Lines of one section."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_STYLES = {
    "running": "green", "finished": "green", "interrupted": "yellow", "stalled": "red", "failed": "red",
    "killed": "red", "error": "red", "warning": "yellow", "critical": "red", "serving": "green", "paused": "yellow",
    "fenced": "red",
}  # fmt: skip


def top(viewed: ViewedRun, ending: Ending | None, health: Row, now: float, *, is_cut: bool = False) -> Table:
    """Sections of lines, a label beside each. To be called on the run's thread.

    ending: how it ended, if it did. health: as `arl.observe.view.health.health` has it. now: time.time().
    is_cut: whether long lines and long sections are, to fit on a screen.
    """
    run, tick = viewed.run, viewed.tick()
    is_live, version = tick["is_live"], tick["version"]
    steps = run.settings.get("steps", ending and ending.steps)
    steps = steps if isinstance(steps, int) else None
    last = run.steps[-_STEPS - 1 :]
    passed = [b - a for a, b in pairwise(values(last, "time_s")) if b > a]
    step_s = mean(passed) if passed else None  # between the ends of two steps

    head = Text.assemble((plain(viewed.run_dir.resolve().name), "bold"))
    how = ending.how if ending else "no process has it open"
    head.append("  ").append(how, _STYLES.get(how, ""))
    head.append(f"  step {version}" + (f" of {steps}" if steps else ""))
    if (elapsed := _elapsed_s(run, now if is_live else run.last)) is not None:
        head.append(f"  {duration(elapsed)} {'so far' if is_live else 'in all'}")
    if steps is not None and step_s and is_live and steps > version:
        head.append(f", {duration((steps - version) * step_s)} left")
    if (loading := tick["loading"])["done"] < loading["total"]:
        head.append(f", reading the log: {loading['done'] / loading['total']:.0%}")

    sections = [
        ("run", [(head, "")]),
        (viewed.measure, [(line, "") for line in _measures(viewed)]),
        ("staleness", [(_staleness(run), "")]),
        ("time", [(_time_shares(last[-_STEPS:], step_s), ""), (_doing(run, now, steps) if is_live else "", "")]),
        ("speed", [(_speeds(last, step_s), "")]),
        ("running", [(line, "") for line in (_running(viewed, now) if is_live else ())]),
        ("stalled", [(line, "red") for line in (_stalled(run).splitlines() if is_live else ())]),
        ("servers", [
            (_server(one), _STYLES.get(one["state"], "dim")) for one in (health.get("servers", ()) if is_live else ())
        ]),
        ("findings", [
            (f"{one['text']} {one['advice']}", _STYLES.get(one["severity"], "")) for one in health.get("findings", ())
        ]),
        ("failures", [
            (f"{one['count']} x {one['error']}: {one['message']}", "") for one in health.get("failures", ())
        ]),
        ("warnings", [
            (f"{one['count']} x {one['text']}", _STYLES.get(one["level"], "")) for one in health.get("warnings", ())
        ]),
        ("unreadable", [(problem, "yellow") for problem in viewed.problems()]),
        ("disk", [(f"{sum(health.get('disk', {}).values()) / 1e6:,.1f} MB", "")]),
        ("the end", [(ending.why, ""), (f"next: {ending.what_next}", "")] if ending and not is_live else []),
    ]  # fmt: skip
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="bold", no_wrap=True, min_width=10)
    table.add_column(no_wrap=is_cut, overflow="ellipsis" if is_cut else "fold")
    for label, lines in sections:
        told = [(line if isinstance(line, Text) else Text(plain(line), style)) for line, style in lines if line]
        if is_cut and len(told) > _MOST:
            told[_MOST - 1 :] = [Text(f"and {len(told) - _MOST + 1} more: see arl view", "dim")]
        for number, line in enumerate(told):
            table.add_row("" if number else label, line)
    return table


def plain(text: str) -> str:
    """One line, without characters that could command a terminal: models write messages, too."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """One character for each value, or for the mean of several; the lowest is the lowest block."""
    if len(values) > width:
        values = [mean(values[i * len(values) // width : (i + 1) * len(values) // width]) for i in range(width)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    levels = [(value - low) / (high - low) if high > low else 0.5 for value in values]
    return "".join(_BLOCKS[min(int(level * len(_BLOCKS)), len(_BLOCKS) - 1)] for level in levels)


def duration(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes % 60:02}:{int(seconds) % 60:02}" if hours else f"{minutes}:{int(seconds) % 60:02}"


def _measures(viewed: ViewedRun) -> list[str]:
    """The reward, or the loss of fine-tuning, of each step, and of held-out examples."""
    measure, run = viewed.measure, viewed.run
    if not (curve := values(run.steps, measure)):
        return ["no step is trained yet"]
    lines = [f"{curve[-1]:.3f}  {sparkline(curve)}  {min(curve):.3f} to {max(curve):.3f}"]
    if held_out := [(row["version"], row[measure]) for row in run.evaluations if values([row], measure)]:
        version, value = held_out[-1]
        curve = [value for _, value in held_out]
        best = (min if measure == "loss" else max)(held_out, key=lambda one: one[1])
        lines.append(f"held out {value:.3f} at version {version}, best {best[1]:.3f} at {best[0]}  {sparkline(curve)}")
    return lines


def _staleness(run: RunRecord) -> str:
    """Of the trained tokens of the last step, against the bound."""
    rollout = run.settings.get("rollout")
    known = {
        "mean": values(run.steps[-1:], "staleness/mean"),
        "max": values(run.steps[-1:], "staleness/max"),
        "allowed": values([rollout] if isinstance(rollout, dict) else [], "max_staleness"),
    }
    return ", ".join(f"{name} {found[0]:.3g}" for name, found in known.items() if found)


def _elapsed_s(run: RunRecord, until: float | None) -> float | None:
    """The records that led to the newest life's checkpoint, and that life until then."""
    if not run.lives or until is None:
        return None
    newest = run.lives[max(run.lives)]
    before = values([row for row in run.steps if row["version"] <= newest.version], "time_s")
    return max(until - newest.t, 0.0) + (before[-1] if before else 0.0)


def _time_shares(rows: Sequence[Row], step_s: float | None) -> str:
    """How the trainer spent the last steps: waiting for a batch, training, copying the weights to be published."""
    parts = {"waiting": "time/wait_s", "training": "time/train_s", "publishing": "weights/snapshot_s"}
    spent = {name: mean(found) for name, metric in parts.items() if (found := values(rows, metric))}
    whole = max(step_s or 0.0, sum(spent.values()))
    if not whole or not spent:
        return ""
    shares = {name: value / whole for name, value in spent.items()}
    shares["other"] = max(1.0 - sum(shares.values()), 0.0)
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items())


def _speeds(rows: Sequence[Row], step_s: float | None) -> str:
    found = {"seconds a step": step_s} if step_s else {}
    episodes, seconds = (
        sum(max(b - a, 0.0) for a, b in pairwise(values(rows, metric))) for metric in ("episodes_trained", "time_s")
    )
    if episodes and seconds:
        found["episodes/s"] = episodes / seconds
    if step_s and (tokens := values(rows, "trained_tokens")):
        found["trained tokens/s"] = mean(tokens) / step_s
    return ", ".join(f"{value:.3g} {name}" if value < 100 else f"{value:,.0f} {name}" for name, value in found.items())


def _doing(run: RunRecord, now: float, steps: int | None) -> str:
    """The trainer's activity, from the newest record of its loop."""
    for _, record in reversed(run.system):
        age = f"{max(now - record.t, 0.0):.0f} s"
        match record:
            case events.BatchTaken():
                return f"now training version {record.version + 1} for {age}"
            case events.BatchTrained() if record.version == steps:
                return f"all steps are trained since {age}"
            case events.BatchTrained():
                return f"now waiting for batch {record.version + 1} for {age}"
            case events.RunBegan():
                return f"started {age} ago, from version {record.version}"
            case _:
                pass
    return ""


def _stalled(run: RunRecord) -> str:
    """The watchdog's last message, unless a batch or an episode has come since."""
    for _, record in reversed(run.system):
        match record:
            case events.Warned(logger="arl.training.watchdog"):
                moved = max((e.ended for e in run.episodes[-500:] if e.ended is not None), default=0.0)
                return "" if moved > record.t else record.text
            case events.BatchTaken() | events.BatchTrained() | events.Published() | events.RunBegan():
                return ""
            case _:
                pass
    return ""


def _running(viewed: ViewedRun, now: float) -> list[str]:
    run, table = viewed.run, viewed.table
    newest = max(run.lives, default=0)
    own = table.having("how", "running") & (table.column("life") == newest)
    found = np.flatnonzero(own)
    longest = [run.episodes[i] for i in found[np.argsort(table.column("began")[found], kind="stable")][:_MOST]]
    groups = [group for group in run.groups if group.step is None and group.taken is None]
    running = sum(group.life == newest and not group.outcome for group in groups)
    waiting = sum(group.outcome == "kept" and not any(e.is_undone for e in group.episodes) for group in groups)
    evaluated = int((own & table.having("kind", "evaluation")).sum())
    lines = [f"{len(found)} episodes, {running} groups; {waiting} groups wait to be trained"]
    lines[0] += f", {evaluated} episodes of an evaluation" if evaluated else ""
    ages = ", ".join(f"{episode.episode} {duration(max(now - episode.began, 0.0))}" for episode in longest)
    return [*lines, f"longest: {ages}" if ages else ""]


def _server(server: dict[str, Any]) -> str:
    version = "" if server["version"] is None else f", version {server['version']}"
    if server["state"] == "fenced":
        return f"{server['server']} fenced{version}, {server['fences']} x: {server['reason']}"
    rates = f", {server['turns_per_s']:.3g} turns/s, {server['tokens_per_s']:.3g} tokens/s"
    return f"{server['server']} {server['state']}{version}{rates}"

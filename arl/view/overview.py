"""How a run goes, on one screen: what `arl top` shows, in numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from arl.api import events
from arl.digest import mean
from arl.eventlog.run_record import RunRecord
from arl.view.episode_table import Row
from arl.view.viewed_run import Ending, ViewedRun

_STEPS = 20
"""The last steps, over which shares and rates are."""
_MOST_RUNNING = 20
_WATCHDOG = "arl.training.watchdog"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Everything that runs now."""

    episodes: int = 0
    evaluated: int = 0
    """Episodes of evaluations among them."""
    groups: int = 0
    waiting: int = 0
    """Groups that wait in the buffer to be trained."""
    longest: Sequence[tuple[str, float]] = ()
    """(episode, seconds), the longest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A run at one time. Numbers that are not known are None, and sequences empty."""

    name: str
    ending: Ending | None
    is_live: bool
    loaded: float
    """The share of the event log that is read."""
    version: int
    steps: int | None
    """Batches to train."""
    elapsed_s: float | None
    """Since the run began, without the time between two lives."""
    left_s: float | None
    """Until all steps are trained, at the speed of the last ones."""
    measure: str
    """`reward`, or the `loss` of fine-tuning."""
    curve: Sequence[float]
    """The measure of each step."""
    evaluations: Sequence[tuple[int, float]]
    """(version, measure)"""
    staleness: Mapping[str, float]
    """mean and max of the last step, and the bound, as far as they are known."""
    stale_shares: Sequence[float]
    """The trained tokens of the last steps, by staleness."""
    time_shares: Mapping[str, float]
    """How the trainer's time of the last steps was spent."""
    speeds: Mapping[str, float]
    """Per second, over the last steps; and seconds of a step."""
    doing: str
    """The trainer's present activity."""
    stalled: str
    """The watchdog's message, if nothing has moved since."""
    running: Running = field(default_factory=Running)
    health: Row = field(default_factory=dict[str, Any])
    """As `arl.view.health.health` has it."""
    problems: Sequence[str] = ()


def overview(viewed: ViewedRun, ending: Ending | None, health: Row, now: float) -> Overview:
    """To be called on the run's thread. ending: how it ended, if it did. health: of a moment ago. now: time.time()."""
    run, rows, tick = viewed.run, viewed.run.steps, viewed.tick()
    is_live, last = tick["is_live"], rows[-_STEPS:]
    steps = run.settings.get("steps", ending and ending.steps)
    steps = steps if isinstance(steps, int) else None
    measure = viewed.measure
    seconds = _step_seconds(rows[-_STEPS - 1 :])
    left = steps - tick["version"] if steps is not None and is_live and seconds else 0
    loading = tick["loading"]
    return Overview(
        name=viewed.run_dir.resolve().name,
        ending=ending,
        is_live=is_live,
        loaded=loading["done"] / loading["total"] if loading["total"] else 1.0,
        version=tick["version"],
        steps=steps,
        elapsed_s=_elapsed_s(run, now if is_live else run.last),
        left_s=left * seconds if left > 0 and seconds else None,
        measure=measure,
        curve=_numbers(rows, measure),
        evaluations=[(row["version"], row[measure]) for row in run.evaluations if _is_number(row.get(measure))],
        staleness=_staleness(run, rows),
        stale_shares=_stale_shares(viewed),
        time_shares=_time_shares(last, seconds),
        speeds=_speeds(rows[-_STEPS - 1 :], seconds),
        doing=_doing(run, now, steps) if is_live else "",
        stalled=_stalled(run) if is_live else "",
        running=_running(viewed, now) if is_live else Running(),
        health=health,
        problems=viewed.problems(),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _numbers(rows: Sequence[Row], metric: str) -> list[float]:
    return [float(row[metric]) for row in rows if _is_number(row.get(metric))]


def _elapsed_s(run: RunRecord, until: float | None) -> float | None:
    """The records that led to the newest life's checkpoint, and that life until then."""
    if not run.lives or until is None:
        return None
    newest = run.lives[max(run.lives)]
    before = _numbers([row for row in run.steps if row["version"] <= newest.version], "time_s")
    return max(until - newest.t, 0.0) + (before[-1] if before else 0.0)


def _passed(rows: Sequence[Row], metric: str) -> float:
    """The growth of a number that only grows."""
    return sum(max(b - a, 0.0) for a, b in pairwise(_numbers(rows, metric)))


def _step_seconds(rows: Sequence[Row]) -> float | None:
    """Between the ends of two steps, on average."""
    passed = [b - a for a, b in pairwise(_numbers(rows, "time_s")) if b > a]
    return mean(passed) if passed else None


def _staleness(run: RunRecord, rows: Sequence[Row]) -> dict[str, float]:
    rollout = run.settings.get("rollout")
    known = {
        "mean": rows[-1].get("staleness/mean") if rows else None,
        "max": rows[-1].get("staleness/max") if rows else None,
        "bound": rollout.get("max_staleness") if isinstance(rollout, dict) else None,
    }
    return {name: value for name, value in known.items() if value is not None and _is_number(value)}


def _stale_shares(viewed: ViewedRun) -> list[float]:
    tokens = np.asarray(viewed.staleness()["tokens"][-_STEPS:], float)
    total = tokens.sum()
    return (tokens.sum(axis=0) / total).tolist() if total else []


def _time_shares(rows: Sequence[Row], step_s: float | None) -> dict[str, float]:
    """Waiting for data, training, copying the weights to be published, and the rest of a step."""
    parts = {"waiting": "time/wait_s", "training": "time/train_s", "publishing": "weights/snapshot_s"}
    spent = {name: mean(values) for name, metric in parts.items() if (values := _numbers(rows, metric))}
    whole = max(step_s or 0.0, sum(spent.values()))
    if not whole or not spent:
        return {}
    shares = {name: value / whole for name, value in spent.items()}
    return {**shares, "other": max(1.0 - sum(shares.values()), 0.0)}


def _speeds(rows: Sequence[Row], step_s: float | None) -> dict[str, float]:
    found = {"seconds a step": step_s} if step_s else {}
    if (episodes := _passed(rows, "episodes_trained")) and (seconds := _passed(rows, "time_s")):
        found["episodes/s"] = episodes / seconds
    if step_s and (tokens := _numbers(rows, "trained_tokens")):
        found["trained tokens/s"] = mean(tokens) / step_s
    return found


def _doing(run: RunRecord, now: float, steps: int | None) -> str:
    """The trainer's activity, from the newest record of its loop."""
    for _, record in reversed(run.system):
        match record:
            case events.BatchTaken():
                return f"training version {record.version + 1} for {_age(now, record.t)}"
            case events.BatchTrained() if record.version == steps:
                return f"all steps are trained since {_age(now, record.t)}"
            case events.BatchTrained():
                return f"waiting for batch {record.version + 1} for {_age(now, record.t)}"
            case events.RunBegan():
                return f"started {_age(now, record.t)} ago, from version {record.version}"
            case _:
                pass
    return ""


def _age(now: float, t: float) -> str:
    return f"{max(now - t, 0.0):.0f} s"


def _stalled(run: RunRecord) -> str:
    """The watchdog's last message, unless a batch or an episode has come since."""
    for _, record in reversed(run.system):
        match record:
            case events.Warned(logger=logger) if logger == _WATCHDOG:
                moved = max((e.ended for e in run.episodes[-500:] if e.ended is not None), default=0.0)
                return "" if moved > record.t else record.text
            case events.BatchTaken() | events.BatchTrained() | events.Published() | events.RunBegan():
                return ""
            case _:
                pass
    return ""


def _running(viewed: ViewedRun, now: float) -> Running:
    run, table = viewed.run, viewed.table
    newest = max(run.lives, default=0)
    own = table.having("how", "running") & (table.column("life") == newest)
    found = np.flatnonzero(own)
    longest = [run.episodes[i] for i in found[np.argsort(table.column("began")[found], kind="stable")][:_MOST_RUNNING]]
    groups = [group for group in run.groups if group.step is None and group.taken is None]
    return Running(
        episodes=len(found),
        evaluated=int((own & table.having("kind", "evaluation")).sum()),
        groups=sum(group.life == newest and not group.outcome for group in groups),
        waiting=sum(group.outcome == "kept" and not _is_lost(group.episodes) for group in groups),
        longest=[(episode.episode, max(now - episode.began, 0.0)) for episode in longest],
    )


def _is_lost(episodes: Sequence[Any]) -> bool:
    """Whether they belong to a group that a continued run does not train."""
    return any(episode.is_undone for episode in episodes)

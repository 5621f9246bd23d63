"""How a run is doing: its failures by cause, its servers, its disk, and sentences about what looks wrong."""

from __future__ import annotations

import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from arl.api import events
from arl.observe.events.records import EpisodeRecord
from arl.observe.events.run_record import RunRecord
from arl.observe.health.digest import Digest
from arl.observe.health.rules import SEVERITIES, Symptom, compares_episodes, remarks
from arl.observe.view.episode_table import Row

_LONGEST = 200
"""Characters of a message."""
_MOST_CAUSES = 200
_LEDGER = ("episodes_", "groups_", "finished_", "straggler_", "overtaken_", "baselines_")
_WALK_S = 1.0
"""Longest time to add up the sizes of files."""
_RATES_S = 60.0
"""The rates of servers are means over this time."""
_EPISODES = 500
_GROUPS = 200
"""The last ones, in which findings look for failures and equal rewards."""


def health(run: RunRecord, now: float | None = None) -> Row:
    """now: time.time(), of a run that goes on; without it, rates are those of the run's end."""
    rows, servers = run.steps, _servers(run, run.last if now is None else now)
    lost, restarts = {"events": 0, "episodes": 0}, list[Row]()
    for _, record in run.system:
        match record:
            case events.Lost():
                lost["events"] += record.num_events
                lost["episodes"] += record.num_episodes
            case events.ProcessRestarted():
                restarts.append({"t": record.t, "name": record.name, "how": record.how})
            case events.TrainerRecovered():
                how = f"{record.reason}; after {record.seconds:.1f} s another one held version {record.version}"
                restarts.append({"t": record.t, "name": "trainer", "how": how})
            case _:
                pass
    return {
        "findings": findings(run, servers, lost),
        "failures": _failures(run),
        "rejected": _rejected(run),
        "servers": servers,
        "ledger": {name: value for name, value in (rows[-1] if rows else {}).items() if name.startswith(_LEDGER)},
        "disk": _disk(run.run_dir),
        "warnings": _warnings(run),
        "lost": lost,
        "restarts": restarts,
    }


def normalised(message: str) -> str:
    """The message without what differs between two occurrences: numbers, ids, what is quoted."""
    message = re.sub(r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b", "ID", message[: 4 * _LONGEST])
    message = re.sub(r"'[^']{1,200}'|\"[^\"]{1,200}\"", "'...'", message)
    return re.sub(r"\d+(\.\d+)?", "N", message)[:_LONGEST]


def _failures(run: RunRecord) -> list[Row]:
    """Attempts that failed, and episodes that did, by the error's class and normalised message."""
    found: dict[tuple[str, str], Row] = {}
    counted: set[tuple[int, str]] = set()
    for life, record in run.system:
        if isinstance(record, events.AttemptFailed):
            counted.add((life, record.episode))
            _count(
                found, (record.error, normalised(record.message)), record.t, {"life": life, "episode": record.episode}
            )
    for e in run.episodes:
        if e.error and (e.life, e.episode) not in counted:
            example = {"life": e.life, "episode": e.episode}
            _count(found, (e.error, normalised(e.message)), e.ended or e.began, example)
    return [{"error": error, "message": message, **row} for (error, message), row in _most(found)]


def _rejected(run: RunRecord) -> list[Row]:
    found: dict[tuple[str, str], Row] = {}
    for group in run.groups:
        if group.outcome and group.outcome != "kept":
            example = {"life": group.life, "group": group.group}
            _count(found, (group.outcome, group.reason), group.ended or group.admitted, example)
    return [{"outcome": outcome, "reason": reason, **row} for (outcome, reason), row in _most(found)]


def _warnings(run: RunRecord) -> list[Row]:
    found: dict[tuple[str, str, str], Row] = {}
    for _, record in run.system:
        if isinstance(record, events.Warned):
            row = _count(found, (record.level, record.logger, normalised(record.text)), record.t, {})
            row["text"] = record.text[: 10 * _LONGEST]
    shown = ("text", "count", "first", "last")
    return [
        {"level": level, "logger": logger, **{name: row[name] for name in shown}}
        for (level, logger, _), row in _most(found)
    ]


def _count(found: dict[Any, Row], key: Any, t: float, example: Row) -> Row:
    row = found.setdefault(key, {"count": 0, "first": t, "last": t, "example": example})
    row["count"] += 1
    row["first"], row["last"] = min(row["first"], t), max(row["last"], t)
    return row


def _most(found: dict[Any, Row]) -> Iterable[tuple[Any, Row]]:
    return islice(sorted(found.items(), key=lambda item: -item[1]["count"]), _MOST_CAUSES)


def _servers(run: RunRecord, now: float | None) -> list[Row]:
    """Each server of the newest life, its state, and what it answered lately. Those that are fenced come first."""
    newest = max(run.lives, default=0)
    found: defaultdict[str, Row] = defaultdict(
        lambda: {"state": "serving", "since": None, "version": None, "fences": 0, "reason": ""}
    )
    for life, record in run.system:
        if life != newest:
            continue
        match record:
            case events.ServerJoined() | events.ServerReturned() | events.ServerResumed():
                found[record.server] |= {"state": "serving", "since": record.t, "reason": ""}
            case events.ServerPaused():
                found[record.server] |= {"state": "paused", "since": record.t}
            case events.ServerSlept():
                found[record.server] |= {"state": "asleep", "since": record.t}
            case events.ServerWoke():
                found[record.server] |= {"state": "paused", "since": record.t}
            case events.ServerFenced():
                row = found[record.server]
                row |= {"state": "fenced", "since": record.t, "reason": record.reason, "fences": row["fences"] + 1}
            case events.ServerLeft():
                found[record.server] |= {"state": "left", "since": record.t}
            case events.ServerLoaded():
                found[record.server]["version"] = record.version
            case _:
                pass
    rates = _rates(run, newest, now) if now is not None else {}
    rows = [{"server": server, **row, "turns_per_s": 0.0, "tokens_per_s": 0.0} for server, row in found.items()]
    for row in rows:
        row |= rates.get(row["server"], {})
    return sorted(rows, key=lambda row: (row["state"] != "fenced", row["server"]))


def _rates(run: RunRecord, life: int, until: float) -> dict[str, Row]:
    """Turns that ended, and their sampled tokens, a second, by server: over a minute."""
    turns, tokens = Counter[str](), Counter[str]()
    t = pc.field("t")
    wanted = (pc.field("event") == "TurnEnded") & (t >= until - _RATES_S) & (t <= until)
    with suppress(OSError):  # the run's problems name what cannot be read
        for _, batch in run.files.call_batches(until - _RATES_S, until, life):
            found = batch.filter(wanted)
            for row in found.select(["server", "output"]).to_pylist():
                turns[row["server"]] += 1
                tokens[row["server"]] += row["output"]
    return {
        server: {"turns_per_s": turns[server] / _RATES_S, "tokens_per_s": tokens[server] / _RATES_S} for server in turns
    }


def _disk(run_dir: Path) -> dict[str, int]:
    """Bytes of each directory in run_dir, and of the files beside them. Links are not followed."""
    sizes: Counter[str] = Counter()
    until = time.monotonic() + _WALK_S
    for place, _, files in os.walk(run_dir):
        inner = Path(place).relative_to(run_dir).parts
        for file in files:
            try:
                sizes[inner[0] if inner else "files"] += os.lstat(os.path.join(place, file)).st_size
            except OSError:
                continue  # deleted meanwhile
        if time.monotonic() > until:
            break
    return dict(sizes)


# Findings: docs/algorithms.md explains the metrics


def findings(run: RunRecord, servers: Sequence[Row], lost: Mapping[str, int]) -> list[Row]:
    """Errors first. servers: as `_servers` lists them. lost: records ("events") and "episodes"."""
    digest = Digest(run.settings, run.steps, run.evaluations)
    found = {one.kind: one for one in remarks(digest)}
    if run.groups:  # episodes tell more of these than totals do
        found = {kind: one for kind, one in found.items() if kind not in ("equal groups", "failures")}
    if (equal := _equal(run, digest)) is not None:
        found[equal.kind] = equal
    ended = [e for e in run.episodes[-2 * _EPISODES :] if e.ended is not None][-_EPISODES:]
    failed = [e for e in ended if e.how in ("failed", "timed_out")]
    if len(failed) >= 3 and len(failed) >= 0.1 * len(ended):
        found["failures"] = Symptom(
            kind="failures",
            severity="warning",
            text=f"{len(failed)} of the last {len(ended)} episodes failed.",
            advice="See the failures below: each cause has an example.",
        )
    if any(lost.values()):
        left_out = f"{lost['events']} records and the tokens of {lost['episodes']} episodes"
        found["losses"] = Symptom(
            kind="losses",
            severity="note",
            text=f"The event log could not keep {left_out}.",
            advice="More came than the disk took; log.events.tokens: sampled keeps fewer.",
        )
    if servers and all(server["state"] in ("fenced", "left") for server in servers):
        found["servers"] = Symptom(
            kind="servers",
            severity="error",
            text="No inference server serves.",
            advice="See the reasons below, and the servers' logs.",
        )
    if equal is not None and equal.severity == "warning" and "entropy fell" in found:
        found["entropy fell"] = replace(found["entropy fell"], severity="warning")
    ordered = sorted(found.values(), key=lambda one: SEVERITIES.index(one.severity))
    return [{"severity": one.severity, "text": one.text, "advice": one.advice} for one in ordered]


def _are_equal(episodes: Sequence[EpisodeRecord]) -> bool:
    """Whether all had the same reward: within each role, as one role's reward may be another's loss."""
    parts = {(part.role, part.reward) for episode in episodes for part in episode.trajectories}
    outcomes = parts or {("", episode.reward) for episode in episodes}
    return len(outcomes) == len({role for role, _ in outcomes})


def _equal(run: RunRecord, digest: Digest) -> Symptom | None:
    """Groups whose episodes all had the same reward teach nothing to an algorithm that compares them."""
    kept = [group for group in run.groups[-4 * _GROUPS :] if group.outcome == "kept"][-_GROUPS:]
    ended = ([e for e in group.episodes if e.reward is not None] for group in kept)
    several = [episodes for episodes in ended if len(episodes) > 1]
    equal = [episodes[0].reward for episodes in several if _are_equal(episodes)]
    if len(several) < 10 or len(equal) < 0.4 * len(several) or not compares_episodes(digest):
        return None
    rewards = [episode.reward for episodes in several for episode in episodes if episode.reward is not None]
    share, lowest, highest = len(equal) / len(several), min(rewards), max(rewards)
    low, high = (equal.count(bound) / len(equal) for bound in (lowest, highest))
    text = f"{share:.0%} of the last {len(several)} groups had equal rewards"
    if digest.is_solved:
        return Symptom(
            kind="equal groups",
            severity="note",
            text=f"{text}, {high:.0%} of these the highest.",
            advice="Read some. If they are good and held-out rewards as high, the run is done. Otherwise use harder "
            "examples.",
        )
    which = f"{low:.0%} of these the lowest, {high:.0%} the highest" if lowest < highest else f"all {lowest:g}"
    are_right = lowest < highest and highest >= digest.high and high >= 0.9
    easier = "Read some: the reward may miss right answers. Otherwise use easier"
    harder = (
        "Use harder" if are_right else "If entropy is low, too, the policy has stopped exploring. Otherwise use harder"
    )
    return Symptom(
        kind="equal groups",
        severity="warning" if share >= 0.7 and not are_right else "note",
        text=f"{text}, and taught nothing: {which}.",
        advice=f"{harder if high > low else easier} examples, a curriculum, a larger rollout.group_size, or a "
        "reward with more grades; algorithm.dynamic_sampling replaces such groups.",
    )

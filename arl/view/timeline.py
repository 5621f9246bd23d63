"""What happened when: lanes of spans for the trainer, the servers and the episodes, and what waited for what."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from arl.api import events
from arl.api.events import Event
from arl.eventlog.records import EpisodeRecord
from arl.eventlog.run_record import RunRecord
from arl.view.details import call_fields
from arl.view.episode_table import EpisodeTable, Row, number, whole
from arl.view.trace_counters import Requests

WINDOW_S = 60.0
MOST_SPANS = 20_000
_MOST_CALLS = 200_000
_SOME_CALLS = 20_000
"""Read of a window that has more than _MOST_CALLS."""
_MOST_CHILDREN = 200
"""Beneath one episode."""
_BINS = 240
LATE_S = 600.0
"""Turns that end this long after the window are looked for, too: they may have begun in it."""


def timeline(run: RunRecord, table: EpisodeTable, wanted: Mapping[str, str]) -> Row:
    """Raises RequestError for a parameter that is not a number."""
    ended = run.last or 0.0
    began = min((life.t for life in run.lives.values()), default=ended)
    last = number(wanted, "to")
    last = ended if last is None or last != last else last
    first = number(wanted, "from")
    first = max(began, last - WINDOW_S) if first is None or first != first else min(first, last)
    limit = min(whole(wanted, "limit", 2000), MOST_SPANS)
    lanes = Lanes(first, last)
    for _, record in run.system:
        lanes.add(record)
    lanes.end()
    problems: list[str] = []
    calls = _calls(run, lanes, problems)
    episodes = episodes_within(run, table, lanes)
    shown = episodes if len(episodes) <= limit else [episodes[i * len(episodes) // limit] for i in range(limit)]
    lane_of = lanes.pack(shown, _children(shown, calls))
    arrows = arrows_within(run, lanes, lane_of)
    return {
        "from": first,
        "to": last,
        "began": began,
        "ended": ended,
        "lanes": lanes.rows(limit),
        "arrows": arrows[:limit],
        "left_out": {
            "episodes": len(episodes) - len(shown),
            "calls": max(run.files.num_calls(first, last) - len(calls), 0) if problems else 0,
            "spans": lanes.num_left_out,
            "arrows": max(len(arrows) - limit, 0),
        },
        "problems": problems,
    }


class Lanes:
    """Spans within [first, last], by lane."""

    def __init__(self, first: float, last: float) -> None:
        self.first = first
        self.last = last
        self.num_left_out = 0
        self._kinds = {"trainer": "trainer", "publishing": "publishing", "evaluations": "evaluations"}
        self._spans: defaultdict[str, list[Row]] = defaultdict(list)
        self._open: dict[tuple[str, str], tuple[float, str]] = {}
        """(server, kind) of a span that goes on -> since when, and its label."""

    def span(self, lane: str, start: float, stop: float, kind: str, label: str = "", **more: Any) -> None:
        if start <= self.last and stop >= self.first:
            self._spans[lane].append({"start": start, "stop": stop, "kind": kind, "label": label, **more})

    def add(self, record: Event) -> None:  # noqa: C901 (one case for each kind)
        t = record.t
        match record:
            case events.BatchTaken():
                self.span("trainer", t - record.waited_s, t, "waiting", f"waited for batch {record.version + 1}")
            case events.BatchTrained():
                self.span("trainer", t - record.seconds, t, "training", f"trained version {record.version}")
            case events.SnapshotTaken():
                self.span("trainer", t - record.seconds, t, "snapshot", f"copied version {record.version}")
            case events.CheckpointWritten():
                label = f"checkpoint {record.version}" + (f": {record.error}" if record.error else "")
                self.span("trainer", t - record.seconds, t, "checkpoint", label)
            case events.TrainerRecovered():
                label = f"recovered version {record.version}: {record.reason}"
                self.span("trainer", t - record.seconds, t, "recovering", label)
            case events.Published():
                self.span("publishing", t - record.transfer_s, t, "publishing", f"version {record.version}")
            case events.EvaluationEnded():
                label = f"evaluation {record.number} of version {record.version}: {record.reward:.3f}"
                self.span("evaluations", t - record.seconds, t, "evaluation", label)
            case events.ServerLoaded():
                self.span(self.server(record.server), t - record.seconds, t, "loading", f"version {record.version}")
            case events.ServerPaused():
                self._open[self.server(record.server), "paused"] = t, ""
            case events.ServerResumed():
                self._close(self.server(record.server), "paused", t)
            case events.ServerSlept():
                self._open[self.server(record.server), "asleep"] = t, "the trainer has the device"
            case events.ServerWoke():
                self._close(self.server(record.server), "asleep", t)
            case events.TrainerMoved():
                label = "onto the device" if record.is_on_device else "to the CPU's memory"
                self.span("trainer", t - record.seconds, t, "moving", label)
            case events.ServerFenced():  # it returns without a word of having been resumed, or of having woken
                for kind in ("paused", "asleep"):
                    self._close(self.server(record.server), kind, t)
                self._open[self.server(record.server), "fenced"] = t, record.reason
            case events.ServerReturned():
                self._close(self.server(record.server), "fenced", t)
            case events.ServerJoined() | events.ServerLeft():
                self.server(record.server)
            case _:
                pass

    def end(self) -> None:
        """Spans that were not closed continue."""
        for (lane, kind), (since, label) in self._open.items():
            self.span(lane, since, self.last, kind, label)

    def server(self, address: str) -> str:
        """The name of its lane."""
        lane = f"server {address}"
        self._kinds.setdefault(lane, "server")
        return lane

    def pack(self, shown: Iterable[EpisodeRecord], children: Mapping[int, list[Row]]) -> dict[int, str]:
        """Episodes in as few lanes as hold them; returns the lane of each, by index."""
        free: list[tuple[float, int]] = []
        lane_of: dict[int, str] = {}
        for episode in shown:  # in the order in which they began
            stop = self.last if episode.ended is None else episode.ended
            if free and free[0][0] <= episode.began:
                _, place = heapq.heappop(free)
            else:
                place = len(free)
            heapq.heappush(free, (stop, place))
            lane = lane_of[episode.index] = f"episodes {place + 1}"
            self._kinds.setdefault(lane, "episodes")
            self.span(
                lane, episode.began, stop, "episode", episode.episode,
                life=episode.life, episode=episode.episode, how=episode.how, reward=episode.reward, step=episode.step,
                children=children.get(episode.index, []),
            )  # fmt: skip
        return lane_of

    def rows(self, limit: int) -> list[Row]:
        """All lanes; of a lane with more spans than limit, every Nth."""
        rows: list[Row] = []
        for lane, kind in self._kinds.items():
            spans = sorted(self._spans[lane], key=lambda span: span["start"])
            kept = spans[:: max(-(-len(spans) // max(limit, 1)), 1)]
            self.num_left_out += len(spans) - len(kept)
            rows.append({"id": lane, "name": lane, "kind": kind, "spans": kept})
        return rows

    def _close(self, lane: str, kind: str, t: float) -> None:
        since, label = self._open.pop((lane, kind), (None, ""))
        if since is not None:
            self.span(lane, since, t, kind, label)


def _calls(run: RunRecord, lanes: Lanes, problems: list[str]) -> list[Event]:
    """Those that overlap the window. With all turns at hand, servers get spans of how busy they were."""
    first, last = lanes.first, lanes.last
    is_whole = run.files.num_calls(first, last + LATE_S) <= _MOST_CALLS
    found = list(run.files.calls(first, last + LATE_S, most=_MOST_CALLS if is_whole else _SOME_CALLS))
    calls = [call for call in found if call.t - getattr(call, "seconds", 0.0) <= last]
    if is_whole:
        _busy(lanes, calls)
    else:
        problems.append(
            "There are too many turns and calls to show them all, or how busy the servers were: choose a shorter time."
        )
    return calls


def _busy(lanes: Lanes, calls: Iterable[Event]) -> None:
    """How many requests each server had at once, on average in bins of the window's size."""
    width_s = (lanes.last - lanes.first) / _BINS
    if not 0 < width_s < math.inf:
        return
    requests = Requests(width_s)
    deque(requests.counted(calls), maxlen=0)
    for server, changes in groupby(requests.found(), key=itemgetter(1)):
        for (start, _, n), (stop, _, _) in pairwise(changes):
            if n > 0:
                label = f"{n:.3g} requests" if round(n, 2) != 1 else "1 request"
                lanes.span(lanes.server(server), start, stop, "busy", label, n=n)


def episodes_within(run: RunRecord, table: EpisodeTable, lanes: Lanes) -> list[EpisodeRecord]:
    """In the order in which they began. One that was lost has no end, and is left out."""
    began, seconds = table.column("began"), table.column("seconds")
    is_lost = np.isnan(seconds) & ~table.having("how", "running")
    over = np.where(np.isnan(seconds), np.inf, began + seconds)
    found = np.flatnonzero((began <= lanes.last) & (over >= lanes.first) & ~is_lost)
    return [run.episodes[i] for i in found[np.argsort(began[found], kind="stable")]]


def _children(shown: list[EpisodeRecord], calls: list[Event]) -> dict[int, list[Row]]:
    """The turns, tools and rewards of each episode, by its index."""
    by_name: defaultdict[str, list[EpisodeRecord]] = defaultdict(list)
    for episode in shown:
        by_name[episode.episode].append(episode)
    children: defaultdict[int, list[Row]] = defaultdict(list)
    for call in calls:
        for episode in by_name.get(getattr(call, "episode", ""), ()):
            is_within = episode.began <= call.t <= (float("inf") if episode.ended is None else episode.ended + 1.0)
            if is_within and len(children[episode.index]) < _MOST_CHILDREN:
                children[episode.index].append(call_span(call_fields(call)))
    return children


def call_span(call: Row) -> Row:
    match call["event"]:
        case "TurnEnded":
            kind, label = "turn", f"{call['output']} tokens, {call['stop']}"
            failure = "" if call["stop"] in ("stop", "length") else call["stop"]
        case "ToolEnded":
            kind, label, failure = "tool", call["tool"], call["failure"]
        case _:
            value = call["value"]
            kind, failure = "reward", call["error"]
            label = call["reward"] + ("" if value is None else f": {value:g}")
    return {"start": call["began"], "stop": call["t"], "kind": kind, "label": label, "failure": failure}


def arrows_within(run: RunRecord, lanes: Lanes, lane_of: Mapping[int, str]) -> list[Row]:
    """The trainer waited for the last episode of its batch; a version that is trained is published; servers load it."""
    arrows: list[Row] = []
    trained: dict[int, float] = {}
    groups = {(group.life, group.group): group for group in run.groups}
    for life, record in run.system:
        match record:
            case events.BatchTaken() if lanes.first <= record.t <= lanes.last:
                own = [g for number in record.groups if (g := groups.get((life, number)))]
                ends = [(e.ended, e.index) for group in own for e in group.episodes if e.ended and e.ended <= record.t]
                ended, index = max(ends, default=(0.0, -1))
                if index in lane_of and ended >= record.t - record.waited_s:
                    arrows.append(_arrow(lane_of[index], ended, "trainer", record.t, "waited_for"))
            case events.RunBegan():
                trained.clear()  # what a life publishes first comes from a checkpoint
            case events.BatchTrained():
                trained[record.version] = record.t
            case events.Published() if lanes.first <= record.t <= lanes.last:
                if record.version in trained:
                    start = max(record.t - record.transfer_s, trained[record.version])
                    arrows.append(_arrow("trainer", trained[record.version], "publishing", start, "publishes"))
            case events.ServerLoaded() if lanes.first <= record.t <= lanes.last:
                if record.version in trained:
                    arrows.append(
                        _arrow("trainer", trained[record.version], lanes.server(record.server), record.t, "loads")
                    )
            case _:
                pass
    return arrows


def _arrow(source: str, t: float, target: str, until: float, kind: str) -> Row:
    return {"from": {"lane": source, "t": t}, "to": {"lane": target, "t": until}, "kind": kind, "label": ""}

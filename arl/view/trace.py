"""A run's lanes as a trace file, for Perfetto and chrome://tracing: Chrome's JSON trace event format.

    process 1, the run       threads: trainer, checkpoints, publishing, evaluations; the counters
    process 2, servers       a thread for each, and a counter of its requests
    process 3, episodes      threads in which episodes lie one after another, their turns, tools and rewards beneath

Spans of one thread nest, as the format demands: one that would overlap another's end goes to a thread beside it. Times
are microseconds since the run began. Episodes and calls are written as the log is read, and are not kept.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import msgspec

from arl.api.events import Event
from arl.eventlog.records import EpisodeRecord
from arl.eventlog.run_record import RunRecord
from arl.view.details import call_fields
from arl.view.episode_table import EpisodeTable, Row
from arl.view.timeline import LATE_S, Lanes, arrows_within, call_span, episodes_within
from arl.view.trace_counters import Requests, counters

_PROCESSES = {"run": 1, "servers": 2, "episodes": 3}
_PROCESS_OF = {"server": "servers", "episodes": "episodes"}
"""By the kind of a lane; the others are the run's."""
_ABREAST = 100
"""Threads of one lane whose numbers keep them together."""
_SETTLED_S = 60.0
"""A call is in the log this long after its end at the latest."""


class TraceFile:
    """Writes events to `file` one by one. `begin` and `end` write what stands around them."""

    def __init__(self, file: IO[bytes], began: float) -> None:
        self._file = file
        self._began = began
        self._num_events = 0
        self._lanes: dict[str, int] = {}
        """The number of each, from 1."""
        self._threads: dict[tuple[str, int], tuple[int, int]] = {}
        self._num_flows = 0

    def begin(self, about: Mapping[str, Any]) -> None:
        """about: for a reader of the file."""
        self._file.write(b'{"displayTimeUnit":"ms","otherData":' + msgspec.json.encode(about) + b',"traceEvents":[\n')
        for name, pid in _PROCESSES.items():
            self._write({"ph": "M", "pid": pid, "tid": 0, "ts": 0, "name": "process_name", "args": {"name": name}})
            order = {"sort_index": pid}
            self._write({"ph": "M", "pid": pid, "tid": 0, "ts": 0, "name": "process_sort_index", "args": order})

    def end(self) -> None:
        self._file.write(b"\n]}\n")

    def spans(self, lane: str, kind: str, spans: Iterable[Row]) -> None:
        """Spans of one lane: start, stop (seconds since 1970), kind, label, and args to be shown."""
        timed = [(self.us(span["start"]), max(self.us(span["stop"]), self.us(span["start"])), span) for span in spans]
        for place, start, stop, span in nested(timed):
            pid, tid = self.thread(lane, kind, place)
            self._write({
                "ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": stop - start, "cat": span["kind"],
                "name": span.get("label") or span["kind"], "args": span.get("args", {}),
            })  # fmt: skip

    def thread(self, lane: str, kind: str, place: int = 0) -> tuple[int, int]:
        """(process, thread) of a lane, or of the place beside it. It gets its name when it is first asked for.

        Perfetto shows threads in the order of their numbers, chrome://tracing by their sort index: each lane with what
        lies beside it, and lanes in the order in which they are first asked for.
        """
        if (lane, place) not in self._threads:
            pid = _PROCESSES[_PROCESS_OF.get(kind, "run")]
            number = self._lanes.setdefault(lane, len(self._lanes) + 1)
            tid = number * _ABREAST + place if place < _ABREAST else 10**9 + len(self._threads)
            self._threads[lane, place] = pid, tid
            about = {
                "thread_name": {"name": lane if not place else f"{lane}, beside ({place})"},
                "thread_sort_index": {"sort_index": tid},
            }
            for name, args in about.items():
                self._write({"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": name, "args": args})
        return self._threads[lane, place]

    def flow(self, arrow: Row, kinds: Mapping[str, str]) -> None:
        """An arrow between two spans. Ends of spans are told from their beginnings by a microsecond."""
        self._num_flows += 1
        for phase, end in (("s", arrow["from"]), ("f", arrow["to"])):
            pid, tid = self.thread(end["lane"], kinds[end["lane"]])
            is_start = phase == "f" and arrow["kind"] == "publishes"
            ts = self.us(end["t"]) - (0 if is_start else 1)
            event = {
                "ph": phase, "pid": pid, "tid": tid, "ts": max(ts, 0), "id": self._num_flows, "cat": "flow",
                "name": arrow["kind"],
            }  # fmt: skip
            self._write({**event, "bp": "e"} if phase == "f" else event)

    def counter(self, t: float, name: str, values: Mapping[str, float], process: str = "run") -> None:
        pid = _PROCESSES[process]
        self._write({"ph": "C", "pid": pid, "tid": 0, "ts": self.us(t), "cat": "counter", "name": name, "args": values})

    def us(self, t: float) -> int:
        """Microseconds since the run began; 0 for what was before."""
        return max(round((t - self._began) * 1e6), 0)

    def _write(self, event: Row) -> None:
        self._file.write((b",\n" if self._num_events else b"") + msgspec.json.encode(event))
        self._num_events += 1


def write_trace(run: RunRecord, table: EpisodeTable, file: IO[bytes], window: tuple[float, float]) -> Counter[str]:
    """Write what overlaps the window, in seconds since the run began. Returns how many episodes and calls there were,
    and how many calls came too late in the log and are left out.

    table: of the run, refreshed.
    """
    began = min((life.t for life in run.lives.values()), default=run.last or 0.0)
    last = max(run.last or began, began)
    lanes = Lanes(max(began + window[0], began), min(began + window[1], last))
    for _, record in run.system:
        lanes.add(record)
    lanes.end()
    shown = episodes_within(run, table, lanes)
    lane_of = lanes.pack(shown, {})
    trace = TraceFile(file, began)
    trace.begin({"run": run.run_dir.resolve().name, "began": began, "problems": run.problems})
    kinds: dict[str, str] = {}
    for row in lanes.rows(1 << 60):
        kinds[row["id"]] = row["kind"]
        trace.thread(row["id"], row["kind"])
        if row["kind"] != "episodes":
            trace.spans(row["id"], row["kind"], [span for span in row["spans"] if span["kind"] != "checkpoint"])
            if checkpoints := [span for span in row["spans"] if span["kind"] == "checkpoint"]:
                trace.spans("checkpoints", "trainer", checkpoints)  # written beside training
    for arrow in arrows_within(run, lanes, lane_of):
        trace.flow(arrow, kinds)
    for t, name, values in counters(run, shown, (lanes.first, lanes.last)):
        trace.counter(t, name, values)
    counts, requests = Counter(episodes=len(shown), calls=0, late=0), Requests()
    for life in sorted({episode.life for episode in shown}):
        own = [episode for episode in shown if episode.life == life]
        calls = requests.counted(run.files.calls(lanes.first, lanes.last + LATE_S, life))
        counts += _write_life(trace, calls, own, lane_of, lanes.last)
    for t, server, number in requests.found():
        if lanes.first <= t <= lanes.last:
            trace.counter(t, server, {"requests": number}, "servers")
    trace.end()
    return counts


def _write_life(
    trace: TraceFile, calls: Iterable[Event], own: Sequence[EpisodeRecord], lane_of: Mapping[int, str], last: float
) -> Counter[str]:
    """The episodes of one life, each with its calls, as soon as these are known. Returns how many calls there were."""
    waiting = deque(sorted(own, key=_end))
    names = {episode.episode for episode in own}
    open_names = set(names)
    calls_of: defaultdict[str, list[Row]] = defaultdict(list)
    counts = Counter[str]()

    def write_next() -> None:
        episode = waiting.popleft()
        open_names.discard(episode.episode)
        spans = _episode_spans(episode, calls_of.pop(episode.episode, []), last)
        trace.spans(lane_of[episode.index], "episodes", spans)

    for call in calls:
        while waiting and _end(waiting[0]) < call.t - _SETTLED_S:
            write_next()
        if (name := getattr(call, "episode", "")) in names:
            counts["calls" if name in open_names else "late"] += 1
        if name in open_names:
            calls_of[name].append(_call_span(call_fields(call)))
    while waiting:
        write_next()
    return counts


def _end(episode: EpisodeRecord) -> float:
    return float("inf") if episode.ended is None else episode.ended


def _episode_spans(episode: EpisodeRecord, calls: Iterable[Row], last: float) -> Iterator[Row]:
    """The episode, and its calls within it."""
    stop = max(last if episode.ended is None else episode.ended, episode.began)
    args = {
        "life": episode.life, "how": episode.how, "reward": episode.reward, "step": episode.step,
        "staleness": episode.staleness, "tokens": episode.num_tokens, "error": episode.error,
    }  # fmt: skip
    yield {"start": episode.began, "stop": stop, "kind": "episode", "label": episode.episode, "args": args}
    for call in calls:
        first, end = (min(max(t, episode.began), stop) for t in (call["start"], call["stop"]))
        yield {**call, "start": first, "stop": end}


def _call_span(call: Row) -> Row:
    args = {name: value for name, value in call.items() if name not in ("event", "began", "t", "episode")}
    return {**call_span(call), "args": args}


def nested(spans: Iterable[tuple[int, int, Row]]) -> Iterator[tuple[int, int, int, Row]]:
    """(place, start, stop, span): spans of one place nest, or lie one after another. By start within a place.

    spans: (start, stop, span).
    """
    open_until: list[list[int]] = []
    for start, stop, span in sorted(spans, key=lambda one: (one[0], -one[1])):
        place = next((i for i, stops in enumerate(open_until) if _fits(stops, start, stop)), len(open_until))
        if place == len(open_until):
            open_until.append([])
        open_until[place].append(stop)
        yield place, start, stop, span


def _fits(stops: list[int], start: int, stop: int) -> bool:
    """stops: of the spans that a place has open; those that are over are removed."""
    while stops and stops[-1] <= start:
        stops.pop()
    return not stops or stop <= stops[-1]

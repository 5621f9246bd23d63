"""All trackers of a run as one, which never waits for them.

    RunLog --records--> Trackers --queue of each tracker--> its thread --> a user's Tracker
                                                                       \\-> TrackerProcess --> a ready-made tracker

| wait | woken by |
|---|---|
| a tracker's thread | a record; `close` |
| `close` | the end of every thread; CLOSING_S |
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from arl.api.tracker_config import TrackerConfig
from arl.api.tracking import TrackedRun, TrackedTrajectory, Tracker
from arl.api.types import Evaluation, StepStats
from arl.remote_calls import place_of
from arl.tracking.tracker_process import TrackerProcess, failure

CLOSING_S = 30.0
"""How long the end of a run waits for trackers."""
_QUIET_SHARE = 0.1
"""Of CLOSING_S. Then the log says what the end waits for."""
MOST_WAITING = 256
"""Records that wait for one tracker. More are dropped."""
MOST_FAILURES = 3
"""In a row. Then a tracker is left out."""

log = logging.getLogger(__name__)


class Trackers(Tracker):
    """Gives each record to all trackers. Calls return at once, except `close`, which takes CLOSING_S at most."""

    def __init__(
        self, ready_made: Sequence[TrackerConfig] = (), own: Sequence[Tracker] = (), *, closing_s: float = CLOSING_S
    ) -> None:
        """own: a user's."""
        named: list[tuple[str, Tracker]] = [(config.kind, TrackerProcess(config)) for config in ready_made]
        named += [(type(tracker).__name__, tracker) for tracker in own]
        numbers, self._closing_s = Counter[str](), closing_s
        self._lines: list[_Line] = []
        for name, tracker in named:
            numbers[name] += 1
            self._lines.append(_Line(name if numbers[name] == 1 else f"{name}-{numbers[name]}", tracker))

    @property
    def has_any(self) -> bool:
        return bool(self._lines)

    def open(self, run: TrackedRun) -> None:
        """run.run_id does not count: each tracker gets its own, from run_dir/trackers.json."""
        ids = _RunIds(run.run_dir / "trackers.json")
        for line in self._lines:
            line.open(run, ids)

    def step(self, stats: StepStats, trajectories: Sequence[TrackedTrajectory]) -> None:
        for line in self._lines:
            line.put(f"step {stats.version}", lambda tracker: tracker.step(stats, trajectories))

    def evaluation(self, evaluation: Evaluation) -> None:
        for line in self._lines:
            line.put(f"the evaluation of version {evaluation.version}", lambda tracker: tracker.evaluation(evaluation))

    def held_out(self, evaluation: Evaluation, trajectories: Sequence[TrackedTrajectory]) -> None:
        about = f"the held-out trajectories of version {evaluation.version}"
        for line in self._lines:
            line.put(about, lambda tracker: tracker.held_out(evaluation, trajectories))

    def close(self, error: str | None) -> None:
        """Wait until the trackers have what they were given, and are closed. Logs which are not, and goes on."""
        began = time.monotonic()
        for line in self._lines:
            line.close(error)
        is_done = [line.is_done(began + self._closing_s * _QUIET_SHARE) for line in self._lines]
        if not all(is_done):
            log.warning("waiting for trackers to take their last records, %g s at most", self._closing_s)
        for line in self._lines:
            line.end(began + self._closing_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrackerCall:
    about: str
    make: Callable[[Tracker], object]
    is_needed: bool = False
    """Without it, no other call makes sense."""


class _Line:
    """A tracker, its thread, and the calls that wait for it."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker = tracker
        self._calls = SimpleQueue[_TrackerCall | None]()
        self._thread = threading.Thread(target=self._work, name=f"arl-tracker-{name}", daemon=True)
        self._error: str | None = None
        self._doing = "its start"
        self._is_out = True
        self._is_left = False
        """The run has ended without it."""
        self._num_dropped = 0

    def open(self, run: TrackedRun, ids: _RunIds) -> None:
        self._is_out = False
        of_this = replace(run, run_id=ids.get(self._name))
        opening = _TrackerCall(about="opening", make=lambda it: ids.put(self._name, it.open(of_this)), is_needed=True)
        self._calls.put(opening)
        self._thread.start()

    def put(self, about: str, make: Callable[[Tracker], object]) -> None:
        if self._is_out:
            return
        if self._calls.qsize() < MOST_WAITING:
            self._calls.put(_TrackerCall(about=about, make=make))
            return
        self._num_dropped += 1
        if self._num_dropped == 1:
            log.warning(
                "the tracker %s is still busy with %s, and %d records wait for it: it misses every record from "
                "%s on until it continues",
                *(self._name, self._doing, MOST_WAITING, about),
            )

    def close(self, error: str | None) -> None:
        self._error = error
        self._calls.put(None)

    def is_done(self, deadline: float) -> bool:
        """Wait until the tracker is closed; returns whether it is, or was never opened."""
        if self._thread.ident is not None:
            self._thread.join(max(deadline - time.monotonic(), 0.0))
        return not self._thread.is_alive()

    def end(self, deadline: float) -> None:
        """Wait as `is_done` does; then go on without it."""
        if not self.is_done(deadline):
            self._is_left = True
            log.error(
                "the tracker %s is still busy with %s: %s; the run ends without it",
                *(self._name, self._doing, self._whereabouts()),
            )
            if isinstance(self._tracker, TrackerProcess):
                self._tracker.kill()
        if self._num_dropped:
            log.warning("the tracker %s has missed %d records", self._name, self._num_dropped)

    def _whereabouts(self) -> str:
        if isinstance(self._tracker, TrackerProcess):
            return self._tracker.whereabouts()
        return f"it is at {place_of(self._thread.ident or 0)}"

    def _work(self) -> None:
        """Make calls until the end, or until the tracker has failed too often; then close it."""
        num_failures = 0
        while not self._is_out and (call := self._calls.get()) is not None:
            failed = self._failure(call)
            num_failures = num_failures + 1 if failed else 0
            self._is_out = num_failures == MOST_FAILURES or bool(failed and call.is_needed)
            if failed and not self._is_left:
                then = "the run goes on without it" if self._is_out else "the run goes on"
                log.warning("the tracker %s failed in %s: %s; %s", self._name, call.about, failed, then)
            if failed and call.is_needed:
                return
        was_out, self._is_out = self._is_out, True
        error = "the tracker failed too often" if was_out else self._error
        failed = self._failure(_TrackerCall(about="closing", make=lambda tracker: tracker.close(error)))
        if failed and not was_out and not self._is_left:
            log.warning("the tracker %s failed to close: %s", self._name, failed)

    def _failure(self, call: _TrackerCall) -> str | None:
        """Make the call; returns what it raised, or None."""
        self._doing = call.about
        try:
            call.make(self._tracker)
        except BaseException as error:  # noqa: BLE001 - a user's code; sys.exit, too, must end nothing but this call
            return failure(error)
        return None


class _RunIds:
    """run_dir/trackers.json: name -> what the tracker's `open` returned."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changing = threading.Lock()
        try:
            known = json.loads(path.read_text())
        except (OSError, ValueError):
            known = {}
        own = known.items() if isinstance(known, dict) else ()
        self._ids: dict[str, str] = {name: run_id for name, run_id in own if isinstance(run_id, str)}

    def get(self, name: str) -> str | None:
        return self._ids.get(name)

    def put(self, name: str, run_id: object) -> None:
        """Keep what `open` returned. Without it the tracker works, but a continued run gets no id."""
        with self._changing:
            if run_id is None or self._ids.get(name) == run_id:
                return
            if not isinstance(run_id, str):
                why = f"open returned {run_id!r:.80}, which is not a str"
                log.warning("the run's id in the tracker %s is not kept for a continued run: %s", name, why)
                return
            self._ids[name] = run_id
            try:
                aside = self._path.with_name(self._path.name + ".tmp")
                aside.write_text(json.dumps(self._ids, indent=2) + "\n")
                aside.replace(self._path)
            except OSError as error:
                log.warning("the run's id in the tracker %s is not kept for a continued run: %s", name, error)

"""All trackers of a run as one, which never waits for them: each has a thread and a queue of calls.

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
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from arl.api.settings.run import TrackerConfig
from arl.api.tracking import TrackedRun, TrackedTrajectory, Tracker
from arl.api.types import Evaluation, StepStats
from arl.observe.tracking.ready_made import ready_made as made
from arl.runtime.processes.rpc import place_of

CLOSING_S = 30.0
"""How long the end of a run waits for trackers. After a tenth of it the log says what the end waits for."""
MOST_WAITING = 256
"""Records that wait for one tracker. More are dropped."""

log = logging.getLogger(__name__)


class Trackers(Tracker):
    """Gives each record to all trackers. Calls return at once, except `close`, which takes CLOSING_S at most."""

    def __init__(
        self, ready_made: Sequence[TrackerConfig] = (), own: Sequence[Tracker] = (), *, closing_s: float = CLOSING_S
    ) -> None:
        """own: a user's."""
        named = [(config.kind, made(config)) for config in ready_made] + [(type(one).__name__, one) for one in own]
        counts, self._closing_s = Counter[str](), closing_s
        self._threads: list[_TrackerThread] = []
        for name, tracker in named:
            counts[name] += 1
            self._threads.append(_TrackerThread(name if counts[name] == 1 else f"{name}-{counts[name]}", tracker))

    @property
    def has_any(self) -> bool:
        return bool(self._threads)

    def open(self, run: TrackedRun) -> None:
        """run.run_id does not count: each tracker gets its own, from run_dir/trackers.json."""
        ids = _RunIds(run.run_dir / "trackers.json")
        for thread in self._threads:
            thread.open(run, ids)

    def step(self, stats: StepStats, trajectories: Sequence[TrackedTrajectory]) -> None:
        for thread in self._threads:
            thread.put(f"step {stats.version}", "step", stats, trajectories)

    def evaluation(self, evaluation: Evaluation) -> None:
        for thread in self._threads:
            thread.put(f"the evaluation of version {evaluation.version}", "evaluation", evaluation)

    def held_out(self, evaluation: Evaluation, trajectories: Sequence[TrackedTrajectory]) -> None:
        for thread in self._threads:
            about = f"the held-out trajectories of version {evaluation.version}"
            thread.put(about, "held_out", evaluation, trajectories)

    def close(self, error: str | None) -> None:
        """Wait until each tracker has its records and is closed. Logs which is not, and goes on without it."""
        began = time.monotonic()
        for thread in self._threads:
            thread.close(error)
        if not all(thread.has_ended(began + self._closing_s / 10) for thread in self._threads):
            log.warning("waiting for trackers to take their last records, %g s at most", self._closing_s)
        for thread in self._threads:
            thread.leave(began + self._closing_s)


class _TrackerThread:
    """A tracker, its thread, and the calls that wait for it. Its first failure is logged; later ones are counted."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._calls = SimpleQueue[tuple[str, str, tuple[Any, ...]] | None]()
        self._thread = threading.Thread(target=self._work, name=f"arl-tracker-{name}", daemon=True)
        self._doing = "opening"
        self._is_open = self._is_left = False
        """Left: the run has ended without it."""
        self._num_dropped = self._num_failed = 0

    def open(self, run: TrackedRun, ids: _RunIds) -> None:
        self._run, self._ids, self._is_open = replace(run, run_id=ids.known.get(self._name)), ids, True
        self._thread.start()

    def put(self, about: str, method: str, *args: Any) -> None:
        if self._is_open and self._calls.qsize() < MOST_WAITING:
            self._calls.put((about, method, args))
        elif self._is_open:
            self._num_dropped += 1
            if self._num_dropped == 1:
                log.warning(
                    "the tracker %s is still busy with %s, and %d records wait for it: it misses every record from "
                    "%s on until it continues",
                    *(self._name, self._doing, MOST_WAITING, about),
                )

    def close(self, error: str | None) -> None:
        self._calls.put(("closing", "close", (error,)))
        self._calls.put(None)

    def has_ended(self, deadline: float) -> bool:
        """Wait until the tracker is closed; returns whether it is, or was never opened."""
        if self._thread.ident is not None:
            self._thread.join(max(deadline - time.monotonic(), 0.0))
        return not self._thread.is_alive()

    def leave(self, deadline: float) -> None:
        """Wait as `has_ended` does; then go on without it, and log what it has missed."""
        if not self.has_ended(deadline):
            self._is_left, place = True, place_of(self._thread.ident or 0)
            log.error("the tracker %s is still at %s, in %s; the run ends without it", self._name, self._doing, place)
        if self._num_dropped or self._num_failed > 1:
            missed = (self._name, self._num_dropped, self._num_failed)
            log.warning("the tracker %s has missed %d records, and failed in %d calls", *missed)

    def _work(self) -> None:
        try:
            self._ids.put(self._name, self._tracker.open(self._run))
        except BaseException as error:  # noqa: BLE001 - a user's code; sys.exit, too, must end nothing but this call
            self._is_open = False
            return self._failed(error, "the run goes on without it")
        while (call := self._calls.get()) is not None:
            self._doing, method, args = call
            try:
                getattr(self._tracker, method)(*args)
            except BaseException as error:  # noqa: BLE001 - as above
                self._failed(error, "the run goes on, and counts its further failures")

    def _failed(self, error: BaseException, then: str) -> None:
        self._num_failed += 1
        if self._num_failed == 1 and not self._is_left:
            said = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{place.filename}:{place.lineno}"
            log.warning("the tracker %s failed in %s: %s (at %s); %s", self._name, self._doing, said, where, then)


class _RunIds:
    """run_dir/trackers.json: name -> what the tracker's `open` returned."""

    def __init__(self, path: Path) -> None:
        self._path, self._changing, self.known = path, threading.Lock(), dict[str, str]()
        with suppress(OSError, ValueError, AttributeError):  # none yet, or a broken file: as in a new run
            self.known |= {name: str(run_id) for name, run_id in json.loads(path.read_text()).items()}

    def put(self, name: str, run_id: str | None) -> None:
        """Keep what `open` returned. Without it the tracker works, but a continued run gets no id."""
        if run_id is not None:
            with self._changing:
                self.known[name] = str(run_id)
                aside = self._path.with_name(self._path.name + ".tmp")
                try:
                    aside.write_text(json.dumps(self.known, indent=2) + "\n")
                    aside.replace(self._path)
                except OSError as error:
                    log.warning("the run's id in the tracker %s is not kept for a continued run: %s", name, error)

"""A watchdog over a run: when nothing moves for long, it logs who waits for what, and may end the run.

    its thread --every period--> the event loop: has anything moved? If not: who waits for what, and who would wake it
               --no answer--> the loop is blocked: where?
               --twice limit_s--> the process ends, because the run could not end itself

`WAITS` is the table of docs/architecture.md, "Who waits for whom", as the watchdog reads it from suspended tasks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

from arl.api.errors import StalledError

log = logging.getLogger(__name__)

WARN_AFTER_S = 600.0
"""The watchdog logs what waits for what after this long, and again after twice as long each time."""
_TICKS = 20
"""How often the watchdog looks within that time."""
_SHOWN = 12
"""Kinds of waits that one message names."""


class Wait(NamedTuple):
    what: str
    woken_by: str


WAITS = {
    "ReplayBuffer.admit": Wait("room in the buffer", "a batch that is published, a group that is released"),
    "ReplayBuffer.take_batch": Wait("a batch that may be taken", "a group that finishes or is released"),
    "ReplayBuffer.wait_for_stragglers": Wait("stragglers", "the buffer, the clock"),
    "GroupRun.run": Wait("the episodes of a group", "their end, rollout.episode_timeout_s"),
    "GroupRun._run_episodes": Wait("a free episode place", "an episode that ends"),
    "RolloutController.run": Wait("a free episode place, or the start of a group", "an episode that ends"),
    "Delivery.reached": Wait("the delivery of new weights", "the servers"),
    "Delivery.finished": Wait("the delivery of the previous weights", "the servers"),
    "Trainer._catch_up": Wait("a save or an export", "their copies, once they are made"),
    "Trainer._step": Wait("a save or an export", "their copies, once they are made"),
    "Trainer.save": Wait("the step in training", "its end"),
    "Trainer.export": Wait("the step in training, or the model's files", "its end, the disk"),
    "Trainer._begin_saving": Wait("the previous checkpoint", "the disk"),
    "TrainThread.finish": Wait("the train engine", "the end of its call on the thread arl-train"),
    "written": Wait("a checkpoint", "the disk"),
    "Line.find": Wait("a server with room", "a server, a request's end, engine.request_timeout_s"),
    "SGLangClient.generate": Wait("a server's answer", "the server, engine.request_timeout_s"),
    "VLLMClient.generate": Wait("a server's answer", "the server, engine.request_timeout_s"),
    "EpisodeWorkers._choose": Wait("a worker process", "its start, rollout.episode_timeout_s"),
    "_Worker.play": Wait(
        "an episode in a worker process (logs/worker-K.log tells where its event loop is blocked, if it is)",
        "its end, rollout.episode_timeout_s",
    ),
    "SDKWorkflow.arun_episode": Wait(
        "a place for another program (Command.max_processes), or a reward", "the end of one, rollout.episode_timeout_s"
    ),
    "SDKWorkflow._answer": Wait("a program that plays an episode", "its end, rollout.episode_timeout_s"),
    "PlayedEpisodes.offer": Wait(
        "a program that plays an episode; is one running, with this URL and key?", "a program's POST /episodes"
    ),
    "PlayedEpisode.end_within": Wait(
        "the end of an episode that a program plays",
        "its POST /episodes/ID/end, endpoint.lease_s, rollout.episode_timeout_s",
    ),
    "PlayedEpisodes.take": Wait("an episode, for a program", "room in the buffer, the program's wait_s"),
    "PlayedEpisodes.end": Wait("the reward of an episode that a program ended", "the workflow's reward"),
    "Upkeep._on_each": Wait("servers that take an update", "their answers, engine.update_timeout_s"),
    "Upkeep._wait_for_probes": Wait("a server that comes back", "its probe, engine.update_timeout_s"),
    "Upkeep._probe": Wait("a fenced server", "its health, the clock"),
    "WrittenWeights.on_disk": Wait("weights that are being written", "the thread arl-weights"),
    "DistributedWeights.gathered": Wait("weights that the ranks gather", "the threads arl-gather"),
}
"""Coroutine -> what it waits for while it is suspended, and who wakes it."""

_WATCHES = (
    "LagMonitor.run",
    "Patience.watch",
    "Roster.run",
    "ServerWatch.listen",
    "ServerWatch.hold_floor",
    "_Server.keep_alive",
    "_Worker.keep",
    "Delivery._renew",
)
_AT_REST = frozenset((*_WATCHES, "_watch", "WorkerProcess._watch", "_end_of_process", "_end_of_pipe"))
"""Coroutines that watch others, and wait as long as all is well."""
_NOT_OURS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Watchdog:
    """Watches an event loop from a thread of its own, within `watching`.

    progress: returns a value that changes whenever the run moves; None while nobody asks the run to move.
    end: called once, on the loop, with the error that ends the run. elsewhere: says where the trainer's process is.
    last_words: called with the reason, on the thread, before the process ends.
    """

    def __init__(
        self,
        limit_s: float | None,
        progress: Callable[[], object],
        end: Callable[[StalledError], object],
        elsewhere: Callable[[], str],
        last_words: Callable[[str], object] = lambda reason: None,
    ) -> None:
        self._limit_s = limit_s
        self._progress = progress
        self._end = end
        self._elsewhere = elsewhere
        self._last_words = last_words
        self._is_over = threading.Event()
        self._seen: object = None
        self._now = self._moved_at = self._beat_at = 0.0
        """Seconds in which this process ran, without those in which it was stopped, or its machine slept."""
        self._warn_at_s = WARN_AFTER_S
        self._has_ended_run = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the running loop within the block."""
        thread = threading.Thread(
            target=self._run,
            args=(asyncio.get_running_loop(), threading.get_ident()),
            name="arl-watchdog",
            daemon=True,
        )
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()

    def _run(self, loop: asyncio.AbstractEventLoop, loop_thread: int) -> None:
        period_s = min(WARN_AFTER_S, self._limit_s or WARN_AFTER_S) / _TICKS
        blocked_warning_s, looked_at = WARN_AFTER_S, time.monotonic()
        while not self._is_over.wait(period_s):
            looked_at, before = time.monotonic(), looked_at
            self._now += min(looked_at - before, 2 * period_s)
            loop.call_soon_threadsafe(self._beat)
            blocked_s, still_s = self._now - self._beat_at, self._now - self._moved_at
            if blocked_s < WARN_AFTER_S:
                blocked_warning_s = WARN_AFTER_S
            elif blocked_s >= blocked_warning_s:
                blocked_warning_s *= 2
                frame = sys._current_frames().get(loop_thread)
                stack = "".join(traceback.format_stack(frame)) if frame else "an unknown place"
                log.error("the event loop has been blocked for %.0f s, in\n%s", blocked_s, stack)
            if self._limit_s is not None and still_s >= 2 * self._limit_s:
                self._last_words(f"nothing moved for {still_s:.0f} s, and the run could not end itself")
                _end_process(still_s)

    def _beat(self) -> None:
        """On the loop: has anything moved since the last time?"""
        self._beat_at = now = self._now
        progress = self._progress()
        if progress is None or progress != self._seen:
            self._seen, self._moved_at, self._warn_at_s = progress, now, WARN_AFTER_S
            return
        still_s, limit_s = now - self._moved_at, self._limit_s
        if still_s >= self._warn_at_s:
            self._warn_at_s *= 2
            log.error("%s", self._report(still_s))
        if limit_s is not None and still_s >= limit_s and not self._has_ended_run:
            self._has_ended_run = True
            self._end(StalledError(f"{self._report(still_s)}\nThe run ends, as stall_timeout_s is {limit_s:g}"))

    def _report(self, still_s: float) -> str:
        lines = (*waits(asyncio.all_tasks()), *_threads(), f"  {self._elsewhere()}")
        begin = f"nothing has moved for {still_s:.0f} s: no batch, no answer, no weights. What waits:"
        return "\n".join((begin, *lines))


def waits(tasks: Iterable[asyncio.Task[Any]]) -> list[str]:
    """What the tasks wait for: one line for each kind of wait, the most frequent first."""
    counts = Counter(line for task in tasks if task is not asyncio.current_task() and (line := _line(task)))
    lines = [f"  {count} x {line}" for line, count in counts.most_common()]
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"  and {len(lines) - _SHOWN} other kinds of waits"]


def _line(task: asyncio.Task[Any]) -> str:
    frames = list(_suspended(task))
    names = [frame.f_code.co_qualname for frame in frames]
    if not frames or not _AT_REST.isdisjoint(names):
        return ""
    known = next((WAITS[name] for name in reversed(names) if name in WAITS), None)
    ours = [frame for frame in frames if not frame.f_code.co_filename.startswith(_NOT_OURS)]
    where = _place(ours[-1] if ours else frames[-1])
    if known is None:
        return f"in {where}"
    users = [frame for frame in ours if not frame.f_globals.get("__name__", "").startswith("arl.")]
    return f"{known.what}; woken by {known.woken_by} ({_place(users[-1]) if users else where})"


def _suspended(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """The frames of a suspended task, outermost first."""
    awaited: Any = task.get_coro()
    while awaited is not None:
        kind = next((k for k in ("cr", "gi", "ag") if hasattr(awaited, f"{k}_frame")), None)
        if kind is None or getattr(awaited, f"{kind}_frame") is None:
            return
        yield getattr(awaited, f"{kind}_frame")
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


def _place(frame: FrameType) -> str:
    code: CodeType = frame.f_code
    return f"{code.co_qualname}, {os.path.relpath(code.co_filename)}:{frame.f_lineno}"


def _threads() -> list[str]:
    """What arl's threads are doing, except this one and those that wait for work."""
    lines: list[str] = []
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if not thread.name.startswith("arl-") or thread.name == "arl-watchdog" or frame is None:
            continue
        stack = [f for f, _ in traceback.walk_stack(frame) if not f.f_code.co_filename.startswith(_NOT_OURS)]
        if stack:
            lines.append(f"  thread {thread.name}: in {_place(stack[0])}")
    return lines


def _end_process(still_s: float) -> None:
    log.critical(
        "the run could not end itself %.0f s after it stalled: its process ends now (stall_timeout_s). The same "
        "command continues from the newest checkpoint",
        still_s,
    )
    logging.shutdown()
    os._exit(1)

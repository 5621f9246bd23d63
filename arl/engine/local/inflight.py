"""Requests under way: the event loop's side of the scheduler.

    handler --submit--> scheduler (model thread) --deliver, once per step--> event loop --> Following.progress

`progress` is woken by the step that finished one of its jobs, or added tokens to a streaming one.

A streaming job is read while the model thread goes on writing. So the scheduler gets a twin of it, and the job itself
is brought up to date on the event loop, from a copy taken at the end of the step: what a handler reads is of one step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from arl.engine.local.body import ApiError
from arl.engine.local.job import Job
from arl.engine.local.scheduler import Scheduler


class Following:
    """One request's view of its jobs."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._running = set(jobs)
        self._changed: dict[Job, None] = {}
        self._event = asyncio.Event()

    @property
    def is_done(self) -> bool:
        return not self._running and not self._changed

    async def progress(self) -> list[Job]:
        """Wait for the next change; the jobs that finished or gained tokens since the last call."""
        await self._event.wait()
        self._event.clear()
        changed = list(self._changed)
        self._changed.clear()
        return changed

    async def finish(self) -> None:
        """Wait until every job is done."""
        while self._running:
            await self.progress()

    def notice(self, job: Job) -> None:
        if job.is_done:
            self._running.discard(job)
        self._changed[job] = None
        self._event.set()

    @property
    def unfinished(self) -> set[Job]:
        return self._running


class Inflight:
    """Who waits for which job, and which jobs a request id means. Belongs to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._following: dict[Job, tuple[Following, Job]] = {}  # by the job that the scheduler has
        self._named: dict[str, Sequence[Job]] = {}

    def deliver(self, jobs: Sequence[Job]) -> None:
        """Called on the model thread, once per step."""
        states = [(job, job.copy() if job.stream else job) for job in jobs]
        self._loop.call_soon_threadsafe(self._notice, states)

    def _notice(self, states: Sequence[tuple[Job, Job]]) -> None:
        for submitted, state in states:
            if submitted in self._following:
                following, job = self._following[submitted]
                if job is not submitted:
                    job.become(state)
                following.notice(job)

    @contextmanager
    def submit(self, scheduler: Scheduler, named: Mapping[str, Sequence[Job]]) -> Iterator[Following]:
        """Run jobs for as long as the block lasts; those that are unfinished when it is left are aborted.

        named: each id that a client may abort by, and the jobs it stands for.
        """
        for rid in named:
            if rid in self._named:
                raise ApiError(f"Duplicate request ID detected: {rid}")
        if not scheduler.is_alive:
            raise ApiError("the model thread of this server has died; its log says why", 503)
        jobs = list(dict.fromkeys(job for members in named.values() for job in members))
        following = Following(jobs)
        self._named.update(named)
        submitted = {job.copy() if job.stream else job: job for job in jobs}
        self._following.update({one: (following, job) for one, job in submitted.items()})
        try:
            for one in submitted:
                scheduler.submit(one)
            yield following
        finally:
            for job in following.unfinished:
                scheduler.abort(job.rid)
            for one in submitted:
                del self._following[one]
            for rid in named:
                del self._named[rid]

    def abort(self, scheduler: Scheduler, rid: str | None) -> None:
        """Abort the jobs that `rid` means (none, if it is not under way); all of them if it is None."""
        if rid is None:
            scheduler.abort(None)
            return
        for job in self._named.get(rid, ()):
            scheduler.abort(job.rid)

"""EpisodeWorkers: a workflow whose episodes run in worker processes.

| who waits | for | woken by |
|---|---|---|
| an episode | a worker that is ready | a worker's start; its time limit; the end of the block, if none will start |
| | its end in the worker, also after it was cancelled there | the worker; the worker's end, also after _STOPPING_S |
| a request of an episode | the engine's answer | the engine; the episode's end |
| `keep`, for each worker | the end of the process | the process |
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from msgspec import structs

from arl.api.engine import Sampler
from arl.api.errors import DatasetError, EngineClosedError, WorkerError, end_with, left
from arl.api.events import EPISODE, NOWHERE, Events, ProcessRestarted
from arl.api.settings.endpoint import EndpointConfig
from arl.api.types import Example, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.rollout.workers.messages import (
    Answered,
    Clocked,
    Close,
    Closed,
    Drop,
    Ended,
    Failure,
    Noted,
    Pipe,
    Play,
    Ready,
    Request,
    Said,
    Stop,
)
from arl.runtime.clocks import CLOCK
from arl.runtime.processes.actor import pickled
from arl.runtime.processes.logs import ChildLog, how_it_ended
from arl.runtime.processes.rpc import OtherTracebackError, SentObject, portable

log = logging.getLogger(__name__)

_MAX_RESTARTS = 5
"""In a row."""
_STEADY_S = 600.0
"""A worker that has run for this long may again die _MAX_RESTARTS times."""
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 10.0
_CLOSING_S = 300.0
"""How long leaving the workflow may take."""
_STOPPING_S = 300.0
"""How long an episode that was cancelled may take to end. A worker with one that takes longer is killed."""


_ADVICE = (
    "Open connections, locks and processes in its __aenter__, which runs in each worker, define its functions at the "
    "top of a module, and make no lambdas"
)


class EpisodeWorkers(RolloutWorkflow):
    """Enters the workflow in `num_workers` processes, and runs its episodes there, within `async with`.

    An episode goes to the worker that runs the fewest. When a worker dies, its episodes raise WorkerError, and it
    starts again; after _MAX_RESTARTS in a row the block is cancelled and raises WorkerError. Once an episode has
    ended, or was cancelled, its requests raise EngineClosedError.
    """

    def __init__(
        self,
        workflow: RolloutWorkflow,
        num_workers: int,
        logs: Path,
        endpoint: EndpointConfig = EndpointConfig(),  # noqa: B008 - it is frozen
    ) -> None:
        """logs: worker K writes its output to logs/worker-K.log. endpoint: the address of the workflow's endpoints.

        Raises ConfigError if the workflow cannot travel.
        """
        sent = SentObject.of(
            workflow, type(workflow).__name__, "worker processes", _ADVICE, "; or set rollout.num_workers=0"
        )
        self._sent = b"".join(pickled((sent, endpoint)))
        """The first message to a worker."""
        self._workers = [_Worker(number, logs / f"worker-{number}.log") for number in range(num_workers)]
        self._groups = AsyncExitStack()
        self._alarms = asyncio.TaskGroup()
        """Cancels the block, and leaves the workers that still run to `__aexit__`."""
        self._keepers: list[asyncio.Task[None]] = []

    def report_to(self, events: Events) -> None:
        for worker in self._workers:
            worker.events = events

    async def __aenter__(self) -> Self:
        """Returns when all workers have entered the workflow. Raises what it raised in one of them."""
        await self._groups.enter_async_context(self._alarms)
        tasks = await self._groups.enter_async_context(asyncio.TaskGroup())
        for worker in self._workers:
            worker.begin()
        self._keepers = [tasks.create_task(worker.keep(self._sent, self._end)) for worker in self._workers]
        try:
            await asyncio.gather(*(worker.started for worker in self._workers))
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Raises what leaving the workflow raised in a worker. Logs it if the block had an error of its own."""
        error = exc[1] if isinstance(exc[1], BaseException) else None
        try:
            for worker in self._workers:
                worker.close()
            await asyncio.wait(self._keepers, timeout=_CLOSING_S)
        finally:
            for keeper in self._keepers:
                keeper.cancel()  # it kills the worker
            await left(self._groups.aclose(), error)
        first = error
        for worker in self._workers:
            first = first or worker.failure
            worker.complain(first)
        if first is not error and first is not None:
            raise first

    def of(self, task: str) -> RolloutWorkflow:
        """One of the TaskWorkflows that were given, with its episodes in the same workers."""
        return _OfTask(self, task)

    async def arun_episode(self, engine: Sampler, data: Example, task: str = "") -> Sequence[Trajectory] | None:
        """Run an episode of a task; "": of the only workflow."""
        try:
            example = pickle.dumps(data, protocol=5)
        except Exception as error:
            raise DatasetError(
                f"an example cannot be sent to a worker process ({type(error).__name__}: {error}); give it only "
                "columns that can be pickled, or set rollout.num_workers=0"
            ) from error
        worker = await self._choose()
        return await worker.play(engine, example, task)

    async def _choose(self) -> _Worker:
        """The worker with the fewest episodes. Waits for one that is ready; the caller limits the wait."""
        while not (ready := [worker for worker in self._workers if worker.is_ready]):
            waits = [worker.started for worker in self._workers if not worker.started.done()]
            if not waits:  # the block was cancelled, and soon so will this be: its example runs again after a resume
                await asyncio.Event().wait()
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return min(ready, key=lambda worker: worker.num_episodes)

    def _end(self, error: Exception) -> None:
        end_with(error, self._alarms)


class _OfTask(RolloutWorkflow):
    def __init__(self, workers: EpisodeWorkers, task: str) -> None:
        self._workers = workers
        self._task = task

    async def arun_episode(self, engine: Sampler, data: Example) -> Sequence[Trajectory] | None:
        return await self._workers.arun_episode(engine, data, self._task)


class _Episode:
    """An episode that runs in a worker. calls: a group for the tasks of its requests."""

    def __init__(self, engine: Sampler, calls: asyncio.TaskGroup, send: Callable[[object], None]) -> None:
        self.ended: asyncio.Future[Ended | WorkerError] = asyncio.get_running_loop().create_future()
        self._engine = engine
        self._calls = calls
        self._send = send
        self._context = EPISODE.get()
        self._clock = CLOCK.get()
        self._running: dict[int, asyncio.Task[Answered]] = {}
        self._is_over = False
        self._is_gone = asyncio.Event()

    def end(self, ended: Ended | WorkerError) -> None:
        """ended: how it ended in the worker, or that the worker has ended."""
        self._is_gone.set()
        if not self.ended.done():
            self.ended.set_result(ended)

    async def gone(self, limit_s: float) -> bool:
        """Wait until it has ended, however often the caller is cancelled. Returns whether it has, in this time."""
        await outlast(self._is_gone.wait, limit_s)
        return self._is_gone.is_set()  # also if the time was over because the event loop was blocked

    def take(self, message: Request | Drop | Ended | Noted | Clocked) -> None:
        match message:
            case Ended():
                self.end(message)
            case Clocked(is_still=is_still):
                if self._clock:
                    (self._clock.stop if is_still else self._clock.go)()
            case Noted():
                if self._context:
                    self._context.events.emit(structs.replace(message.event, episode=self._context.episode))
            case Drop():
                if call := self._running.get(message.request):
                    call.cancel()
            case Request() if self._is_over:
                self._send(_over(message))
            case Request():
                call = self._running[message.request] = self._calls.create_task(self._answer(message))
                # Not at the end of the task: one that is cancelled at once never begins.
                call.add_done_callback(partial(self._end_call, message))

    def end_calls(self) -> None:
        self._is_over = True
        for call in self._running.values():
            call.cancel()

    async def _answer(self, request: Request) -> Answered:
        try:
            return Answered(request.request, await self._engine.agenerate(request.asked))
        except Exception as error:  # noqa: BLE001 (the workflow gets it, and may handle it)
            return Answered(request.request, None, portable(error), "".join(traceback.format_exception(error)))

    def _end_call(self, request: Request, call: asyncio.Task[Answered]) -> None:
        del self._running[request.request]
        self._send(_over(request) if call.cancelled() else call.result())


def _over(request: Request) -> Answered:
    return Answered(request.request, None, EngineClosedError("the episode has ended"))


class _Worker:
    """One worker: its process, and those that replace it after it died."""

    def __init__(self, number: int, log_file: Path) -> None:
        self.failure: Exception | None = None
        """The exception that entering or leaving the workflow raised there."""
        self.is_ready = False
        self.events: Events = NOWHERE
        """Gets its restarts."""
        self._has_left = True
        self._name = f"episode worker {number}"
        self._process = WorkerProcess(log_file, self._take)
        self._episodes: dict[int, _Episode] = {}
        self._numbers = itertools.count()
        self._closing = asyncio.Event()

    @property
    def num_episodes(self) -> int:
        return len(self._episodes)

    def begin(self) -> None:
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the worker is ready, or will never be."""

    async def keep(self, workflow: bytes, fail: Callable[[Exception], None]) -> None:
        """Run the process, and start it again when it dies. If that happens too often in a row, `fail` and end."""
        restarts, has_started = 0, False
        try:
            while not self._closing.is_set():
                began = time.monotonic()
                how, num_lost = await self._live(workflow)
                has_started = has_started or self.started.done()
                if self._closing.is_set():
                    return
                how = f"{how}; {self._process.log.end()}"
                if not has_started:
                    self.started.set_exception(self.failure or WorkerError(f"{self._name} did not start: it {how}"))
                    return
                self.failure, self._has_left = None, True  # `how` tells it
                restarts = 1 if time.monotonic() - began > _STEADY_S else restarts + 1
                if restarts > _MAX_RESTARTS:
                    fail(WorkerError(f"{self._name} died {restarts} times in a row; the last time it {how}"))
                    return
                backoff_s = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (restarts - 1))
                self.events.emit(ProcessRestarted(name=self._name, how=how))
                log.warning(
                    "%s died with %d episodes; restart %d of %d follows in %g s: it %s",
                    self._name, num_lost, restarts, _MAX_RESTARTS, backoff_s, how,
                )  # fmt: skip
                if self.started.done():  # else episodes wait for it
                    self.begin()
                with suppress(TimeoutError):
                    async with asyncio.timeout(backoff_s):
                        await self._closing.wait()
        finally:
            if not self.started.done():
                self.started.set_result(None)

    async def _live(self, workflow: bytes) -> tuple[str, int]:
        """From the start of a process to its end; returns how it ended, and how many episodes it lost."""
        self.failure = None
        how = "was killed"
        try:
            how = await self._process.run(workflow)
            if self.failure is not None:
                how = f"could not go on ({type(self.failure).__name__}: {self.failure}), and {how}"
        finally:
            self.is_ready, lost = False, [*self._episodes.values()]
            for episode in lost:
                episode.end(WorkerError(f"{self._name} {how}; see {self._process.log.path}"))
        return how, len(lost)

    def close(self) -> None:
        """Leave the workflow, and end the process; one that is not ready is killed."""
        self._closing.set()
        if self.is_ready:
            self._process.send(Close())
        else:
            self._process.kill()

    def complain(self, raised: BaseException | None) -> None:
        """Log what went wrong when it was closed, unless that is `raised`."""
        if self.failure is not None and self.failure is not raised:
            log.warning("%s failed, too: %r", self._name, self.failure, exc_info=self.failure)
        elif not self._has_left:
            log.warning(
                "%s ended before it had left the workflow, whose __aexit__ may not have closed everything; see %s",
                self._name, self._process.log.path,
            )  # fmt: skip

    async def play(self, engine: Sampler, example: bytes, task: str) -> Sequence[Trajectory] | None:
        """Run an episode. Cancelled, it waits until the episode has ended in the worker."""
        number, send = next(self._numbers), self._process.send
        calls = asyncio.TaskGroup()
        episode = self._episodes[number] = _Episode(engine, calls, send)
        try:
            async with calls:
                send(Play(number, example, task))
                try:
                    ended = await episode.ended
                except asyncio.CancelledError:
                    send(Stop(number))  # before its requests end, which would look like errors there
                    raise
                finally:
                    episode.end_calls()
        except asyncio.CancelledError:
            if not await episode.gone(_STOPPING_S):
                self._process.give_up(f"did not end a cancelled episode within {_STOPPING_S:g} s")
                await episode.gone(math.inf)
            raise
        finally:
            del self._episodes[number]
        if isinstance(ended, WorkerError):
            raise ended
        if ended.is_interrupt:
            raise KeyboardInterrupt
        if ended.failure is not None:
            raise self._error_of(ended.failure)
        return ended.trajectories or None

    def _error_of(self, failure: Failure) -> Exception:
        error = failure.error()
        error.__cause__ = OtherTracebackError(f"in {self._name}:\n{failure.traceback}")
        return error

    def _take(self, message: Any) -> None:
        match message:
            case Request() | Drop() | Ended() | Noted() | Clocked():
                if episode := self._episodes.get(message.episode):
                    episode.take(message)
                elif isinstance(message, Request):  # of a task that has outlived its episode
                    self._process.send(_over(message))
            case Said(said):
                logging.getLogger(said.logger).log(said.level, "%s: %s", self._name, said.text)
            case Ready():
                self.is_ready, self._has_left = True, False
                if not self.started.done():
                    self.started.set_result(None)
            case Closed(failure):
                self.failure = None if failure is None else self._error_of(failure)
                self._has_left = True
            case _:
                raise TypeError(f"{self._name} sent {message!r:.100}")


_BEAT_S = 5.0
_SILENT_S = 15.0
"""A process that twice does not answer for this long is killed."""
_STARTING_S = 150.0
"""The same limit until its first answer, which comes when Python has started."""
_ENDING_S = 1.0
_REAPING_S = 60.0
"""A killed process that has not ended by then, as when its disk has failed, is left behind."""


class WorkerProcess:
    """A process, in a session of its own, that ends with this one, however this one ends. `run` starts another."""

    def __init__(self, log: Path, take: Callable[[Any], None]) -> None:
        """log: gets what it writes to stdout and stderr. take: called with each of its messages."""
        self.log = ChildLog(log)
        self._take = take
        self._process: asyncio.subprocess.Process | None = None
        self._pipe: Pipe | None = None
        self._fault = ""
        """The reason for its end, if it did not end by itself."""
        self._is_over = False
        """`kill` was called: no process starts any more."""

    def send(self, message: object) -> None:
        """Does nothing without a process."""
        if self._pipe is not None:
            self._pipe.send(message)

    def kill(self) -> None:
        """For ever."""
        self._is_over = True
        self._kill()

    def give_up(self, why: str) -> None:
        """Kill the process that runs, if any; `run` returns why: a phrase that goes on "and was killed"."""
        if self._process is not None:
            self._fault = f"{why} and was killed"
            self._kill()
            if self._pipe is not None:
                self._pipe.abort()  # nothing of it is waited for any more

    async def run(self, first: bytes) -> str:
        """Run the process from its start, with this as its first message, to its end; returns how it ended."""
        ours, theirs = socket.socketpair()
        beats, their_beats = socket.socketpair()
        beats.setblocking(False)
        self._fault = ""
        with ours, beats:
            try:
                with theirs, their_beats:
                    self._process = process = await self._spawn(theirs, their_beats)
            except OSError as error:  # the machine has no memory, or no process, left
                return f"could not be started ({error})"
            try:
                _, pipe = await asyncio.get_running_loop().create_connection(lambda: Pipe(self._take), sock=ours)
                self._pipe = pipe
                pipe.write(first)
                if self._is_over:
                    self._kill()
                async with asyncio.TaskGroup() as tasks:
                    beating = tasks.create_task(self._watch(beats))
                    ends = {tasks.create_task(_end_of_process(process)), tasks.create_task(_end_of_pipe(pipe))}
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                    await asyncio.wait(ends, timeout=_ENDING_S)  # the other follows, unless something holds it up
                    for task in (beating, *ends):
                        task.cancel()
            finally:
                self._kill()
                await outlast(process.wait, _REAPING_S)
                if self._pipe is not None:
                    self._pipe.abort()
        if process.returncode is None:
            return f"{self._fault or 'was killed'}, but has not ended {_REAPING_S:g} s later (process {process.pid})"
        return self._fault or pipe.fault or how_it_ended(process.returncode)

    async def _spawn(self, theirs: socket.socket, beats: socket.socket) -> asyncio.subprocess.Process:
        descriptors = [theirs.fileno(), beats.fileno()]
        with self.log.opened() as stream:
            return await asyncio.create_subprocess_exec(
                # The log tells people who look at the machine's processes what this one is.
                *(
                    sys.executable,
                    "-m",
                    "arl.rollout.workers.worker",
                    *map(str, (*descriptors, os.getpid(), self.log.path)),
                ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C reaches us alone; and one signal reaches all that it starts
            )

    async def _watch(self, beats: socket.socket) -> None:
        """Kill a process that gives no sign of life. Its event loop may be blocked: a thread answers."""
        loop, silences, limit_s = asyncio.get_running_loop(), 0, _STARTING_S
        while silences < 2:  # after the first, this process may itself have been stopped
            try:
                async with asyncio.timeout(limit_s):
                    await loop.sock_sendall(beats, b".")
                    await loop.sock_recv(beats, 64)
                silences, limit_s = 0, _SILENT_S
                await asyncio.sleep(_BEAT_S)
            except TimeoutError:
                silences += 1
            except OSError:
                return  # it has ended
        self.give_up(f"gave no sign of life for {2 * limit_s:g} s")

    def _kill(self) -> None:
        """End it and its children, which may outlive it. Only once: later its id may belong to another process."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


async def _end_of_process(process: asyncio.subprocess.Process) -> None:
    await process.wait()


async def _end_of_pipe(pipe: Pipe) -> None:
    await pipe.ended


async def outlast(wait: Callable[[], Awaitable[object]], limit_s: float) -> bool:
    """Wait for so long at most, however often the caller is cancelled. Returns whether the wait came to its end."""
    loop = asyncio.get_running_loop()
    until = loop.time() + limit_s
    while loop.time() < until:
        with suppress(asyncio.CancelledError, TimeoutError):
            async with asyncio.timeout_at(until):
                await wait()
                return True
    return False

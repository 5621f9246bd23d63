"""The process of an episode worker: it runs episodes of one workflow, and asks the controller's process for answers.

| who waits | for | woken by |
|---|---|---|
| the process | an episode, a cancellation, the end | the controller |
| an episode | an answer | the controller |
| `arl-beat` | a byte, which it returns as a sign of life | the controller; it answers while the event loop is blocked |
"""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import logging
import math
import os
import pickle
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from arl.api.errors import ArlError, WorkerError, first_error
from arl.api.events import EPISODE, EpisodeContext, Event, KeptTokens, TokenFrame
from arl.api.settings.endpoint import EndpointConfig, entered
from arl.api.types import ModelRequest, ModelResponse
from arl.api.workflow import RolloutWorkflow
from arl.rollout.episode import EpisodeRunner
from arl.rollout.monitors import LagMonitor, collect_garbage
from arl.rollout.tasks import TaskWorkflows
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
    as_array,
    frame,
)
from arl.runtime.clocks import EpisodeClock
from arl.runtime.processes.actor import receive_message
from arl.runtime.processes.parent_watch import Watch
from arl.runtime.processes.rpc import Message, OtherTracebackError

_BLOCKED_S = 60.0
_STDERR = 2


@dataclass(frozen=True)
class _Engine:
    """The Sampler of one episode: the controller's process answers."""

    host: _Host
    episode: int

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        return await self.host.ask(self.episode, request)


class _Notes:
    """The Events of one episode: the controller's process gets them."""

    def __init__(self, pipe: Pipe, episode: int) -> None:
        self._pipe = pipe
        self._episode = episode
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()

    def emit(self, event: Event) -> None:
        if threading.get_ident() == self._thread:
            self._send(event)
            return
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._send, event)  # as from a reward that a tool's thread awaits

    def _send(self, event: Event) -> None:
        with suppress(Exception):  # a record that does not pickle must not fail the episode
            self._pipe.send(Noted(self._episode, event))

    def keep(self, tokens: KeptTokens | TokenFrame) -> None:
        raise NotImplementedError("tokens are kept in the controller's process")


class _Host:
    """Everything here belongs to the event loop."""

    def __init__(self, workflow: RolloutWorkflow, endpoint: EndpointConfig) -> None:
        self._workflow = workflow
        self._endpoint = endpoint
        named = workflow.names if isinstance(workflow, TaskWorkflows) else ("",)
        workflows = {name: workflow.of(name) if isinstance(workflow, TaskWorkflows) else workflow for name in named}
        self._runners = {name: EpisodeRunner(workflow=own, timeout_s=math.inf) for name, own in workflows.items()}
        self._episodes: dict[int, asyncio.Task[Ended]] = {}
        self._answers: dict[int, asyncio.Future[ModelResponse]] = {}
        self._numbers = itertools.count()
        self._tasks = asyncio.TaskGroup()
        self._is_over = asyncio.Event()

    async def serve(self, sock: socket.socket) -> None:
        """Run episodes until the controller closes the worker, or is gone."""
        loop = asyncio.get_running_loop()
        _, self._pipe = await loop.create_connection(lambda: Pipe(self._take), sock=sock)
        self._pipe.ended.add_done_callback(lambda _: self._is_over.set())
        logs = _Logs(loop, self._pipe)
        logging.getLogger("arl").addHandler(logs)
        closed = Closed()
        try:
            async with entered(self._workflow, self._endpoint), self._tasks:
                self._pipe.send(Ready())
                lag = self._tasks.create_task(LagMonitor(type(self._workflow).__name__).run())
                blocks = self._tasks.create_task(_watch_for_blocks(_STDERR))
                garbage = self._tasks.create_task(collect_garbage())
                await self._is_over.wait()
                for task in (lag, blocks, garbage, *self._episodes.values()):
                    task.cancel()
        except BaseException as error:  # noqa: BLE001 (the controller raises it)
            closed = _closed_by(error)
        logging.getLogger("arl").removeHandler(logs)
        self._pipe.send(closed)
        self._pipe.close()
        await self._pipe.ended

    async def ask(self, episode: int, request: ModelRequest) -> ModelResponse:
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._pipe.send(Request(episode, number, replace(request, input_ids=as_array(request.input_ids))))
        self._answers[number] = answer
        try:
            return await answer
        finally:
            if self._answers.pop(number, None) is not None:  # it was not answered
                self._pipe.send(Drop(episode, number))

    def _take(self, message: Any) -> None:
        match message:
            case Answered():
                answer = self._answers.pop(message.request, None)
                if answer is None or answer.done():
                    return
                if message.response is not None:
                    answer.set_result(message.response)
                elif message.error is not None:
                    message.error.__cause__ = OtherTracebackError(f"in the controller's process:\n{message.traceback}")
                    answer.set_exception(message.error)
            case Play():
                task = self._episodes[message.episode] = self._tasks.create_task(self._play(message))
                # Not at the end of the task: one that is cancelled at once never begins.
                task.add_done_callback(partial(self._end, message.episode))
            case Stop():
                if task := self._episodes.get(message.episode):
                    task.cancel()
            case Close():
                self._is_over.set()
            case _:
                raise TypeError(f"a worker was sent {message!r:.100}")

    def _end(self, episode: int, task: asyncio.Task[Ended]) -> None:
        """Say how it ended. The controller does not look at that if it asked for the cancellation."""
        del self._episodes[episode]
        if task.cancelled():
            ended = _failed(episode, WorkerError("the episode was cancelled in its worker, and not by the run"))
        else:
            ended = task.result()
        try:
            self._pipe.send(ended)
        except Exception as error:  # noqa: BLE001 (names and numbers in trajectories may be of users' own types)
            self._pipe.send(_failed(episode, error))

    async def _play(self, play: Play) -> Ended:
        try:
            example = pickle.loads(play.example)
        except Exception as error:  # noqa: BLE001 (unpickling runs what users wrote)
            return _failed(play.episode, error)
        EPISODE.set(EpisodeContext("", _Notes(self._pipe, play.episode)))
        clock = EpisodeClock(on_change=lambda is_still: self._pipe.send(Clocked(play.episode, is_still)))
        try:
            returned = await self._runners[play.task].attempt(_Engine(self, play.episode), example, clock)
        except ArlError:
            return Ended(play.episode, is_interrupt=True)
        return _failed(play.episode, returned) if isinstance(returned, Exception) else Ended(play.episode, returned)


def _failed(episode: int, error: Exception) -> Ended:
    return Ended(episode, failure=Failure.of(error))


def _closed_by(error: BaseException) -> Closed:
    if isinstance(error, BaseExceptionGroup):
        error = first_error(cast("BaseExceptionGroup[BaseException]", error))
    if isinstance(error, asyncio.CancelledError):
        error = WorkerError("something in it ended its event loop, such as sys.exit outside an episode")
    return Closed(Failure.of(error))


class _Logs(logging.Handler):
    """Sends arl's warnings to the controller's process, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pipe: Pipe) -> None:
        super().__init__(logging.WARNING)
        self._loop = loop
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        message = Message(logger=record.name, level=record.levelno, text=self.format(record))
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._pipe.send, Said(message))


async def _watch_for_blocks(log: int) -> None:
    """Write to this descriptor where the event loop is blocked, even if it stays so for ever."""
    try:
        while True:
            faulthandler.dump_traceback_later(_BLOCKED_S, file=log)
            await asyncio.sleep(_BLOCKED_S / 4)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _beat(sock: socket.socket) -> None:
    with suppress(OSError):
        while data := sock.recv(64):
            sock.sendall(data)


def _run(sock: socket.socket) -> None:
    try:
        sent, endpoint = receive_message(sock)
        workflow = sent.received()
    except BaseException as error:  # noqa: BLE001 (the controller raises it; also after sys.exit in a script)
        with suppress(OSError):
            sock.sendall(frame(_closed_by(error)))
        return
    asyncio.run(_Host(workflow, endpoint).serve(sock))


def main() -> None:
    descriptor, beats, parent_pid = map(int, sys.argv[1:4])
    faulthandler.enable()
    with Watch(parent_pid), socket.socket(fileno=descriptor) as sock, socket.socket(fileno=beats) as beating:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: None)  # the controller decides when it ends
        for ours in (sock, beating):
            ours.set_inheritable(False)
        threading.Thread(target=_beat, args=(beating,), name="arl-beat", daemon=True).start()
        _run(sock)
        os._exit(0)  # threads may hang in calls that nobody waits for


if __name__ == "__main__":
    main()

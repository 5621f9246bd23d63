"""Calls of /generate over a WebSocket, for arl's own client: see arl.engine.frames.

reader --call--> Inflight --> Scheduler --> Inflight --result--> outgoing --> writer
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from http import HTTPStatus
from itertools import islice

import aiohttp
import numpy as np
import orjson
from aiohttp import web

from arl.api.errors import EngineClosedError
from arl.api.types import SamplingParams
from arl.engine.frames import (
    MAX_MESSAGE_BYTES,
    MAX_NAME_BYTES,
    BrokenFrameError,
    Call,
    Cancel,
    Result,
    calls_of,
    messages_of,
)
from arl.engine.local.generate import Generation, Inflight, SettingsBody, check_job
from arl.engine.local.sequences import Job
from arl.runtime.http.bodies import RequestError, parse
from arl.runtime.http.server import ErrorShape, request_error

log = logging.getLogger(__name__)

_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A client whose machine is gone is noticed after 90 s, and its requests are aborted. The kernel asks for it: a client
whose event loop is blocked would not answer pings."""
_SHUTDOWN_S = 1.0
"""How long requests that were aborted at the server's end may take to be answered, and a client to say goodbye."""
_MAX_UNSENT = 1 << 14
"""A client that reads so few results that more wait to be sent is gone."""
_FRAMES_PER_TURN = 64
"""Frames that are taken in one turn of the event loop: a message of small ones holds a million."""
_MAX_CACHED_BYTES = 4096


class FrameServer:
    """The WebSockets of one application."""

    def __init__(self, inflight: Inflight, generation: Generation, shape: ErrorShape) -> None:
        self.inflight = inflight
        self.generation = generation
        self.shape = shape
        self._connections: set[_FrameConnection] = set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one client to its end. Pages in a browser are refused: they may open WebSockets to any address."""
        if "Origin" in request.headers:
            raise RequestError("this path is not for browsers", HTTPStatus.FORBIDDEN)
        web_socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, compress=False)
        if not web_socket.can_prepare(request):
            raise RequestError("this path takes only WebSockets")
        await web_socket.prepare(request)
        sock = request.transport.get_extra_info("socket") if request.transport is not None else None
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if (option := getattr(socket, name, None)) is not None:  # not on every system
                    sock.setsockopt(socket.IPPROTO_TCP, option, value)
        connection = _FrameConnection(self, web_socket)
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
        return web_socket

    async def close(self, app: web.Application) -> None:
        """Send the results of requests that were aborted, and end the connections."""
        async with asyncio.TaskGroup() as group:
            for connection in self._connections:
                group.create_task(connection.finish())


class _FrameConnection:
    def __init__(self, server: FrameServer, web_socket: web.WebSocketResponse) -> None:
        self._server = server
        self._socket = web_socket
        self._jobs: dict[int, Job] = {}
        """The running jobs, by the number of their call."""
        self._outgoing: list[bytes] = []
        self._has_outgoing = asyncio.Event()
        self._is_idle = asyncio.Event()

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(self._write())
                await self._read()
                writing.cancel()
        finally:
            for job in self._jobs.values():
                self._server.inflight.withdraw(job)

    async def finish(self) -> None:
        """Wait until nothing runs and all results are sent, but not for long; then end the connection."""
        try:
            async with asyncio.timeout(_SHUTDOWN_S):
                while self._jobs or self._outgoing or self._has_outgoing.is_set():
                    self._is_idle.clear()
                    await self._is_idle.wait()
        except TimeoutError:
            pass
        await self._close(aiohttp.WSCloseCode.GOING_AWAY)

    async def _close(self, code: aiohttp.WSCloseCode, reason: str = "") -> None:
        """End the connection, also if the client reads nothing or does not answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_SHUTDOWN_S):
                await self._socket.close(code=code, message=reason.encode())

    async def _read(self) -> None:
        async for message in self._socket:
            try:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    raise BrokenFrameError("it is not binary")
                await self._take(calls_of(message.data))
            except BrokenFrameError as error:
                return await self._close(aiohttp.WSCloseCode.PROTOCOL_ERROR, str(error))

    async def _take(self, frames: Iterator[Call | Cancel]) -> None:
        """Raises BrokenFrameError."""
        while turn := list(islice(frames, _FRAMES_PER_TURN)):
            if len(self._outgoing) > _MAX_UNSENT:
                raise BrokenFrameError("its results are not read")
            for frame in turn:
                if isinstance(frame, Call):
                    self._begin(frame)
                elif (job := self._jobs.pop(frame.number, None)) is not None:
                    self._server.inflight.withdraw(job)
            await asyncio.sleep(0)

    def _begin(self, call: Call) -> None:
        generation, inflight = self._server.generation, self._server.inflight
        try:
            if call.number in self._jobs:
                raise RequestError(f"the call {call.number} is under way")
            if len(call.rid) > MAX_NAME_BYTES:
                raise RequestError(f"rid must have at most {MAX_NAME_BYTES} bytes")
            body, sampling = _settings(call.settings)
            images = [generation.images.framed(image) for image in call.images]
            job = generation.job(call.rid, call.ids, body, sampling, images)
            inflight.submit(job, lambda job: self._answer(call, body, job))
            self._jobs[call.number] = job
        except Exception as error:  # noqa: BLE001 - the caller is told
            self._fail(call, error)

    def _answer(self, call: Call, body: SettingsBody, job: Job) -> None:
        self._jobs.pop(call.number, None)
        generation, scheduler = self._server.generation, self._server.inflight.scheduler
        try:
            check_job(job)
            head = {
                "finish_reason": job.finish_reason,
                "weight_version": job.versions[-1] if job.versions else scheduler.batch.weight_version,
                "weight_versions": job.version_spans(),
                "cached_tokens": job.cached_tokens,
            }
            if job.sampling.stop:
                head["text"] = generation.text(job, body.sampling_params)
            logprobs = job.kept_logprobs if job.returns_kept_ids else job.output_logprobs
            routes = job.returned_routes()
            result = Result(
                number=call.number,
                microseconds=int(1e6 * (time.monotonic() - job.began)),
                head=orjson.dumps(head),
                ids=np.array(job.output_ids, dtype=np.int32),
                logprobs=np.array(logprobs, dtype=np.float32),
                kept_ids=b"" if job.sets is None else job.sets.kept_ids().encode(),
                routes=b"" if routes is None else routes.encode(),
            )
        except Exception as error:  # noqa: BLE001 - the caller is told
            self._fail(call, error)
        else:
            self._send(result)

    def _fail(self, call: Call, error: Exception) -> None:
        failure = request_error(error, {EngineClosedError: 503})
        if failure.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("a call in frames failed", exc_info=error)
        self._send(Result(number=call.number, status=failure.status, head=orjson.dumps(self._server.shape(failure))))

    def _send(self, result: Result) -> None:
        self._outgoing.append(result.encode())
        self._has_outgoing.set()

    async def _write(self) -> None:
        while True:
            await self._has_outgoing.wait()
            results, self._outgoing = self._outgoing, []
            for message in messages_of(results):
                try:
                    await self._socket.send_bytes(message)
                except ConnectionError:
                    return  # the reader ends too
            if not self._outgoing:
                self._has_outgoing.clear()
                self._is_idle.set()


@lru_cache(maxsize=1024)
def _cached_settings(raw: bytes) -> tuple[SettingsBody, SamplingParams]:
    body = parse(SettingsBody, raw)
    return body, body.sampling_params.params()


def _settings(raw: bytes) -> tuple[SettingsBody, SamplingParams]:
    """Raises RequestError."""
    return _cached_settings(raw) if len(raw) <= _MAX_CACHED_BYTES else _cached_settings.__wrapped__(raw)

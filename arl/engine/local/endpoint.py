"""What all endpoints share: the parts they serve from, JSON and event streams, errors in SGLang's shapes, the key."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from arl.api.errors import EngineClosedError
from arl.engine.local.body import ApiError, Body, MalformedError, MalformedSamplingError
from arl.engine.local.job import Job
from arl.engine.local.protocol import Limits
from arl.engine.local.scheduler import Scheduler
from arl.engine.local.text import Text, TextError

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ErrorShape = Callable[[str, int], Mapping[str, Any]]

MAX_BODY_BYTES = 1 << 30
"""A batch of long prompts is many megabytes; aiohttp's own limit is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What every handler needs. `tokenizing` is the one thread on which texts are encoded."""

    scheduler: Scheduler
    inflight: Inflight
    text: Text
    limits: Limits
    tokenizing: ThreadPoolExecutor
    model_path: str
    served_model_name: str

    async def encode(self, encode: Callable[[], list[int]]) -> list[int]:
        """Run a tokenizer call off the event loop. Raises TextError."""
        return await asyncio.get_running_loop().run_in_executor(self.tokenizing, encode)


def json_response(content: Any, status: int = 200) -> web.Response:
    body = json.dumps(content, separators=(",", ":")).encode()
    return web.Response(body=body, status=status, content_type="application/json")


def generate_error(message: str, status: int) -> Mapping[str, Any]:
    return {"error": {"message": message}}


def control_error(message: str, status: int) -> Mapping[str, Any]:
    return {"success": False, "message": message}


def openai_error(message: str, status: int) -> Mapping[str, Any]:
    kind = "BadRequestError" if status == 400 else "InternalServerError"
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


def _explained(error: ApiError, shape: ErrorShape) -> Mapping[str, Any]:
    """A refusal in the shape that SGLang gives it: a body that is not of the right form has one of its own."""
    if isinstance(error, MalformedSamplingError):
        return {"error": error.message}
    if isinstance(error, MalformedError):
        return {**openai_error(error.message, error.status), "type": "Bad Request"}
    return shape(error.message, error.status)


def answering(handler: Handler, shape: ErrorShape) -> Handler:
    """`handler`, with its errors answered in `shape`: the one place where they are."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            return json_response(_explained(error, shape), error.status)
        except TextError as error:
            return json_response(shape(str(error), 400), 400)
        except EngineClosedError as error:
            return json_response(shape(str(error), 503), 503)
        except web.HTTPException:
            raise
        except ConnectionResetError:
            raise  # the client went away; nobody is left to answer
        except Exception as error:
            log.exception("%s failed", request.path)
            return json_response(shape(f"internal error: {error!r}", 500), 500)

    return answer


async def read_body(request: web.Request) -> Body:
    return Body.parse(await request.read())


@web.middleware
async def not_found_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPNotFound:
        return json_response({"detail": "Not Found"}, 404)
    except web.HTTPMethodNotAllowed:
        return json_response({"detail": "Method Not Allowed"}, 405)
    except web.HTTPRequestEntityTooLarge:
        return json_response(generate_error(f"the body is larger than {MAX_BODY_BYTES} bytes", 413), 413)


class EventStream:
    """Server-sent events: `data: {...}` for each event, and a last `data: [DONE]`."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )

    async def send(self, *events: Any) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
        data = "".join(f"data: {json.dumps(event, separators=(',', ':'))}\n\n" for event in events)
        await self._response.write(data.encode())

    async def end(self) -> web.StreamResponse:
        await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response


# Requests under way: the event loop's side of the scheduler.


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

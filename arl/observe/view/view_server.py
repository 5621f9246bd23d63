"""The server of `arl view`: the page's files, and the JSON API that the page reads. docs/viewing.md lists the API.

Without a key, a page of another site must not read it: requests name this machine in their Host header, which a name
that somebody points here (DNS rebinding) does not, and do not come from another site (Sec-Fetch-Site).
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from arl.api.errors import ImageError, RunFileError
from arl.api.images import kind_of
from arl.observe.events.writer import encodable
from arl.observe.view.episode_table import Row, number
from arl.observe.view.viewed_run import ViewedRun
from arl.runtime.http.bodies import RequestError
from arl.runtime.http.server import EventStream, Handler, boundary, is_loopback, require_key
from arl.runtime.threads import offload

PAGE = Path(__file__).parent / "page"
_API = "/api/"
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",
}
_FOR_EVER = "private, max-age=31536000, immutable"
_EVERY_S = 1.0
"""How often a stream looks for news."""
_QUIET = 15
"""Looks without news after which a stream says that it is alive."""


Answer = Callable[[ViewedRun, web.Request], Row]


class ViewServer:
    """The application over `runs`. api_key: what requests to the API must bear; None on loopback."""

    def __init__(self, runs: Sequence[ViewedRun], api_key: str | None = None) -> None:
        self._runs = runs
        self._is_over = asyncio.Event()
        guard = _key_for_the_api(api_key) if api_key else _only_from_here
        self.app = web.Application(
            middlewares=[
                boundary(lambda error: {"error": error.message}, {RunFileError: 404, ImageError: 404, OSError: 503}),
                guard,
            ]
        )
        self.app.on_response_prepare.append(_add_headers)
        self.app.on_shutdown.append(self._stop)
        self.app.cleanup_ctx.append(self._following)
        routes = self.app.router
        routes.add_get("/api/runs", self._list)
        one = "/api/runs/{run}"
        routes.add_get(f"{one}/episodes", self._episodes)
        routes.add_get(f"{one}/stream", self._stream)
        routes.add_get(f"{one}/images/{{digest}}", self._image)
        for path, answer in _ANSWERS.items():
            routes.add_get(f"{one}/{path}", partial(self._told, answer))
        routes.add_get("/{file:.*}", _file)

    async def _following(self, _: web.Application) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            following = [tasks.create_task(run.follow()) for run in self._runs]
            yield
            for task in following:
                task.cancel()
        for run in self._runs:
            run.close()

    async def _stop(self, _: web.Application) -> None:
        self._is_over.set()

    async def _list(self, _: web.Request) -> web.Response:
        for run in self._runs:
            await run.read_on()
        return _response(_encoded([{"run": i, **await run.ask(run.about)} for i, run in enumerate(self._runs)]))

    async def _episodes(self, request: web.Request) -> web.Response:
        run = await self._run(request)
        return _response(_encoded(await run.find(request.query)))

    async def _told(self, answer: Answer, request: web.Request) -> web.Response:
        """The response is put together on the run's thread, too."""
        run = await self._run(request)
        return _response(await run.ask(lambda: _encoded(answer(run, request))))

    async def _image(self, request: web.Request) -> web.Response:
        """A file that is the image of this digest, which therefore never changes."""
        run = await self._run(request)
        data = await offload(run.run.images.data, request.match_info["digest"])
        response = web.Response(body=data, content_type=kind_of(data))
        response.headers["Cache-Control"] = _FOR_EVER
        return response

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        run, stream = await self._run(request), EventStream(request)
        told, quiet = None, 0
        while not self._is_over.is_set():
            tick = await run.ask(run.tick)
            quiet += 1
            if tick != told:
                told, quiet = tick, 0
                await stream.send(f"data: {_encoded(tick).decode()}\n\n")
            elif quiet >= _QUIET:
                quiet = 0
                await stream.send(": nothing new\n\n")
            try:
                await asyncio.wait_for(self._is_over.wait(), _EVERY_S)
            except TimeoutError:
                await run.read_on()
        return await stream.end()

    async def _run(self, request: web.Request) -> ViewedRun:
        index = _named(request, "run")
        if index >= len(self._runs):
            raise RequestError(f"there is no run {index}: there are {len(self._runs)}, counted from 0", 404)
        await self._runs[index].read_on()
        return self._runs[index]


_ANSWERS: dict[str, Answer] = {
    "steps": lambda run, request: run.steps(number(request.query, "since")),
    "staleness": lambda run, _: run.staleness(),
    "groups/{life}/{group}": lambda run, request: run.group(_named(request, "life"), _named(request, "group")),
    "episodes/{life}/{episode}": lambda run, request: run.episode(
        _named(request, "life"), request.match_info["episode"], request.query
    ),
    "health": lambda run, _: run.health(),
}
"""What the run's thread answers, beneath /api/runs/I/."""


def _response(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json", charset="utf-8")


def _encoded(content: Any) -> bytes:
    """JSON. Numbers that are none are null; half a character, as in the name of a file, is a question mark."""
    try:
        return msgspec.json.encode(content)
    except (UnicodeEncodeError, OverflowError):
        return msgspec.json.encode(encodable(content))


def _named(request: web.Request, name: str) -> int:
    text = request.match_info[name]
    if not text.isdecimal() or len(text) > 15:
        raise RequestError(f"{name} is {text}; it must be a whole number", 404)
    return int(text)


async def _file(request: web.Request) -> web.FileResponse:
    """A file of the page's directory. aiohttp reads it off the event loop."""
    page = PAGE.resolve()
    with suppress(ValueError, OSError):  # a name that no file can have
        file = (page / (request.match_info["file"] or "index.html")).resolve()
        if file.is_relative_to(page) and file.is_file():
            return web.FileResponse(file)
    raise RequestError("Not Found", 404)


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)


def _key_for_the_api(api_key: str) -> Any:
    """The page's files hold nothing of the runs; the page asks for the key."""
    check = require_key(api_key)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await (check(request, handler) if request.path.startswith(_API) else handler(request))

    return guard


@web.middleware
async def _only_from_here(request: web.Request, handler: Handler) -> web.StreamResponse:
    host = request.headers.get("Host", "")  # its port may be another one: of a tunnel, for instance
    name = host[: host.find("]") + 1].strip("[]") if host.startswith("[") else host.partition(":")[0]
    try:
        is_here = ipaddress.ip_address(name).is_loopback
    except ValueError:
        is_here = is_loopback(name)
    if not is_here:
        raise RequestError("open this page by the address that arl view printed", 403)
    if request.path.startswith(_API) and request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        raise RequestError("another site may not read this", 403)
    return await handler(request)

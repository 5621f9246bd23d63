"""A proxy in front of a server that answers some requests wrongly, late, or not at all."""

import asyncio
import json
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import aiohttp
from aiohttp import web

ODD = {"meta_info": 3, "data": 3, "tokens": "a", "tp_size": "x", "weight_version": [], "success": "no", "output_ids": 1}
GARBAGE = (
    b"",
    b"\xff\xfe garbage",
    b"[]",
    b"{}",
    b'"text"',
    json.dumps(ODD).encode(),
    b"[" * 5000,
    b"<html>502</html>",
)


def _nan(answer: dict[str, Any], rng: random.Random) -> None:
    entry = rng.choice(answer["meta_info"]["output_token_logprobs"])
    entry[0] = rng.choice([float("nan"), float("-inf"), None, "text", 0.5])


def _version(answer: dict[str, Any], rng: random.Random) -> None:
    meta, label = answer["meta_info"], rng.choice(["999", "mixture", "another", "-3"])
    meta["weight_version"] = label
    for span in meta.get("weight_versions") or ():
        span["version"] = label


def _vocabulary(answer: dict[str, Any], rng: random.Random) -> None:
    entries = answer["meta_info"]["output_token_logprobs"]
    place, token = rng.randrange(len(entries)), rng.choice([10**6, -1, 2**63])
    entries[place][1] = token
    answer["output_ids"][place] = token


def _short(answer: dict[str, Any], rng: random.Random) -> None:
    entries = answer["meta_info"]["output_token_logprobs"]
    del entries[len(entries) // 2 :]


def _long(answer: dict[str, Any], rng: random.Random) -> None:
    for tokens in (answer["meta_info"]["output_token_logprobs"], answer["output_ids"]):
        tokens.extend(tokens * 40)


CHANGES: dict[str, Callable[[dict[str, Any], random.Random], None]] = {
    "NaN": _nan,
    "another version": _version,
    "unknown tokens": _vocabulary,
    "too few logprobs": _short,
    "too many tokens": _long,
}
"""Changes of a right answer of /generate."""
ANY_REQUEST = ("fails", "hangs", "is cut", "garbage", "its answer is lost")
KINDS = (*ANY_REQUEST, *CHANGES)


class FaultyProxy:
    """Relays to `target`. A share `rate` of requests goes wrong; `log` gets a JSON line for each of them.

    waits: until SIGUSR1 all goes well.
    """

    def __init__(
        self, *, target: str, port: int, rate: float, kinds: list[str], seed: str, log: str, waits: bool = False
    ) -> None:
        self._target = target
        self._port = port
        self._rate = rate
        self._kinds = kinds
        self._rng = random.Random(seed)
        self._log = log
        self._begun = asyncio.Event()
        if not waits:
            self._begun.set()

    async def run(self) -> None:
        """Until it is killed."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._begun.set)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as self._session:
            app = web.Application(client_max_size=1 << 30)
            app.router.add_route("*", "/{path:.*}", self._relay)
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self._port).start()
            await asyncio.Event().wait()

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        fault = self._fault(request)
        if fault == "fails" and self._rng.random() < 0.5:
            return self._failed()
        if fault == "hangs":
            await asyncio.sleep(3600)
        body = await request.read()
        try:
            async with self._session.request(
                request.method, self._target + request.path_qs, data=body, headers=self._headers(request)
            ) as told:
                content, status, kind = await told.read(), told.status, told.content_type
        except aiohttp.ClientError:
            return self._torn(request)
        if fault in CHANGES:
            content = self._changed(fault, content)
        if fault == "fails":
            return self._failed()
        if fault == "garbage":
            content = self._rng.choice(GARBAGE)
        if fault == "its answer is lost":
            return self._torn(request)
        if fault == "is cut" and content:
            return await self._cut(request, content)
        return web.Response(body=content, status=status, content_type=kind)

    def _fault(self, request: web.Request) -> str | None:
        if not self._begun.is_set() or self._rng.random() >= self._rate:
            return None
        possible = [kind for kind in self._kinds if kind in ANY_REQUEST or request.path == "/generate"]
        fault = self._rng.choice(possible) if possible else None
        if fault is not None:
            with open(self._log, "a") as file:
                file.write(json.dumps({"fault": fault, "path": request.path}) + "\n")
        return fault

    def _changed(self, fault: str, content: bytes) -> bytes:
        with suppress(ValueError, LookupError, TypeError):  # it was no answer with tokens
            answer = json.loads(content)
            CHANGES[fault](answer, self._rng)
            return json.dumps(answer).encode()
        return content

    def _failed(self) -> web.Response:
        status = self._rng.choice([429, 500, 502, 503])
        return web.json_response({"error": {"message": "the proxy says no"}}, status=status)

    async def _cut(self, request: web.Request, content: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(content))})
        await response.prepare(request)
        await response.write(content[: self._rng.randrange(len(content))])
        return self._torn(request, response)

    def _torn(self, request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return response or web.Response()

    def _headers(self, request: web.Request) -> dict[str, str]:
        return {name: value for name, value in request.headers.items() if name in ("Content-Type", "Authorization")}

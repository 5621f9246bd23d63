"""A server that answers what a test says, and remembers what it was asked."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web
from aiohttp.test_utils import TestServer

BREAK = object()
"""In the place of an answer: the connection breaks."""

Answer = Callable[[Any], "Any | Awaitable[Any]"]
"""From a request's JSON (None for a GET) to what is answered: JSON, or a (status, JSON) pair, or BREAK."""


@dataclass(eq=False)
class Served:
    """answers: by path. asked: every (path, body), in order. peers: connections that they came by. headers: of every
    answer."""

    answers: dict[str, Answer]
    asked: list[tuple[str, Any]] = field(default_factory=list)
    peers: set[Any] = field(default_factory=set)
    keys: list[str | None] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    running: int = 0
    most_running: int = 0

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._server = TestServer(app)
        await self._server.start_server()
        self.url = str(self._server.make_url("/"))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._server.close()

    def count(self, path: str) -> int:
        return sum(asked == path for asked, _ in self.asked)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw) if raw else None
        self.asked.append((request.path, body))
        self.keys.append(request.headers.get("Authorization"))
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        if request.path not in self.answers:
            return web.json_response({"detail": "Not Found"}, status=404)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            answer = self.answers[request.path](body)
            if asyncio.iscoroutine(answer):
                answer = await answer
        finally:
            self.running -= 1
        if answer is BREAK:
            request.transport.close()
            return web.Response()
        status, content = answer if isinstance(answer, tuple) else (200, answer)
        return web.json_response(content, status=status, headers=self.headers)


def language_model(logprob_of: Callable[[int], float] = lambda token: -token / 100, vocab_size: int = 500) -> Served:
    """A teacher whose logprob of a token depends on the token alone."""

    def generate(body: Any) -> Any:
        start = body["logprob_start_len"]
        entries = [[logprob_of(token), token, None] for token in body["input_ids"][start:]]
        entries[0][0] = None
        return {"output_ids": [], "meta_info": {"input_token_logprobs": entries, "output_token_logprobs": []}}

    info = {"model_path": "teacher", "is_generation": True, "vocab_size": vocab_size}
    return Served({"/model_info": lambda _: info, "/generate": generate})


def reward_model(score_of: Callable[[list[int]], float] = sum) -> Served:
    info = {"model_path": "judge", "is_generation": False, "vocab_size": 500}
    return Served(
        {"/model_info": lambda _: info, "/classify": lambda body: {"embedding": [score_of(body["input_ids"])]}}
    )

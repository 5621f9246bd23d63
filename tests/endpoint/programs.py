"""What tests of the endpoint share: a scripted engine, an episode, OpenAI's client of it, and what of it is trained."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from workflow import scripted_answers
from workflow.scripted_answers import TOKENIZER, calling, decode

from arl.api.fakes import ScriptedEngine
from arl.api.types import ModelRequest, ModelResponse, Trajectory
from arl.endpoint.proxy import OpenAIProxy
from arl.endpoint.session import EpisodeSession

ASK: list[Any] = [{"role": "user", "content": "Why?"}]
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}

CERTIFICATES = ssl.create_default_context()
"""Each client would read its own, which takes longer than the rest of a test."""


def trained(trajectory: Trajectory) -> list[str]:
    """The turns that are trained, as text without their ends."""
    turns = [trajectory.token_ids[turn.start : turn.stop] for turn in trajectory.turns]
    return [decode(turn).removesuffix("<|im_end|>") for turn in turns]


def saying(*answers: str | Exception) -> ScriptedEngine:
    """One answer after another, or an exception in its place; the last of them for ever."""
    return scripted_answers.saying(*answers, forever=True)


class Gated:
    """An engine whose calls wait, and tell that they began and were cancelled."""

    def __init__(self, answer: str | Exception = "late") -> None:
        self.began, self.cancelled = asyncio.Semaphore(0), asyncio.Semaphore(0)
        self.gate = asyncio.Event()
        self.engine = ScriptedEngine(self._script)
        self._model = saying(answer)

    async def _script(self, request: ModelRequest) -> ModelResponse:
        self.began.release()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.release()
            raise
        return await self._model.agenerate(request)


def shown(request: ModelRequest) -> str:
    return decode(request.input_ids)


CALL_ADD = calling("add", a=1, b=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An episode, and a client that was given its URL and key."""

    session: EpisodeSession
    client: AsyncOpenAI

    async def ask(self, messages: Any = ASK, **more: Any) -> Any:
        return await self.client.chat.completions.create(model="any", messages=messages, **more)


@asynccontextmanager
async def opened(engine: Any, tokenizer: Any = TOKENIZER, **options: Any) -> AsyncIterator[Opened]:
    async with (
        OpenAIProxy(tokenizer, **options) as proxy,
        proxy.episode(engine) as session,
        client_of(session) as client,
    ):
        yield Opened(session=session, client=client)


def client_of(session: EpisodeSession, **options: Any) -> AsyncOpenAI:
    http = DefaultAsyncHttpxClient(verify=CERTIFICATES)
    return AsyncOpenAI(**{"base_url": session.base_url, "api_key": session.api_key, "http_client": http, **options})


async def post(url: str, body: bytes, headers: dict[str, str]) -> tuple[int, Any]:
    """The status and the JSON of an answer, without any SDK."""
    async with aiohttp.ClientSession() as client, client.post(url, data=body, headers=headers) as response:
        return response.status, await response.json()

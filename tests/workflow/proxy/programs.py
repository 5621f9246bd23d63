"""What tests of the endpoint share: an engine that says what it is told to, an episode, and OpenAI's client of it."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from arl.api import ModelRequest, ScriptedEngine
from arl.engine.tiny import tiny_tokenizer
from arl.workflow.proxy import EpisodeSession, OpenAIProxy

TOKENIZER = tiny_tokenizer()
ASK: list[Any] = [{"role": "user", "content": "Why?"}]
CALL_ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}

_CERTIFICATES = ssl.create_default_context()
"""Each client would read its own, which takes longer than the rest of a test."""


def spelled(text: str) -> list[int]:
    return [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]


def saying(*answers: str) -> ScriptedEngine:
    """One answer after another; the last of them for ever."""
    remaining = list(answers)
    return ScriptedEngine(lambda _: spelled(remaining.pop(0) if len(remaining) > 1 else remaining[0]))


def replying(reply: Callable[[str], str]) -> ScriptedEngine:
    """What `reply` makes of the text that the model is shown."""
    return ScriptedEngine(lambda request: spelled(reply(shown(request))))


def shown(request: ModelRequest) -> str:
    return str(TOKENIZER.decode(list(request.input_ids)))


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
    http = DefaultAsyncHttpxClient(verify=_CERTIFICATES)
    return AsyncOpenAI(**{"base_url": session.base_url, "api_key": session.api_key, "http_client": http, **options})

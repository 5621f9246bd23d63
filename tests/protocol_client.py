"""A plain client of a server that speaks SGLang's protocol, for tests that look at what goes over the wire."""

import asyncio
import json
import uuid
from dataclasses import dataclass
from typing import Any

import aiohttp

DEADLINE_S = 60.0
_POLL_S = 0.01


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any

    @property
    def message(self) -> str:
        """The sentence of an error, in whichever shape it came."""
        error = self.body.get("error", self.body)
        return error if isinstance(error, str) else error["message"]


class Client:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def get(self, path: str, **options: Any) -> Answer:
        async with self.session.get(path, **options) as response:
            return await _read(response)

    async def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        async with self.session.post(path, json={} if body is None else body, **options) as response:
            return await _read(response)

    async def generate(self, **body: Any) -> Any:
        answer = await self.post("/generate", body)
        assert answer.status == 200, answer.body
        return answer.body

    async def until_gained(self, num_tokens: int) -> None:
        """Wait until each running request has so many more tokens: a request beside them has as many, and a few."""
        sampling = {"max_new_tokens": num_tokens + 5, "temperature": 0, "ignore_eos": True}
        await self.generate(input_ids=[1], sampling_params=sampling)

    async def until_running(self, count: int) -> None:
        """Wait until so many sequences are being generated."""
        await self._until("num_running_reqs", count)

    async def until_waiting(self, count: int) -> None:
        """Wait until so many sequences wait for their turn."""
        await self._until("num_waiting_reqs", count)

    async def _until(self, name: str, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            # There is nothing to be woken by in a server that is asked over HTTP.
            while (await self.get("/v1/loads")).body["loads"][0][name] != count:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)


def fresh_rid() -> str:
    """An id that no request had before."""
    return uuid.uuid4().hex


def spans(answer: Any) -> list[tuple[str, int, int]]:
    """The version spans of an answer of /generate: (label, start, end)."""
    return [(span["version"], span["start"], span["end"]) for span in answer["meta_info"]["weight_versions"]]


async def _read(response: aiohttp.ClientResponse) -> Answer:
    text = await response.text()
    is_json = response.content_type == "application/json"
    return Answer(response.status, json.loads(text) if is_json else text)

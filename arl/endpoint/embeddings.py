"""POST /v1/embeddings: passes the call on to a server that the user named. Embeddings are not trained."""

from __future__ import annotations

import aiohttp
from aiohttp import web

from arl.api.errors import ServerError
from arl.endpoint.calls import RefusedCallError
from arl.endpoint.exchange import Endpoint, Exchange, openai_error, openai_error_event

_TIMEOUT_S = 120.0


async def _answer(exchange: Exchange) -> web.StreamResponse:
    url = exchange.session.policy.embeddings
    if url is None:
        reason = "no server of embeddings is known here; name one: OpenAIProxy(..., embeddings='http://HOST:PORT/v1')"
        raise RefusedCallError(reason, status=404, code="not_found")
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as client,
            client.post(f"{url.rstrip('/')}/embeddings", json=exchange.content) as answer,
        ):
            return await exchange.respond(await answer.json(content_type=None), answer.status)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ServerError(f"the server of embeddings at {url} did not answer: {error!r}") from error


ENDPOINT = Endpoint(
    method="POST", path="/v1/embeddings", answer=_answer, error=openai_error, error_event=openai_error_event
)

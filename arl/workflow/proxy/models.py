"""GET /v1/models: the one model there is. Calls may name any."""

from __future__ import annotations

from aiohttp import web

from arl.workflow.proxy.exchange import Endpoint, Exchange
from arl.workflow.proxy.refusals import openai_error, openai_error_event

MODEL = "arl"


async def _models(exchange: Exchange) -> web.StreamResponse:
    card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "arl"}
    if (length := exchange.policy.context_length) is not None:
        card["max_model_len"] = length
    return await exchange.respond({"object": "list", "data": [card]})


MODELS_ENDPOINTS = (
    Endpoint(method="GET", path="/v1/models", answer=_models, error=openai_error, error_event=openai_error_event),
)

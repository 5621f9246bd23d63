"""Every path that the server has: each protocol is a module of its own, named here."""

from __future__ import annotations

from aiohttp import web

from arl.workflow.proxy import anthropic, chat, responses
from arl.workflow.proxy import vllm_generate as generate
from arl.workflow.proxy.calls import RefusedCallError
from arl.workflow.proxy.exchange import Endpoint, Exchange
from arl.workflow.proxy.models import MODELS_ENDPOINTS
from arl.workflow.proxy.refusals import openai_error, openai_error_event

ENDPOINTS: tuple[Endpoint, ...] = (
    *chat.ENDPOINTS,
    *responses.ENDPOINTS,
    *anthropic.ENDPOINTS,
    *generate.ENDPOINTS,
    *MODELS_ENDPOINTS,
)


async def _no_such_path(exchange: Exchange) -> web.StreamResponse:
    request = exchange.request
    known = ", ".join(f"{endpoint.method} {endpoint.path}" for endpoint in ENDPOINTS)
    raise RefusedCallError(
        f"{request.method} {request.path} is not served here; this episode has {known}", status=404, code="not_found"
    )


UNKNOWN = Endpoint(method="*", path="*", answer=_no_such_path, error=openai_error, error_event=openai_error_event)

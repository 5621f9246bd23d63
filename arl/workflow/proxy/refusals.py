"""What a program is told when its call cannot be answered: one error for whatever went wrong."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from aiohttp import web

from arl.api.errors import EngineClosedError, ModelError, PromptTooLongError, RequestTimeoutError, ServerError
from arl.workflow.proxy.calls import RefusedCallError


def refusal_of(error: Exception) -> RefusedCallError:
    """The error as a program is told of it."""
    match error:
        case RefusedCallError():
            return error
        case PromptTooLongError():
            return RefusedCallError(
                f"This model's maximum context length is exceeded: {error}",
                param="messages",
                code="context_length_exceeded",
            )
        case ModelError():
            return RefusedCallError(str(error), param="messages", code="invalid_value")
        case RequestTimeoutError():
            return RefusedCallError(str(error), status=504, code="timeout")
        case ServerError() | EngineClosedError():
            return RefusedCallError(str(error), status=503, code="engine_unavailable")
        case web.HTTPException():
            reason = error.text if error.status != HTTPStatus.REQUEST_ENTITY_TOO_LARGE else "the body is too large"
            return RefusedCallError(reason or error.reason, status=error.status)
        case _:
            return RefusedCallError(f"{type(error).__name__}: {error}", status=500, code="internal_error")


def openai_error(error: RefusedCallError) -> dict[str, Any]:
    """OpenAI's shape; its SDK raises the error that belongs to the status, with message, param and code."""
    kind = "invalid_request_error" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def openai_error_event(error: RefusedCallError) -> str:
    return f"data: {json.dumps(openai_error(error))}\n\n"

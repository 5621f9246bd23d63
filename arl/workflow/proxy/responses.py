"""POST /v1/responses: what OpenAI's Responses API asks for, as a call of the model.

Its items become the messages that chat templates take. Hosted tools, files and work in the background are OpenAI's own,
and are refused. Matters of style (`reasoning.effort`, `text.verbosity`, a tool's `strict`), which its agents ask for by
default, are accepted and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from arl.workflow.chat_template import Message, ToolSpecs
from arl.workflow.proxy.calls import Answer, ChatCall, RefusedCallError
from arl.workflow.proxy.exchange import Endpoint, Exchange, openai_error
from arl.workflow.proxy.fields import Fields, shown, wrong
from arl.workflow.proxy.policy import CallPolicy, message_of
from arl.workflow.proxy.response_items import Transcript, error_event, events_of, response_of

Stored = dict[str, Sequence[Message]]
"""What was said up to a response, by the response's id, without the instructions of the time."""

_HARMLESS = frozenset(
    ("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "user")
)
_NEUTRAL = {
    "background": (False,),
    "include": ([], ["reasoning.encrypted_content"]),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_REFUSED = {
    "context_management": "nothing is compacted here",
    "conversation": "conversations are kept by OpenAI; send their items, or previous_response_id",
    "max_tool_calls": "it counts calls of hosted tools, and there are none here",
    "moderation": "nothing is moderated here",
    "prompt": "prompt templates are kept by OpenAI; send instructions and input",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesWire:
    """A call of /v1/responses. echoed: what the response repeats of it. said: its messages but for the instructions.
    stored: where the response is kept, so that it may be continued until the episode ends; None: nowhere."""

    call: ChatCall
    streams: bool
    said: Sequence[Message]
    stored: Stored | None
    echoed: Mapping[str, Any]

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        response = response_of(answers[0], self.echoed)
        if self.stored is not None:
            self.stored[response["id"]] = (*self.said, message_of(answers[0].spoken))
        return response

    def events(self, answers: Sequence[Answer]) -> Iterable[str]:
        return events_of(self.whole(answers))


def read(fields: Fields, policy: CallPolicy, stored: Stored) -> ResponsesWire:
    """The call in a request. Raises RefusedCallError for what is wrong with it, or cannot be honoured."""
    said = (*_said_before(fields, stored), *_messages(fields))
    instructions, choice = fields.text("instructions"), _tool_choice(fields)
    tools = _tools(fields)
    call = ChatCall(
        messages=[{"role": "system", "content": instructions}, *said] if instructions else said,
        tools=tools if choice == "auto" else (),
        sampling=policy.sampling_of(
            max_new_tokens=fields.integer("max_output_tokens"),
            temperature=fields.number("temperature"),
            top_p=fields.number("top_p"),
        ),
        one_tool_call=not fields.flag("parallel_tool_calls", True),
    )
    echoed = {
        "model": fields.text("model", "arl"),
        "instructions": instructions or None,
        "previous_response_id": fields.value("previous_response_id"),
        "tools": fields.items("tools"),
        "tool_choice": choice,
        "parallel_tool_calls": not call.one_tool_call,
        "max_output_tokens": fields.integer("max_output_tokens"),
        "temperature": call.sampling.temperature,
        "top_p": call.sampling.top_p,
        "metadata": fields.value("metadata", {}),
    }
    is_stored = fields.flag("store", True)
    wire = ResponsesWire(
        call=call, streams=fields.flag("stream"), said=said, stored=stored if is_stored else None, echoed=echoed
    )
    _check_style(fields)
    Fields(fields.mapping("stream_options")).finish({"include_obfuscation"}, {})
    fields.finish(_HARMLESS, _NEUTRAL, _REFUSED)
    return wire


def _said_before(fields: Fields, stored: Stored) -> Sequence[Message]:
    previous = fields.text("previous_response_id")
    if previous and previous not in stored:
        raise RefusedCallError(
            f"Previous response with id {shown(previous)} not found: this episode has none that was stored under it",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return stored[previous] if previous else ()


def _messages(fields: Fields) -> Sequence[Message]:
    given = fields.value("input", "")
    if isinstance(given, str):
        return ({"role": "user", "content": given},)
    if not isinstance(given, list):
        raise wrong("input", given, "a string or a list of items")
    transcript = Transcript()
    for i, item in enumerate(given):
        transcript.add(f"input[{i}]", item)
    return transcript.messages


def _tools(fields: Fields) -> ToolSpecs:
    return [_tool(f"tools[{i}]", tool) for i, tool in enumerate(fields.items("tools"))]


def _tool(where: str, tool: Any) -> Mapping[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise RefusedCallError(
            f"{where} is of type {shown(kind)}; hosted tools are not here, only functions that the program runs itself",
            param=where,
            code="unsupported_value",
        )
    given = Fields(tool)
    function = {
        "name": given.text("name"),
        "description": given.text("description"),
        "parameters": given.value("parameters", {"type": "object", "properties": {}}),
    }
    given.finish({"type", "strict", "output_schema"}, {"defer_loading": (False,), "allowed_callers": (["direct"],)})
    return {"type": "function", "function": function}


def _tool_choice(fields: Fields) -> str:
    choice = fields.value("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RefusedCallError(
            f"tool_choice is {shown(choice)}; the model cannot be made to call a tool, so it must be auto or none",
            param="tool_choice",
            code="unsupported_value",
        )
    return choice


def _check_style(fields: Fields) -> None:
    """How to think and to write is for the model to know; only the form of what it writes could be asked for."""
    text = fields.mapping("text")
    kind = Fields(text).mapping("format").get("type", "text")
    if kind != "text":
        raise RefusedCallError(
            f"text.format is {shown(kind)}; what the model writes cannot be held to a form, so it must be text",
            param="text.format",
            code="unsupported_value",
        )
    Fields(text).finish({"format", "verbosity"}, {})
    Fields(fields.mapping("reasoning")).finish({"effort", "summary", "generate_summary"}, {})


async def _respond(exchange: Exchange) -> web.StreamResponse:
    return await exchange.complete(read(exchange.fields(), exchange.policy, exchange.session.stored_responses))


ENDPOINTS = (
    Endpoint(method="POST", path="/v1/responses", answer=_respond, error=openai_error, error_event=error_event),
)

"""POST /v1/responses: turns a request of OpenAI's Responses API into a call of the model.

Its items become the messages that chat templates take. The endpoint refuses hosted tools, files and background work,
because they are services of OpenAI. It accepts matters of style (`reasoning.effort`, `text.verbosity`, a tool's
`strict`) without effect, because OpenAI's agents send them by default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from pydantic import Field

from arl.web.bodies import RequestBody, parse, shown, validated
from arl.workflow.chat_template import Message
from arl.workflow.proxy.calls import CallAnswer, ChatCall, RefusedCallError, refused, wrong
from arl.workflow.proxy.exchange import Endpoint, Exchange, openai_error
from arl.workflow.proxy.policy import CallPolicy, message_of
from arl.workflow.proxy.response_items import Transcript, error_event, events_of, response_of

Stored = dict[str, Sequence[Message]]
"""Response id -> the messages up to that response, without its instructions."""


class TextStyle(RequestBody, ignored=("verbosity",)):
    format: dict[str, Any] = Field(default_factory=dict)


class NoOptions(RequestBody):
    """An object whose fields change nothing."""


class Reasoning(NoOptions, ignored=("effort", "summary", "generate_summary")): ...


class ResponseStreamOptions(NoOptions, ignored=("include_obfuscation",)): ...


class FunctionTool(
    RequestBody,
    ignored=("type", "strict", "output_schema"),
    only={"defer_loading": (False,), "allowed_callers": (["direct"],)},
):
    name: str = ""
    description: str = ""
    parameters: Any = Field(default_factory=lambda: {"type": "object", "properties": {}})


class ResponsesRequest(
    RequestBody,
    ignored=(
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
    ),
    only={
        "background": (False,),
        "include": ([], ["reasoning.encrypted_content"]),
        "service_tier": ("auto", "default"),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    },
    refused={
        "context_management": "nothing is compacted here",
        "conversation": "conversations are kept by OpenAI; send their items, or previous_response_id",
        "max_tool_calls": "it counts calls of hosted tools, and there are none here",
        "moderation": "nothing is moderated here",
        "prompt": "prompt templates are kept by OpenAI; send instructions and input",
    },
):
    """The body of a request."""

    input: Any = ""
    instructions: str = ""
    previous_response_id: str | None = None
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    model: str = "arl"
    metadata: Any = Field(default_factory=dict)
    store: bool = True
    stream: bool = False
    stream_options: ResponseStreamOptions = ResponseStreamOptions()
    text: TextStyle = TextStyle()
    reasoning: Reasoning = Reasoning()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesWire:
    """A call of /v1/responses, and the way to write its answer."""

    asked: ResponsesRequest
    call: ChatCall
    said: Sequence[Message]
    """The call's messages without the instructions."""
    stored: Stored
    """The episode's responses that a later call may continue."""

    @property
    def streams(self) -> bool:
        return self.asked.stream

    def whole(self, answers: Sequence[CallAnswer]) -> dict[str, Any]:
        response = response_of(answers[0], self._echoed())
        if self.asked.store:
            self.stored[response["id"]] = (*self.said, message_of(answers[0].spoken))
        return response

    def events(self, answers: Sequence[CallAnswer]) -> Iterable[str]:
        return events_of(self.whole(answers))

    def _echoed(self) -> Mapping[str, Any]:
        """The request's fields that the response repeats."""
        asked, sampling = self.asked, self.call.sampling
        return {
            "model": asked.model,
            "instructions": asked.instructions or None,
            "previous_response_id": asked.previous_response_id,
            "tools": asked.tools,
            "tool_choice": asked.tool_choice,
            "parallel_tool_calls": asked.parallel_tool_calls,
            "max_output_tokens": asked.max_output_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "metadata": asked.metadata,
        }


def read(raw: bytes, policy: CallPolicy, stored: Stored) -> ResponsesWire:
    """The call in a request. Raises RequestError for a field that is wrong or cannot be honoured."""
    asked = parse(ResponsesRequest, raw)
    said = (*_said_before(asked, stored), *_messages(asked.input))
    tools = [_tool(f"tools[{i}]", tool) for i, tool in enumerate(asked.tools)]
    if asked.tool_choice not in ("auto", "none"):
        reason = f"is {shown(asked.tool_choice)}; the model cannot be made to call a tool, so it must be auto or none"
        raise refused("tool_choice", reason)
    if (kind := asked.text.format.get("type", "text")) != "text":
        reason = f"is {shown(kind)}; what the model writes cannot be held to a form, so it must be text"
        raise refused("text.format", reason)
    call = ChatCall(
        messages=[{"role": "system", "content": asked.instructions}, *said] if asked.instructions else said,
        tools=tools if asked.tool_choice == "auto" else (),
        sampling=policy.sampling_of(
            max_new_tokens=asked.max_output_tokens, temperature=asked.temperature, top_p=asked.top_p
        ),
        one_tool_call=not asked.parallel_tool_calls,
    )
    return ResponsesWire(asked=asked, call=call, said=said, stored=stored)


def _said_before(asked: ResponsesRequest, stored: Stored) -> Sequence[Message]:
    previous = asked.previous_response_id
    if previous and previous not in stored:
        raise RefusedCallError(
            f"Previous response with id {shown(previous)} not found: this episode has none that was stored under it",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return stored[previous] if previous else ()


def _messages(given: Any) -> Sequence[Message]:
    if isinstance(given, str):
        return ({"role": "user", "content": given},)
    if not isinstance(given, list):
        raise wrong("input", given, "a string or a list of items")
    transcript = Transcript()
    for i, item in enumerate(given):
        transcript.add(f"input[{i}]", item)
    return transcript.messages


def _tool(where: str, tool: Any) -> Mapping[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        reason = f"is of type {shown(kind)}; hosted tools are not here, only functions that the program runs itself"
        raise refused(where, reason)
    return {"type": "function", "function": validated(FunctionTool, tool, where).model_dump()}


async def _respond(exchange: Exchange) -> web.StreamResponse:
    return await exchange.complete(read(exchange.body, exchange.policy, exchange.session.stored_responses))


ENDPOINT = Endpoint(method="POST", path="/v1/responses", answer=_respond, error=openai_error, error_event=error_event)

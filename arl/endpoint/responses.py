"""POST /v1/responses: turns a request of OpenAI's Responses API into a call of the model.

It refuses hosted tools, files and background work, which are services of OpenAI. Matters of style (`reasoning.effort`,
`text.verbosity`) have no effect: OpenAI's agents send them by default.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from pydantic import Field

from arl.api.images import Image
from arl.api.types import new_id
from arl.endpoint.calls import (
    LOW_DETAIL,
    ONLY_SAMPLED,
    Asked,
    CallAnswer,
    ChatCall,
    FunctionTool,
    RefusedCallError,
    Spoken,
    checked_arguments,
    content_of,
    openai_choice,
    sent_image,
    text_form,
    tool_call,
)
from arl.endpoint.exchange import CallBody, Exchange, completing
from arl.runtime.http.bodies import RequestBody, RequestError, refused, shown, validated, wrong
from arl.runtime.http.server import event
from arl.workflow.messages import Message


class TextFormat(RequestBody, ignored=("name", "description", "strict")):
    """The form of an answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: Any = Field(default=None, alias="schema")


class TextStyle(RequestBody, ignored=("verbosity",)):
    format: TextFormat = TextFormat()


class ResponsesTool(FunctionTool, ignored=("type", "output_schema")):
    """A tool without Chat's object around it."""


class ResponsesRequest(
    CallBody,
    ignored=(
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning", "safety_identifier",
        "stream_options", "user",
    ),
    only={
        "background": (False,),
        "include": ([], ["reasoning.encrypted_content"]),
        "service_tier": ("auto", "default"),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    },
    refused={
        "context_management": "this endpoint compacts nothing",
        "conversation": "OpenAI keeps conversations; send their items, or previous_response_id",
        "max_tool_calls": "it counts calls of hosted tools, which this endpoint does not have",
        "moderation": "this endpoint moderates nothing",
        "prompt": "OpenAI keeps prompt templates; send instructions and input",
        "background": "this endpoint answers while the program waits",
        "include": "this endpoint has no other details of an answer",
        "top_logprobs": ONLY_SAMPLED,
        "truncation": "the program decides what to leave out of a conversation",
    },
    vital=("background", "conversation", "prompt"),
):  # fmt: skip
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
    metadata: Any = Field(default_factory=dict)
    store: bool = True
    text: TextStyle = TextStyle()


_TEXTS = {"input_text", "output_text", "text"}
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def _messages(given: Any) -> list[Message]:
    """The messages that items make. Consecutive reasoning, text and function calls are one answer of the model.

    Raises BodyError, which names the place, for an item that the model cannot read.
    """
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        raise wrong("input", given, "a string or a list of items")
    messages: list[Message] = []
    answer: dict[str, Any] = {}
    """The unfinished one; empty if there is none."""

    def answer_without(*names: str) -> dict[str, Any]:
        """The unfinished answer, or a new one if that has one of these fields already."""
        nonlocal answer
        if not answer or any(answer.get(name) for name in names):
            answer = {"role": "assistant", "content": ""}
            messages.append(answer)
        return answer

    for i, item in enumerate(items):
        where = f"input[{i}]"
        match item:
            case {"type": "reasoning"}:  # another model's is encrypted or summarised, without a content
                if thoughts := _text(f"{where}.content", item.get("content") or "", {"reasoning_text"}):
                    answer_without("reasoning_content", "content", "tool_calls")["reasoning_content"] = thoughts
            case {"type": "function_call", "call_id": str(call_id), "name": str(name)}:
                arguments = checked_arguments(f"{where}.arguments", item.get("arguments"))
                answer_without().setdefault("tool_calls", []).append(tool_call(call_id, name, arguments))
            case {"type": "function_call_output", "call_id": str(call_id)}:
                output = content_of(f"{where}.output", item.get("output") or "", _seen, " ")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
                answer = {}
            case {"role": role} if item.get("type") in ("message", None):
                if not isinstance(role, str) or role not in _ROLES:
                    raise wrong(f"{where}.role", role, " or ".join(_ROLES))
                at, content = f"{where}.content", item.get("content") or ""
                if role == "assistant":
                    answer_without("content", "tool_calls")["content"] = _text(at, content, _TEXTS)
                else:
                    said = content_of(at, content, _seen, " ") if role == "user" else _text(at, content, _TEXTS)
                    messages.append({"role": _ROLES[role], "content": said})
                    answer = {}
            case _:
                known = "message (with a role), reasoning, function_call and function_call_output (with a call_id)"
                raise refused(where, f"is {shown(item)}, which is not known here; known types are {known}")
    return messages


def _seen(where: str, part: Any) -> str | Image:
    """A part of what users and tools say."""
    match part:
        case {"type": "input_image", "detail": "low"}:
            raise refused(f"{where}.detail", LOW_DETAIL)
        case {"type": "input_image", "file_id": str()}:
            raise refused(f"{where}.file_id", "is a file that OpenAI keeps; send the image itself, as image_url")
        case {"type": "input_image"}:
            return sent_image(f"{where}.image_url", part.get("image_url"))
    return _part(where, part, _TEXTS)


def _text(where: str, content: Any, kinds: Set[str]) -> str:
    return str(content_of(where, content, lambda at, part: _part(at, part, kinds), " "))


def _part(where: str, part: Any, kinds: Set[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in kinds and isinstance(text := part.get("text", ""), str):
        return text
    raise refused(where, f"is of type {shown(kind)}; the model can read {' or '.join(sorted(kinds))} here")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesWire:
    """A call of /v1/responses, and the way to write its answer."""

    asked: ResponsesRequest
    call: ChatCall
    said: Sequence[Message]
    """The call's messages without the instructions."""
    stored: dict[str, Sequence[Message]]
    """The messages up to each of the episode's responses that a later call may continue."""

    def whole(self, answers: Sequence[CallAnswer]) -> dict[str, Any]:
        asked, answer = self.asked, answers[0]
        is_whole = answer.spoken.finish_reason != "length"
        n, m = answer.num_prompt_tokens, len(answer.response.output_ids)
        status = "completed" if is_whole else "incomplete"
        response = {
            "id": f"resp_{new_id()}",
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": list(_items(answer.spoken, status)),
            "truncation": "disabled",
            "usage": {
                "input_tokens": n,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": m,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": n + m,
            },
            "model": asked.model,
            "instructions": asked.instructions or None,
            "previous_response_id": asked.previous_response_id,
            "tools": asked.tools,
            "tool_choice": asked.tool_choice,
            "parallel_tool_calls": asked.parallel_tool_calls,
            "max_output_tokens": asked.max_output_tokens,
            "temperature": self.call.sampling.temperature,
            "top_p": self.call.sampling.top_p,
            "metadata": asked.metadata,
            "text": {"format": asked.text.format.model_dump(by_alias=True, exclude_none=True)},
            **answer.spoken.faults,
        }
        if asked.store:
            self.stored[response["id"]] = (*self.said, answer.spoken.message)
        return response

    def events(self, answers: Sequence[CallAnswer]) -> Iterable[str]:
        response, numbers = self.whole(answers), count()
        begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        yield _event(numbers, "response.created", response=begun)
        yield _event(numbers, "response.in_progress", response=begun)
        for index, item in enumerate(response["output"]):
            for kind, fields in _item_events(item):
                yield _event(numbers, kind, output_index=index, **fields)
        yield _event(numbers, f"response.{response['status']}", response=response)


def _items(spoken: Spoken, status: str) -> Iterator[dict[str, Any]]:
    """Items of thinking, text and calls. Without a call there is always a message, even an empty one."""
    if spoken.reasoning:
        thoughts = [{"type": "reasoning_text", "text": spoken.reasoning}]
        yield {"id": f"rs_{new_id()}", "type": "reasoning", "summary": [], "content": thoughts, "status": status}
    if spoken.content or not spoken.tool_calls:
        said = [{"type": "output_text", "text": spoken.content, "annotations": [], "logprobs": []}]
        yield {"id": f"msg_{new_id()}", "type": "message", "role": "assistant", "content": said, "status": status}
    for call in spoken.tool_calls:
        yield {
            "id": f"fc_{new_id()}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }


def _item_events(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    where: dict[str, Any] = {"item_id": item["id"]}
    if item["type"] == "function_call":
        yield "response.output_item.added", {"item": {**item, "arguments": "", "status": "in_progress"}}
        yield "response.function_call_arguments.delta", {**where, "delta": item["arguments"]}
        called = {"name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", {**where, **called}
    else:
        (part,) = item["content"]
        where |= {"content_index": 0}
        more = {"logprobs": []} if "logprobs" in part else {}
        yield "response.output_item.added", {"item": {**item, "content": [], "status": "in_progress"}}
        yield "response.content_part.added", {**where, "part": {**part, "text": ""}}
        yield f"response.{part['type']}.delta", {**where, **more, "delta": part["text"]}
        yield f"response.{part['type']}.done", {**where, **more, "text": part["text"]}
        yield "response.content_part.done", {**where, "part": part}
    yield "response.output_item.done", {"item": item}


def _error_event(error: RequestError) -> str:
    named = {name: getattr(error, name, None) for name in ("code", "param")}
    return _event(count(), "error", message=error.message, **named)


def _event(numbers: Iterator[int], kind: str, **fields: Any) -> str:
    return event({"type": kind, "sequence_number": next(numbers), **fields}, kind)


def _read(exchange: Exchange) -> ResponsesWire:
    asked, stored = exchange.parsed(ResponsesRequest), exchange.session.stored_responses
    previous = asked.previous_response_id
    if previous and previous not in stored:
        raise RefusedCallError(
            f"Previous response with id {shown(previous)} not found: this episode has none that was stored under it",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    said = (*(stored[previous] if previous else ()), *_messages(asked.input))
    call = exchange.session.policy.call(
        [{"role": "system", "content": asked.instructions}, *said] if asked.instructions else said,
        [_tool(f"tools[{i}]", tool) for i, tool in enumerate(asked.tools)],
        Asked(
            output=text_form("text.format.schema", asked.text.format.type, asked.text.format.json_schema),
            where="text.format",
            choice=openai_choice(asked.tool_choice),
            only_one=not asked.parallel_tool_calls,
        ),
        max_new_tokens=asked.max_output_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
    )
    return ResponsesWire(asked=asked, call=call, said=said, stored=stored)


def _tool(where: str, tool: Any) -> FunctionTool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise refused(where, f"is of type {shown(kind)}; there are no hosted tools: send the program's own functions")
    return validated(ResponsesTool, tool, where)


ENDPOINT = completing("/v1/responses", _read, said="input", error_event=_error_event)

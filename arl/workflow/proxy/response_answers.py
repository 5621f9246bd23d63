"""A response of the Responses API: its items, whole or one event after another."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any

from arl.api.types import new_id
from arl.workflow.proxy.calls import Answer, RefusedCallError, Spoken
from arl.workflow.proxy.chat import pieces


def response_of(answer: Answer, echoed: Mapping[str, Any]) -> dict[str, Any]:
    """The response as an object. echoed: what it repeats of the request."""
    is_whole = answer.spoken.finish_reason != "length"
    n, m = answer.num_prompt_tokens, len(answer.response.output_ids)
    return {
        "id": f"resp_{new_id()}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed" if is_whole else "incomplete",
        "error": None,
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "output": list(_items(answer.spoken, "completed" if is_whole else "incomplete")),
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "usage": {
            "input_tokens": n,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": m,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": n + m,
        },
        **echoed,
    }


def _items(spoken: Spoken, status: str) -> Iterator[dict[str, Any]]:
    """What was thought, said and called. There is a message wherever nothing is called, be it empty."""
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


def events_of(response: Mapping[str, Any]) -> Iterable[str]:
    """The response as a stream, when the model has answered."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    numbers = count()
    yield _event(numbers, "response.created", response=begun)
    yield _event(numbers, "response.in_progress", response=begun)
    for index, item in enumerate(response["output"]):
        for kind, fields in _item_events(item):
            yield _event(numbers, kind, output_index=index, **fields)
    yield _event(numbers, f"response.{response['status']}", response=response)


def _item_events(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    where = {"item_id": item["id"]}
    if item["type"] == "function_call":
        yield "response.output_item.added", {"item": {**item, "arguments": "", "status": "in_progress"}}
        for piece in pieces(item["arguments"]):
            yield "response.function_call_arguments.delta", {**where, "delta": piece}
        called = {"name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", {**where, **called}
    else:
        yield "response.output_item.added", {"item": {**item, "content": [], "status": "in_progress"}}
        yield from _part_events({**where, "content_index": 0}, item["content"][0])
    yield "response.output_item.done", {"item": item}


def _part_events(where: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    text = f"response.{part['type']}"
    more = {"logprobs": []} if "logprobs" in part else {}
    yield "response.content_part.added", {**where, "part": {**part, "text": ""}}
    for piece in pieces(part["text"]):
        yield f"{text}.delta", {**where, **more, "delta": piece}
    yield f"{text}.done", {**where, **more, "text": part["text"]}
    yield "response.content_part.done", {**where, "part": part}


def error_event(error: RefusedCallError) -> str:
    return _event(count(), "error", code=error.code, message=error.message, param=error.param)


def _event(numbers: Iterator[int], kind: str, **fields: Any) -> str:
    data = {"type": kind, "sequence_number": next(numbers), **fields}
    return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"

"""The items of the Responses API: reads them as messages, and writes answers as items, whole or event by event."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import count
from typing import Any

from arl.api.types import new_id
from arl.web.bodies import RequestBody, RequestError, shown, validated
from arl.web.server import event
from arl.workflow.chat_template import Message
from arl.workflow.proxy.calls import CallAnswer, Spoken, refused, wrong
from arl.workflow.proxy.chat import pieces

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


class Item(RequestBody, takes_others=True):
    """The fields that any kind of item may have."""

    type: str = "message"
    role: str = ""
    content: Any = ""
    name: str = ""
    arguments: str = "{}"
    call_id: str = ""
    output: Any = ""


class Transcript:
    """Messages made of items. Consecutive reasoning, text and function calls are one answer of the model."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._answer: dict[str, Any] | None = None

    def add(self, where: str, given: Any) -> None:
        """Raises BodyError, which names `where`, for an item that the model cannot read."""
        item = validated(Item, given, where)
        match item.type:
            case "message":
                self._add_message(where, item)
            case "reasoning":
                self._add_reasoning(where, item)
            case "function_call":
                self._add_call(item)
            case "function_call_output":
                output = _text(f"{where}.output", item.output, {"input_text"})
                self._add({"role": "tool", "tool_call_id": item.call_id, "content": output})
            case kind:
                known = "message, reasoning, function_call and function_call_output"
                raise refused(where, f"is of type {shown(kind)}, which is not known here; there are {known}")

    def _add_message(self, where: str, item: Item) -> None:
        role = _ROLES.get(item.role)
        if role is None:
            raise wrong(f"{where}.role", item.role, " or ".join(_ROLES))
        text = _text(f"{where}.content", item.content, {"input_text", "output_text", "text"})
        if role == "assistant":
            self._answer_without("content", "tool_calls")["content"] = text
        else:
            self._add({"role": role, "content": text})

    def _add_reasoning(self, where: str, item: Item) -> None:
        """Thinking that this server sent. Another model's thinking is encrypted or summarised, and left out."""
        thoughts = _text(f"{where}.content", item.content, {"reasoning_text"})
        if thoughts:
            self._answer_without("reasoning_content", "content", "tool_calls")["reasoning_content"] = thoughts

    def _add_call(self, item: Item) -> None:
        calls = self._answer_without().setdefault("tool_calls", [])
        function = {"name": item.name, "arguments": item.arguments}
        calls.append({"id": item.call_id, "type": "function", "function": function})

    def _add(self, message: Message) -> None:
        self._answer = None
        self.messages.append(message)

    def _answer_without(self, *names: str) -> dict[str, Any]:
        """The unfinished answer, or a new one if that has one of these fields already."""
        if self._answer is None or any(self._answer.get(name) for name in names):
            self._answer = {"role": "assistant", "content": ""}
            self.messages.append(self._answer)
        return self._answer


def _text(where: str, content: Any, kinds: Set[str]) -> str:
    """A string, or parts of these kinds joined by spaces."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, content, "a string or a list of parts")
    return " ".join(_part(f"{where}[{i}]", part, kinds) for i, part in enumerate(content))


def _part(where: str, part: Any, kinds: Set[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in kinds and isinstance(text := part.get("text", ""), str):
        return text
    raise refused(where, f"is of type {shown(kind)}; the model takes text alone, as {' or '.join(sorted(kinds))}")


def response_of(answer: CallAnswer, echoed: Mapping[str, Any]) -> dict[str, Any]:
    """The response as an object. echoed: the request's fields that it repeats."""
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


def events_of(response: Mapping[str, Any]) -> Iterable[str]:
    """The response as a stream, after the model has answered."""
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


def error_event(error: RequestError) -> str:
    named = {name: getattr(error, name, None) for name in ("code", "param")}
    return _event(count(), "error", message=error.message, **named)


def _event(numbers: Iterator[int], kind: str, **fields: Any) -> str:
    return event({"type": kind, "sequence_number": next(numbers), **fields}, kind)

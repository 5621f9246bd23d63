"""POST /v1/messages: Anthropic's Messages API, as a call of the model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arl.api.types import new_id
from arl.workflow.chat_template import Message, ToolSpecs
from arl.workflow.proxy.calls import Answer, ChatCall, RefusedCallError
from arl.workflow.proxy.chat import pieces
from arl.workflow.proxy.exchange import completing
from arl.workflow.proxy.fields import Fields, shown, wrong
from arl.workflow.proxy.policy import CallPolicy

# Anthropic's messages, made of content blocks, as chat templates take messages.


HARMLESS = frozenset(("cache_control",))
"""What any block, tool or request may have, and what changes no answer."""


def messages_of(fields: Fields) -> list[Message]:
    """`system` and `messages`. Raises RefusedCallError for what the model cannot be shown."""
    system = text_of("system", fields.value("system", ""))
    made: list[Message] = [{"role": "system", "content": system}] if system else []
    given = fields.items("messages")
    if not given:
        raise RefusedCallError("messages is empty; it must be a list of messages", param="messages")
    for i, message in enumerate(given):
        made += _messages(f"messages[{i}]", message)
    if made[-1]["role"] == "assistant":
        raise RefusedCallError(
            "the last message is the assistant's; the beginning of an answer cannot be given here, so end with the "
            "user's",
            param="messages",
            code="unsupported_value",
        )
    return made


def _messages(where: str, message: Any) -> Iterator[Message]:
    if not isinstance(message, dict):
        raise wrong(where, message, "an object with a role and a content")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise wrong(f"{where}.content", content, "a string or a list of blocks")
    match message.get("role"):
        case "user":
            yield from _users(f"{where}.content", blocks)
        case "assistant":
            yield _assistants(f"{where}.content", blocks)
        case "system":
            yield {"role": "system", "content": text_of(f"{where}.content", blocks)}
        case role:
            raise wrong(f"{where}.role", role, "user or assistant")


def _users(where: str, blocks: list[Any]) -> Iterator[Message]:
    """Results of tools, each a message, and then what the user says beside them."""
    said: list[str] = []
    for i, block in enumerate(blocks):
        fields, kind = _block(f"{where}[{i}]", block)
        if kind == "tool_result":
            yield _result(f"{where}[{i}]", fields)
        elif kind == "text":
            said.append(fields.text("text"))
        else:
            raise _unknown(f"{where}[{i}]", kind, "text and tool_result")
        fields.finish(HARMLESS, {"citations": ({"enabled": False},)})
    if said or not blocks:
        yield {"role": "user", "content": " ".join(said)}


def _result(where: str, fields: Fields) -> Message:
    content = text_of(f"{where}.content", fields.value("content", ""))
    if fields.flag("is_error") and not content.startswith("error"):
        content = f"error: {content}"
    return {"role": "tool", "tool_call_id": fields.text("tool_use_id"), "content": content}


def _assistants(where: str, blocks: list[Any]) -> Message:
    """What the model thought, said and called. Thinking that was redacted cannot be shown to it again."""
    said: list[str] = []
    message: dict[str, Any] = {"role": "assistant"}
    for i, block in enumerate(blocks):
        fields, kind = _block(f"{where}[{i}]", block)
        match kind:
            case "text":
                said.append(fields.text("text"))
            case "thinking":
                message["reasoning_content"] = fields.text("thinking")
            case "tool_use":
                message.setdefault("tool_calls", []).append(_call(fields))
            case _:
                raise _unknown(f"{where}[{i}]", kind, "text, thinking and tool_use")
        fields.finish(HARMLESS | {"signature", "citations", "caller"}, {})
    return {**message, "content": " ".join(said)}


def _call(fields: Fields) -> Message:
    function = {"name": fields.text("name"), "arguments": json.dumps(fields.mapping("input"), ensure_ascii=False)}
    return {"id": fields.text("id"), "type": "function", "function": function}


def text_of(where: str, content: Any) -> str:
    """A string, or blocks of text with a space between two."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, content, "a string or a list of text blocks")
    texts: list[str] = []
    for i, block in enumerate(content):
        fields, kind = _block(f"{where}[{i}]", block)
        if kind != "text":
            raise _unknown(f"{where}[{i}]", kind, "text alone")
        texts.append(fields.text("text"))
    return " ".join(texts)


def _block(where: str, block: Any) -> tuple[Fields, str]:
    if not isinstance(block, dict):
        raise wrong(where, block, "a block: an object with a type")
    fields = Fields(block)
    return fields, fields.text("type")


def _unknown(where: str, kind: str, known: str) -> RefusedCallError:
    return RefusedCallError(
        f"{where} is of type {shown(kind)}; the model can be shown {known}", param=where, code="unsupported_value"
    )


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
_NEUTRAL = {"service_tier": ("auto", "standard_only"), "speed": ("standard",)}
_REFUSED = {
    "container": "code is not run here",
    "context_management": "nothing is compacted here",
    "mcp_servers": "MCP servers are the program's to call",
    "output_config": "what the model writes cannot be held to a form",
    "output_format": "what the model writes cannot be held to a form",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesWire:
    """A call of /v1/messages. shows_thinking: whether what was thought is a block of the answer."""

    call: ChatCall
    streams: bool
    model: str
    shows_thinking: bool

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        answer = answers[0]
        stop_sequence = self._stop_sequence(answer)
        reason = "stop_sequence" if stop_sequence else _STOP_REASONS[answer.spoken.finish_reason]
        return {
            "id": f"msg_{new_id()}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(self._blocks(answer)),
            "stop_reason": reason,
            "stop_sequence": stop_sequence,
            "usage": {
                "input_tokens": answer.num_prompt_tokens,
                "output_tokens": len(answer.response.output_ids),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
            },
        }

    def _blocks(self, answer: Answer) -> Iterator[dict[str, Any]]:
        spoken = answer.spoken
        if spoken.reasoning and self.shows_thinking:
            yield {"type": "thinking", "thinking": spoken.reasoning, "signature": ""}
        if spoken.content or not spoken.tool_calls:
            yield {"type": "text", "text": spoken.content}
        for call in spoken.tool_calls:
            yield {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}

    def _stop_sequence(self, answer: Answer) -> str | None:
        """The one that ended the answer."""
        if answer.spoken.finish_reason != "stop":
            return None
        text = answer.turn.text
        found = [(text.find(stop), stop) for stop in self.call.sampling.stop if stop in text]
        return min(found)[1] if found else None

    def events(self, answers: Sequence[Answer]) -> Iterable[str]:
        message = self.whole(answers)
        ending = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        begun = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
        begun["usage"] = {**message["usage"], "output_tokens": 0}
        yield _event("message_start", message=begun)
        yield _event("ping")
        for index, block in enumerate(message["content"]):
            opened, deltas = _opened(block)
            yield _event("content_block_start", index=index, content_block=opened)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=ending, usage=message["usage"])
        yield _event("message_stop")


def _opened(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and what is added to it."""
    match block["type"]:
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
        case "thinking":
            thoughts = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
            return {**block, "thinking": ""}, [*thoughts, {"type": "signature_delta", "signature": ""}]
        case _:
            given = json.dumps(block["input"], ensure_ascii=False)
            parts = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(given)]
            return {**block, "input": {}}, parts


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields}, separators=(',', ':'))}\n\n"


def read(fields: Fields, policy: CallPolicy) -> MessagesWire:
    """The call in a request. Raises RefusedCallError for what is wrong with it, or cannot be honoured."""
    choice = Fields(fields.mapping("tool_choice"))
    tools = _tools(fields)
    max_tokens = fields.integer("max_tokens")
    if max_tokens is None:
        raise RefusedCallError("max_tokens: Field required", param="max_tokens", code="invalid_value")
    call = ChatCall(
        messages=messages_of(fields),
        tools=tools if _may_call(choice) else (),
        sampling=policy.sampling_of(
            max_new_tokens=max_tokens,
            temperature=fields.number("temperature"),
            top_p=fields.number("top_p"),
            top_k=fields.integer("top_k"),
            stop=fields.strings("stop_sequences") or None,
        ),
        one_tool_call=choice.flag("disable_parallel_tool_use"),
    )
    wire = MessagesWire(
        call=call,
        streams=fields.flag("stream"),
        model=fields.text("model", "arl"),
        shows_thinking=_shows_thinking(fields),
    )
    choice.finish(frozenset(), {})
    fields.finish(HARMLESS | {"metadata"}, _NEUTRAL, _REFUSED)
    return wire


def _tools(fields: Fields) -> ToolSpecs:
    return [_tool(f"tools[{i}]", tool) for i, tool in enumerate(fields.items("tools"))]


def _tool(where: str, tool: Any) -> Mapping[str, Any]:
    if not isinstance(tool, dict):
        raise wrong(where, tool, "a tool: an object with a name and an input_schema")
    given = Fields(tool)
    if (kind := given.text("type", "custom")) != "custom":
        raise RefusedCallError(
            f"{where} is of type {shown(kind)}; Anthropic's own tools are not here, only those that the program runs "
            "itself, with an input_schema",
            param=where,
            code="unsupported_value",
        )
    function = {
        "name": given.text("name"),
        "description": given.text("description"),
        "parameters": given.mapping("input_schema"),
    }
    given.finish(
        HARMLESS | {"strict", "eager_input_streaming", "input_examples"},
        {"defer_loading": (False,), "allowed_callers": (["direct"],)},
    )
    return {"type": "function", "function": function}


def _may_call(choice: Fields) -> bool:
    kind = choice.text("type", "auto")
    if kind not in ("auto", "none"):
        raise RefusedCallError(
            f"tool_choice is {shown(kind)}; a call cannot be forced here, so it must be auto or none",
            param="tool_choice",
            code="unsupported_value",
        )
    return kind == "auto"


def _shows_thinking(fields: Fields) -> bool:
    """Whether the model thinks is its chat template's matter; what can be asked for is to be told."""
    thinking = Fields(fields.mapping("thinking"))
    kind = thinking.text("type", "disabled")
    if kind not in ("adaptive", "disabled"):
        raise RefusedCallError(
            f"thinking is {shown(kind)}; the model cannot be held to a budget of thought, so it must be adaptive, to "
            "be told what it thinks, or disabled",
            param="thinking",
            code="unsupported_value",
        )
    thinking.finish(frozenset(), {"display": ("summarized",)})
    return kind == "adaptive"


def error_of(error: RefusedCallError) -> dict[str, Any]:
    """Anthropic's shape; its SDK raises the error that belongs to the status."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_event(error: RefusedCallError) -> str:
    return _event("error", error=error_of(error)["error"])


ENDPOINTS = (completing("/v1/messages", read, error_of, error_event),)

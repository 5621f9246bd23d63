"""POST /v1/messages: turns a request of Anthropic's Messages API into a call of the model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import Field

from arl.api.types import new_id
from arl.web.bodies import BodyError, RequestBody, RequestError, Strings, parse, shown, validated
from arl.web.server import event
from arl.workflow.messages import Message
from arl.workflow.proxy.calls import CallAnswer, ChatCall, joined, pieces, refused, tool_call, wrong
from arl.workflow.proxy.exchange import CallBody, Exchange, completing

_HARMLESS = ("cache_control",)
"""Fields that any block, tool or request may have without effect on the answer."""


class ContentBlock(RequestBody, ignored=(*_HARMLESS, "type", "signature", "citations", "caller")):
    """A content block."""


class TextBlock(ContentBlock):
    text: str = ""


class SaidBlock(TextBlock, ignored=(*_HARMLESS, "type"), only={"citations": ({"enabled": False},)}):
    """The user's text."""


class ResultBlock(ContentBlock, ignored=(*_HARMLESS, "type"), only={"citations": ({"enabled": False},)}):
    tool_use_id: str = ""
    content: Any = ""
    is_error: bool = False


class ThinkingBlock(ContentBlock):
    thinking: str = ""


class CallBlock(ContentBlock):
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)


B = TypeVar("B", bound=ContentBlock)


class CustomTool(
    RequestBody,
    ignored=(*_HARMLESS, "type", "strict", "eager_input_streaming", "input_examples"),
    only={"defer_loading": (False,), "allowed_callers": (["direct"],)},
):
    name: str = ""
    description: str = ""
    input_schema: dict[str, Any] = Field(default_factory=dict)


class ToolChoice(RequestBody):
    type: str = "auto"
    disable_parallel_tool_use: bool = False


class Thinking(RequestBody, only={"display": ("summarized",)}, ignored=("budget_tokens",)):
    type: str = "disabled"


class MessagesRequest(
    CallBody,
    ignored=(*_HARMLESS, "metadata"),
    only={"service_tier": ("auto", "standard_only"), "speed": ("standard",)},
    refused={
        "container": "this endpoint runs no code",
        "context_management": "this endpoint compacts nothing",
        "mcp_servers": "the program calls MCP servers itself",
        "output_config": "the model's output cannot be constrained here",
        "output_format": "the model's output cannot be constrained here",
    },
):
    """The body of a request."""

    messages: list[Any]
    max_tokens: int
    system: Any = ""
    tools: list[Any] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Strings = ()
    thinking: Thinking = Thinking()


def _messages(asked: MessagesRequest) -> list[Message]:
    system = _text("system", asked.system)
    made: list[Message] = [{"role": "system", "content": system}] if system else []
    if not asked.messages:
        raise BodyError("messages is empty; it must be a list of messages", param="messages")
    for i, message in enumerate(asked.messages):
        made += _message(f"messages[{i}]", message)
    if made[-1]["role"] == "assistant":
        reason = "end with an assistant's message, and an answer cannot be prefilled here; end with a user's message"
        raise refused("messages", reason)
    return made


def _message(where: str, message: Any) -> Iterator[Message]:
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
            yield {"role": "system", "content": _text(f"{where}.content", blocks)}
        case role:
            raise wrong(f"{where}.role", role, "user or assistant")


def _users(where: str, blocks: list[Any]) -> Iterator[Message]:
    said: list[str] = []
    for i, given in enumerate(blocks):
        match _block(f"{where}[{i}]", given, {"text": SaidBlock, "tool_result": ResultBlock}):
            case ResultBlock() as result:
                content = _text(f"{where}[{i}].content", result.content)
                if result.is_error and not content.startswith("error"):
                    content = f"error: {content}"
                yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": content}
            case SaidBlock() as block:
                said.append(block.text)
    if said or not blocks:
        yield {"role": "user", "content": " ".join(said)}


def _assistants(where: str, blocks: list[Any]) -> Message:
    """The model's thinking, text and tool calls. Redacted thinking cannot be shown to it again."""
    said: list[str] = []
    message: dict[str, Any] = {"role": "assistant"}
    for i, given in enumerate(blocks):
        match _block(f"{where}[{i}]", given, {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": CallBlock}):
            case TextBlock() as block:
                said.append(block.text)
            case ThinkingBlock() as block:
                message["reasoning_content"] = block.thinking
            case CallBlock() as block:
                call = tool_call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
                message.setdefault("tool_calls", []).append(call)
    return {**message, "content": " ".join(said)}


def _text(where: str, content: Any) -> str:
    return joined(where, content, lambda at, block: _block(at, block, {"text": TextBlock}).text, " ")


def _block(where: str, given: Any, kinds: Mapping[str, type[B]]) -> B:
    if not isinstance(given, dict):
        raise wrong(where, given, "a block: an object with a type")
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise refused(where, f"is of type {shown(kind)}; the model can read {' and '.join(kinds)}")
    return validated(kinds[kind], given, where)


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesWire:
    """A call of /v1/messages, and the way to write its answer."""

    asked: MessagesRequest
    call: ChatCall

    def whole(self, answers: Sequence[CallAnswer]) -> dict[str, Any]:
        answer = answers[0]
        stop_sequence = self._stop_sequence(answer)
        reason = "stop_sequence" if stop_sequence else _STOP_REASONS[answer.spoken.finish_reason]
        return {
            "id": f"msg_{new_id()}",
            "type": "message",
            "role": "assistant",
            "model": self.asked.model,
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

    def _blocks(self, answer: CallAnswer) -> Iterator[dict[str, Any]]:
        spoken = answer.spoken
        if spoken.reasoning and self.asked.thinking.type == "adaptive":
            yield {"type": "thinking", "thinking": spoken.reasoning, "signature": ""}
        if spoken.content or not spoken.tool_calls:
            yield {"type": "text", "text": spoken.content}
        for call in spoken.tool_calls:
            yield {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}

    def _stop_sequence(self, answer: CallAnswer) -> str | None:
        if answer.spoken.finish_reason != "stop":
            return None
        text = answer.turn.text
        found = [(text.find(stop), stop) for stop in self.call.sampling.stop if stop in text]
        return min(found)[1] if found else None

    def events(self, answers: Sequence[CallAnswer]) -> Iterable[str]:
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
    """The empty block that opens a stream, and the deltas that fill it."""
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
    return event({"type": kind, **fields}, kind)


def read(exchange: Exchange) -> MessagesWire:
    asked = parse(MessagesRequest, exchange.body)
    if (kind := asked.thinking.type) not in ("adaptive", "disabled"):
        raise refused(
            "thinking", f"is {shown(kind)}; the length of thinking cannot be limited: say adaptive or disabled"
        )
    call = exchange.session.policy.call(
        _messages(asked),
        [_tool(f"tools[{i}]", tool) for i, tool in enumerate(asked.tools)],
        asked.tool_choice.type,
        one_tool_call=asked.tool_choice.disable_parallel_tool_use,
        max_new_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        stop=tuple(asked.stop_sequences) or None,
    )
    return MessagesWire(asked=asked, call=call)


def _tool(where: str, tool: Any) -> Mapping[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in (None, "custom"):
        raise refused(
            where, f"is of type {shown(kind)}; Anthropic's own tools are not available; send tools with an input_schema"
        )
    given = validated(CustomTool, tool, where)
    function = {"name": given.name, "description": given.description, "parameters": given.input_schema}
    return {"type": "function", "function": function}


def error_of(error: RequestError) -> dict[str, Any]:
    """The error in Anthropic's shape; its SDK chooses the exception by the status."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_event(error: RequestError) -> str:
    return _event("error", error=error_of(error)["error"])


ENDPOINT = completing("/v1/messages", read, error_of, error_event)

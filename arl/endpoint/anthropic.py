"""POST /v1/messages: turns a request of Anthropic's Messages API into a call of the model, or counts its tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aiohttp import web
from pydantic import Field

from arl.api.images import Image
from arl.api.types import new_id
from arl.endpoint.calls import (
    MAX_SEED,
    Asked,
    CallAnswer,
    ChatCall,
    Count,
    FunctionTool,
    ToolChoice,
    checked_arguments,
    content_of,
    content_of_parts,
    json_schema,
    one_of,
    sent_image,
    tool_call,
)
from arl.endpoint.exchange import CallBody, Endpoint, Exchange, completing
from arl.runtime.http.bodies import BodyError, RequestBody, RequestError, Strings, refused, shown, validated, wrong
from arl.runtime.http.server import event
from arl.workflow.messages import Message, text_part


class CustomTool(FunctionTool, ignored=("type", "cache_control", "eager_input_streaming", "input_examples")):
    parameters: dict[str, Any] = Field(default_factory=dict, alias="input_schema")


class MessagesChoice(RequestBody):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(RequestBody, only={"display": ("summarized",)}):
    type: Literal["adaptive", "disabled", "enabled"] = "disabled"
    budget_tokens: Count | None = None


class OutputFormat(RequestBody):
    """The form of an answer's text."""

    type: Literal["json_schema"] = "json_schema"
    json_schema: Any = Field(default=None, alias="schema")


class OutputConfig(RequestBody, ignored=("effort",)):
    format: OutputFormat | None = None


class MessagesRequest(
    CallBody,
    ignored=("cache_control", "metadata"),
    only={"service_tier": ("auto", "standard_only"), "speed": ("standard",)},
    refused={
        "container": "this endpoint runs no code",
        "context_management": "this endpoint compacts nothing",
        "mcp_servers": "the program calls MCP servers itself",
    },
    vital=("mcp_servers",),
):
    """The body of a request."""

    messages: list[Any]
    max_tokens: Count
    system: Any = ""
    tools: list[Any] = Field(default_factory=list)
    tool_choice: MessagesChoice = MessagesChoice()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Strings = ()
    thinking: Thinking = Thinking()
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None


def _messages(asked: MessagesRequest) -> list[Message]:
    """The conversation. If the last message is an assistant's, the model continues it."""
    system = _text("system", asked.system)
    made: list[Message] = [{"role": "system", "content": system}] if system else []
    if not asked.messages:
        raise BodyError("messages is empty; it must be a list of messages", param="messages")
    for i, message in enumerate(asked.messages):
        where = f"messages[{i}].content"
        match message:
            case {"role": "user", "content": str() | list() as content}:
                made += _users(where, content)
            case {"role": "assistant", "content": str() | list() as content}:
                made.append(_assistants(where, content))
            case {"role": "system", "content": str() | list() as content}:
                made.append({"role": "system", "content": _text(where, content)})
            case {"role": "user" | "assistant" | "system"}:
                raise wrong(where, message.get("content"), "a string or a list of blocks")
            case {"role": role}:
                raise wrong(f"messages[{i}].role", role, "user or assistant")
            case _:
                raise wrong(f"messages[{i}]", message, "an object with a role and a content")
    return made


def _users(where: str, content: str | list[Any]) -> Iterator[Message]:
    """The results of tools, and then what the user says."""
    said: list[str | Image] = [content] if isinstance(content, str) else []
    for i, block in enumerate(content if isinstance(content, list) else ()):
        at = f"{where}[{i}]"
        match block:
            case {"citations": {"enabled": True}}:
                raise refused(
                    f"{at}.citations", "cannot be honoured here: the model cites nothing", can_be_dropped=True
                )
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                result = content_of(f"{at}.content", block.get("content") or "", _seen, " ")
                if block.get("is_error") and not isinstance(result, str):
                    result = [text_part("error: "), *result]
                elif block.get("is_error") and not str(result).startswith("error"):
                    result = f"error: {result}"
                yield {"role": "tool", "tool_call_id": call_id, "content": result}
            case _:
                said.append(_seen(at, block, "text, tool_result and image"))
    if said or not content:
        yield {"role": "user", "content": content_of_parts(said, " ")}


def _seen(where: str, block: Any, known: str = "text and image") -> str | Image:
    """A text or an image, of a user or in a tool's result."""
    match block:
        case {"type": "image", "source": {"type": "base64", "media_type": str(kind), "data": str(data)}}:
            return sent_image(f"{where}.source", f"data:{kind};base64,{data}")
        case {"type": "image", "source": {"type": "url", "url": url}}:
            return sent_image(f"{where}.source.url", url)
        case {"type": "image", "source": source}:
            reason = 'give {"type": "base64", "media_type": ..., "data": ...}'
            raise refused(f"{where}.source", f"is of type {shown(source)}; {reason}")
    return _text_of(where, block, known)


def _text_of(where: str, block: Any, known: str = "text") -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": kind}:
            raise refused(where, f"is of type {shown(kind)}; the model can read {known}")
    raise wrong(where, block, "a block: an object with a type")


def _assistants(where: str, content: str | list[Any]) -> Message:
    """The model's thinking, text and tool calls. Redacted thinking cannot be shown to it again."""
    said: list[str] = [content] if isinstance(content, str) else []
    message: dict[str, Any] = {"role": "assistant"}
    for i, block in enumerate(content if isinstance(content, list) else ()):
        match block:
            case {"type": "thinking", "thinking": str(thinking)}:
                message["reasoning_content"] = thinking
            case {"type": "tool_use", "id": str(call_id), "name": str(name)}:
                given = checked_arguments(f"{where}[{i}].input", block.get("input"))
                message.setdefault("tool_calls", []).append(tool_call(call_id, name, given))
            case _:
                said.append(_text_of(f"{where}[{i}]", block, "text, thinking and tool_use"))
    return {**message, "content": " ".join(said)}


def _text(where: str, content: Any) -> str:
    return str(content_of(where, content, _text_of, " "))


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
        answer, spoken = answers[0], answers[0].spoken
        content: list[dict[str, Any]] = []
        if spoken.reasoning and self.asked.thinking.type != "disabled":
            content.append({"type": "thinking", "thinking": spoken.reasoning, "signature": ""})
        if spoken.content or not spoken.tool_calls:
            content.append({"type": "text", "text": spoken.content})
        for call in spoken.tool_calls:
            given = json.loads(call.arguments)
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
        text, is_stopped = answer.turn.words, spoken.finish_reason == "stop"
        stops = [(text.find(stop), stop) for stop in self.call.sampling.stop if is_stopped and stop in text]
        stop_sequence = min(stops)[1] if stops else None
        reason = "stop_sequence" if stop_sequence else _STOP_REASONS[spoken.finish_reason]
        return {
            "id": f"msg_{new_id()}",
            "type": "message",
            "role": "assistant",
            "model": self.asked.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop_sequence,
            "usage": {
                "input_tokens": answer.num_prompt_tokens,
                "output_tokens": len(answer.response.output_ids),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
            },
            **spoken.faults,
        }

    def events(self, answers: Sequence[CallAnswer]) -> Iterable[str]:
        message = self.whole(answers)
        ending = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        begun = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
        begun["usage"] = {**message["usage"], "output_tokens": 0}
        yield _event("message_start", message=begun)
        yield _event("ping")
        for index, block in enumerate(message["content"]):
            match block:
                case {"type": "text", "text": text}:
                    opened, deltas = {"text": ""}, [{"type": "text_delta", "text": text}]
                case {"type": "thinking", "thinking": thinking}:
                    thought = {"type": "thinking_delta", "thinking": thinking}
                    opened, deltas = {"thinking": ""}, [thought, {"type": "signature_delta", "signature": ""}]
                case _:
                    text = json.dumps(block["input"], ensure_ascii=False)
                    opened, deltas = {"input": {}}, [{"type": "input_json_delta", "partial_json": text}]
            yield _event("content_block_start", index=index, content_block={**block, **opened})
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=ending, usage=message["usage"])
        yield _event("message_stop")


def _event(kind: str, **fields: Any) -> str:
    return event({"type": kind, **fields}, kind)


def _read(exchange: Exchange, body: type[MessagesRequest] = MessagesRequest) -> MessagesWire:
    asked = exchange.parsed(body)
    messages, prefill = _without_prefill(_messages(asked))
    given = {"output_config.format": asked.output_config.format, "output_format": asked.output_format}
    forms = [(where, json_schema(f"{where}.schema", form.json_schema)) for where, form in given.items() if form]
    where, output = one_of(forms)
    if prefill and output:
        raise BodyError(f"{where} contradicts a prefilled answer; end messages with a user's message", param=where)
    budget = asked.thinking.budget_tokens if asked.thinking.type == "enabled" else None
    if asked.thinking.type == "enabled" and (budget is None or budget >= asked.max_tokens):
        raise wrong("thinking.budget_tokens", budget, "at least 1, and below max_tokens")
    match asked.tool_choice.type:
        case "auto" | "none" as mode:
            choice = ToolChoice(mode=mode)
        case "any":
            choice = ToolChoice(mode="required")
        case "tool":
            choice = ToolChoice(mode="required", names=(asked.tool_choice.name,), is_named=True)
    call = exchange.session.policy.call(
        messages,
        [_tool(f"tools[{i}]", tool) for i, tool in enumerate(asked.tools)],
        Asked(output=output, where=where, choice=choice, only_one=asked.tool_choice.disable_parallel_tool_use),
        prefill=prefill,
        thinking_budget=budget,
        max_new_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        stop=tuple(asked.stop_sequences) or None,
    )
    return MessagesWire(asked=asked, call=call)


def _without_prefill(messages: list[Message]) -> tuple[list[Message], str]:
    """The messages before the answer that the last of them begins, and its beginning."""
    *before, last = messages
    if last["role"] != "assistant":
        return messages, ""
    for name in ("tool_calls", "reasoning_content"):
        if name in last:
            reason = f"end with an assistant's message with {name}; only text can be continued"
            raise refused("messages", f"{reason}: answer the calls, or end with a user's message")
    if not last["content"]:
        raise BodyError("messages end with an assistant's message without text; leave it out", param="messages")
    return before, last["content"]


def _tool(where: str, tool: Any) -> CustomTool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in (None, "custom"):
        raise refused(
            where, f"is of type {shown(kind)}; Anthropic's own tools are not available; send tools with an input_schema"
        )
    return validated(CustomTool, tool, where)


def _error(error: RequestError) -> dict[str, Any]:
    """The error in Anthropic's shape; its SDK chooses the exception by the status."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class CountRequest(MessagesRequest):
    """The body of a request for the number of tokens in a prompt."""

    max_tokens: Count = MAX_SEED


async def _count(exchange: Exchange) -> web.StreamResponse:
    wire = await exchange.understood(lambda exchange: _read(exchange, CountRequest))
    num_tokens = await exchange.session.speaker(exchange.role).anum_prompt_tokens(wire.call)
    return await exchange.respond({"input_tokens": num_tokens})


_SHAPE: Any = {"error": _error, "error_event": lambda error: _event("error", error=_error(error)["error"])}
ENDPOINTS = (
    completing("/v1/messages", _read, **_SHAPE),
    Endpoint(path="/v1/messages/count_tokens", answer=_count, **_SHAPE),
)

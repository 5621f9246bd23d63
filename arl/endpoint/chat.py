"""POST /v1/chat/completions: checks OpenAI's chat messages and tools, and writes the answers in OpenAI's shape."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from arl.api.images import Image
from arl.api.types import new_id
from arl.endpoint.answer_forms import ANY_OBJECT, Asked, Form, json_schema, openai_choice
from arl.endpoint.calls import (
    LOW_DETAIL,
    ONLY_SAMPLED,
    CallAnswer,
    CallPolicy,
    ChatCall,
    Count,
    pieces,
    sent_image,
    usage,
    with_images,
)
from arl.endpoint.exchange import Exchange, completing, openai_error, openai_error_event
from arl.endpoint.sampled_body import UNALTERED, WHY_UNALTERED, SampledBody
from arl.web.bodies import BodyError, RequestBody, refused, shown, wrong
from arl.web.server import DONE, event

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}
"""Kinds of text content -> the field that holds the text."""


class Schema(RequestBody, ignored=("name", "description", "strict")):
    """A JSON schema and its name."""

    json_schema: Any = Field(default=None, alias="schema")


class ResponseFormat(RequestBody):
    """The form of an answer's text."""

    type: str = "text"
    json_schema: Schema | None = None


class ChatRequest(
    SampledBody,
    # Agents send these fields of style by default; the model decides how to think and to write.
    ignored=(
        "metadata", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "safety_identifier",
        "service_tier", "store", "user", "verbosity",
    ),
    only={
        **UNALTERED,
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "top_logprobs": (0,),
    },
    refused={
        **WHY_UNALTERED,
        "functions": "it is the older form of tools; send tools",
        "function_call": "it is the older form of tool_choice; send tool_choice",
        "modalities": "the model reads and writes text",
        "top_logprobs": ONLY_SAMPLED,
    },
    vital=("functions", "function_call", "modalities"),
):  # fmt: skip
    """The body of a chat completion."""

    messages: Annotated[list[Any], Field(min_length=1)]
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    response_format: ResponseFormat = ResponseFormat()
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


def _message(where: str, message: Any) -> dict[str, Any]:
    """The message with its content as text, or as texts and images. The template gets its other fields, and shows those
    that it knows."""
    if not isinstance(message, dict):
        raise wrong(where, message, "an object with a role and a content")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    if message.get("function_call"):
        raise refused(where, "function_call is the older form of calls; use tools")
    calls = message.get("tool_calls")
    content = message.get("content")
    if content is not None or role != "assistant":
        part = _seen if role in ("user", "tool") else _part
        content = with_images(f"{where}.content", content, part, "\n")
    made = {name: value for name, value in message.items() if value is not None and name != "tool_calls"}
    made |= {"role": _ROLES[role], "content": content or ""}
    if calls:
        made["tool_calls"] = _calls(f"{where}.tool_calls", calls)
    return made


def _seen(where: str, part: Any) -> str | Image:
    """A part of what users and tools say."""
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return _part(where, part)
    given = part.get("image_url")
    given = given if isinstance(given, dict) else {"url": given}
    if given.get("detail") == "low":
        raise refused(f"{where}.image_url.detail", LOW_DETAIL)
    return sent_image(f"{where}.image_url", given.get("url"))


def _part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(_TEXT_PARTS[kind]) if isinstance(kind, str) and kind in _TEXT_PARTS else None
    if isinstance(text, str):
        return text
    raise refused(where, f"is of type {shown(kind)}, which cannot be shown to the model here")


def _calls(where: str, calls: Any) -> list[Mapping[str, Any]]:
    if not isinstance(calls, list):
        raise wrong(where, calls, "a list of calls")
    for i, call in enumerate(calls):
        match call:
            case {"function": {"name": str(), "arguments": str()}}:
                continue
        raise wrong(f"{where}[{i}]", call, 'a call: {"id", "type": "function", "function": {"name", "arguments"}}')
    return calls


def _tool(where: str, tool: Any) -> Mapping[str, Any]:
    match tool:
        case {"type": "function", "function": {"name": str(name)} as function} if name:
            parameters = function.get("parameters")
            if parameters is not None and not isinstance(parameters, dict):
                raise wrong(f"{where}.function.parameters", parameters, "a JSON schema")
            return tool
    raise wrong(where, tool, 'a function: {"type": "function", "function": {"name", "description", "parameters"}}')


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatWire:
    """A chat completion, and the way to write its answers."""

    asked: ChatRequest
    call: ChatCall
    policy: CallPolicy
    """Its tokenizer gives the text of each token in logprobs."""

    def whole(self, answers: Sequence[CallAnswer]) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "message": {**answer.spoken.message, "refusal": None},
                "logprobs": self._logprobs(answer),
                "finish_reason": self._finish_reason(answer),
            }
            for i, answer in enumerate(answers)
        ]
        return {**self._envelope("chat.completion"), "choices": choices, "usage": usage(answers)}

    def events(self, answers: Sequence[CallAnswer]) -> Iterable[str]:
        envelope = self._envelope("chat.completion.chunk")
        for i, answer in enumerate(answers):
            for choice in self._chunks(answer):
                yield event({**envelope, "choices": [{"index": i, **choice}]})
        if self.asked.stream_options.include_usage:
            yield event({**envelope, "choices": [], "usage": usage(answers)})
        yield DONE

    def _chunks(self, answer: CallAnswer) -> Iterator[dict[str, Any]]:
        spoken = answer.spoken
        yield _chunk({"role": "assistant", "content": ""}, logprobs=self._logprobs(answer))
        for piece in pieces(spoken.reasoning or ""):
            yield _chunk({"reasoning_content": piece})
        for piece in pieces(spoken.content):
            yield _chunk({"content": piece})
        for k, call in enumerate(spoken.tool_calls):
            opening = {"name": call.name, "arguments": ""}
            yield _chunk({"tool_calls": [{"index": k, "id": call.id, "type": "function", "function": opening}]})
            for piece in pieces(call.arguments):
                yield _chunk({"tool_calls": [{"index": k, "function": {"arguments": piece}}]})
        yield _chunk({}, finish_reason=self._finish_reason(answer))

    def _finish_reason(self, answer: CallAnswer) -> str:
        """As OpenAI has it: a call that the program named is a stop."""
        reason = answer.spoken.finish_reason
        return "stop" if reason == "tool_calls" and self.call.asked.choice.is_named else reason

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{new_id()}", "object": kind, "created": int(time.time()), "model": self.asked.model}

    def _logprobs(self, answer: CallAnswer) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        texts = self.policy.token_texts(answer.response)
        return {
            "content": [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in zip(texts, answer.response.output_logprobs, strict=True)
            ]
        }


def _chunk(delta: Mapping[str, Any], *, logprobs: Any = None, finish_reason: str | None = None) -> dict[str, Any]:
    return {"delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _response_format(asked: ResponseFormat) -> Form | None:
    match asked.type:
        case "text":
            return None
        case "json_object":
            return ANY_OBJECT
        case "json_schema":
            where = "response_format.json_schema"
            if asked.json_schema is None:
                raise BodyError(f"{where} is missing", param=where)
            return json_schema(f"{where}.schema", asked.json_schema.json_schema)
    raise wrong("response_format.type", asked.type, "text, json_object or json_schema")


def read(exchange: Exchange) -> ChatWire:
    asked, policy = exchange.parsed(ChatRequest), exchange.session.policy
    tools = [_tool(f"tools[{i}]", tool) for i, tool in enumerate(asked.tools)]
    form = _response_format(asked.response_format)
    where, output = asked.form(*([] if form is None else [("response_format", form)]))
    call = policy.call(
        tuple(_message(f"messages[{i}]", message) for i, message in enumerate(asked.messages)),
        tools,
        Asked(
            output=output,
            where=where,
            choice=openai_choice(asked.tool_choice),
            strict=frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict")),
            only_one=not asked.parallel_tool_calls,
        ),
        n=asked.n,
        template_options=asked.chat_template_kwargs,
        **{**asked.sampling, "max_new_tokens": asked.max_completion_tokens or asked.max_tokens},
    )
    return ChatWire(asked=asked, call=call, policy=policy)


ENDPOINT = completing("/v1/chat/completions", read, openai_error, openai_error_event)

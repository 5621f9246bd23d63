"""POST /v1/chat/completions: turns OpenAI's chat messages and tools into a call, and writes its answers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from arl.api.images import Image
from arl.api.types import new_id
from arl.endpoint.answer_forms import Asked, Form, json_schema, one_of, one_of_texts, openai_choice, regex, text_form
from arl.endpoint.calls import (
    ALTERS,
    LOW_DETAIL,
    MAX_SAMPLES,
    ONLY_SAMPLED,
    CallAnswer,
    CallPolicy,
    ChatCall,
    Count,
    Seed,
    content_of,
    sent_image,
    tool_call,
    usage,
)
from arl.endpoint.exchange import CallBody, Exchange, completing, openai_error, openai_error_event
from arl.runtime.http.bodies import BodyError, Integers, RequestBody, Strings, refused, shown, wrong
from arl.runtime.http.server import DONE, event
from arl.workflow.messages import arguments_of

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

UNALTERED: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0,), "logit_bias": ({},), "presence_penalty": (0,), "repetition_penalty": (1,),
}  # fmt: skip
"""Fields that change the distribution -> the values that do not."""
WHY_UNALTERED = dict.fromkeys(UNALTERED, ALTERS)


class StreamOptions(RequestBody, ignored=("include_obfuscation",)):
    include_usage: bool = False


class SampledBody(CallBody):
    """The fields of sampling, and those that ask for a form of the answer, of which at most one may be there."""

    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: Strings = ()
    stop_token_ids: Integers = ()
    ignore_eos: bool = False
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    stream_options: StreamOptions = StreamOptions()
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    regex: Any = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of SamplingParams; None for those that the body does not name."""
        return {
            "max_new_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "stop": tuple(self.stop) or None,
            "stop_token_ids": tuple(self.stop_token_ids) or None,
            "ignore_eos": self.ignore_eos or None,
            "seed": self.seed,
        }

    def form(self, *others: tuple[str, Form]) -> tuple[str, Form | None]:
        """The form of the answer's text, and the field that asks for it. others: asked for by other fields."""
        forms = list(others)
        if (given := self.guided_json) is not None:
            forms.append(("guided_json", json_schema("guided_json", arguments_of(given))))
        for name, pattern in (("guided_regex", self.guided_regex), ("regex", self.regex)):
            if pattern is not None:
                forms.append((name, regex(name, pattern)))
        if (given := self.guided_choice) is not None:
            forms.append(("guided_choice", one_of_texts("guided_choice", given)))
        return one_of(forms)


class Schema(RequestBody, ignored=("name", "description", "strict")):
    """A JSON schema and its name."""

    json_schema: Any = Field(default=None, alias="schema")


class ResponseFormat(RequestBody):
    """The form of an answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
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
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    if message.get("function_call"):
        raise refused(where, "function_call is the older form of calls; use tools")
    if content is not None or role != "assistant":
        part = _seen if role in ("user", "tool") else _part
        content = content_of(f"{where}.content", content, part, "\n")
    made = {name: value for name, value in message.items() if value is not None and name != "tool_calls"}
    made |= {"role": _ROLES[role], "content": content or ""}
    if calls := message.get("tool_calls"):
        for i, call in enumerate(calls if isinstance(calls, list) else [calls]):
            match call:
                case {"function": {"name": str(), "arguments": str()}}:
                    continue
            at, known = f"{where}.tool_calls[{i}]", '{"id", "type": "function", "function": {"name", "arguments"}}'
            raise wrong(at, call, f"a call: {known}")
        made["tool_calls"] = calls
    return made


def _seen(where: str, part: Any) -> str | Image:
    """A part of what users and tools say."""
    match part:
        case {"type": "image_url", "image_url": {"detail": "low"}}:
            raise refused(f"{where}.image_url.detail", LOW_DETAIL)
        case {"type": "image_url", "image_url": {"url": url}} | {"type": "image_url", "image_url": url}:
            return sent_image(f"{where}.image_url", url)
    return _part(where, part)


def _part(where: str, part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
            return text
    kind = part.get("type") if isinstance(part, dict) else None
    raise refused(where, f"is of type {shown(kind)}, which cannot be shown to the model here")


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
        if spoken.reasoning:
            yield _chunk({"reasoning_content": spoken.reasoning})
        if spoken.content:
            yield _chunk({"content": spoken.content})
        for k, call in enumerate(spoken.tool_calls):
            yield _chunk({"tool_calls": [{"index": k, **tool_call(call.id, call.name, call.arguments)}]})
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


def _response_format(asked: ResponseFormat) -> list[tuple[str, Form]]:
    """The form that the field asks for, if any."""
    where = "response_format.json_schema"
    if asked.type == "json_schema" and asked.json_schema is None:
        raise BodyError(f"{where} is missing", param=where)
    form = text_form(f"{where}.schema", asked.type, asked.json_schema and asked.json_schema.json_schema)
    return [("response_format", form)] if form else []


def read(exchange: Exchange) -> ChatWire:
    asked, policy = exchange.parsed(ChatRequest), exchange.session.policy
    tools = [_tool(f"tools[{i}]", tool) for i, tool in enumerate(asked.tools)]
    where, output = asked.form(*_response_format(asked.response_format))
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

"""POST /v1/chat/completions and /v1/completions: turns OpenAI's chat messages and tools, or a text, into a call, and
writes its answers. A completion continues a text or tokens as they are, without a chat template."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from arl.api.images import Image
from arl.api.types import new_id
from arl.endpoint.calls import (
    LOW_DETAIL,
    MAX_SEED,
    ONLY_SAMPLED,
    Asked,
    CallAnswer,
    CallPolicy,
    ChatCall,
    Count,
    Form,
    FunctionTool,
    GivenText,
    checked_arguments,
    content_of,
    json_schema,
    one_of,
    openai_choice,
    sent_image,
    text_form,
    tool_call,
)
from arl.endpoint.exchange import CallBody, Exchange, completing
from arl.runtime.http.bodies import BodyError, Integers, RequestBody, Strings, refused, shown, wrong
from arl.runtime.http.server import DONE, event
from arl.workflow.messages import arguments_of

_MAX_SAMPLES = 128
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

_READ = ("tool_calls", "malformed_tool_calls")
"""Fields of an assistant's message that the template does not get as they are sent."""
_UNALTERED: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0,), "logit_bias": ({},), "presence_penalty": (0,), "repetition_penalty": (1,),
}  # fmt: skip
"""Fields that change the distribution -> the values that do not."""
_WHY_UNALTERED = dict.fromkeys(
    _UNALTERED, "tokens sampled under it do not have the policy's logprobs, so training could not follow it"
)


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
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_SAMPLES)] = 1
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
                if not isinstance(pattern, str) or not pattern:
                    raise wrong(name, pattern, "a regular expression")
                forms.append((name, {"type": "regex", "pattern": pattern}))
        if (given := self.guided_choice) is not None:
            if not isinstance(given, list) or not given or not all(isinstance(text, str) and text for text in given):
                raise wrong("guided_choice", given, "a list of texts, none of them empty")
            texts = [{"type": "const_string", "value": text} for text in given]
            forms.append(("guided_choice", {"type": "or", "elements": texts}))
        return one_of(forms)


class Schema(RequestBody, ignored=("name", "description", "strict")):
    """A JSON schema and its name."""

    json_schema: Any = Field(default=None, alias="schema")


class ResponseFormat(RequestBody):
    """The form of an answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: Schema | None = None


class ChatTool(RequestBody, ignored=("cache_control",)):
    type: Literal["function"]
    function: FunctionTool


class ChatRequest(
    SampledBody,
    # Agents send these fields of style by default; the model decides how to think and to write.
    ignored=(
        "metadata", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "safety_identifier",
        "service_tier", "store", "user", "verbosity",
    ),
    only={
        **_UNALTERED,
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "top_logprobs": (0,),
    },
    refused={
        **_WHY_UNALTERED,
        "functions": "it is the older form of tools; send tools",
        "function_call": "it is the older form of tool_choice; send tool_choice",
        "modalities": "the model reads and writes text",
        "top_logprobs": ONLY_SAMPLED,
    },
    vital=("functions", "function_call", "modalities"),
):  # fmt: skip
    """The body of a chat completion."""

    messages: Annotated[list[Any], Field(min_length=1)]
    tools: list[ChatTool] = Field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    response_format: ResponseFormat = ResponseFormat()
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class CompletionRequest(
    SampledBody,
    ignored=("metadata", "user"),
    only={**_UNALTERED, "best_of": (1,), "suffix": ("",)},
    refused={
        **_WHY_UNALTERED,
        "best_of": "the best of several answers would be trained as if the model had said it at once",
        "suffix": "the model continues texts, and fills no gaps",
    },
    vital=("suffix",),
):
    """The body of a completion."""

    prompt: Any = None
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True


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
    made = {name: value for name, value in message.items() if value is not None and name not in _READ}
    made |= {"role": _ROLES[role], "content": content or ""}
    if calls := message.get("tool_calls"):
        made["tool_calls"] = []
        for i, call in enumerate(calls if isinstance(calls, list) else [calls]):
            match call:
                case {"function": {"name": str()} as function}:
                    at = f"{where}.tool_calls[{i}].function.arguments"
                    function = {**function, "arguments": checked_arguments(at, function.get("arguments"))}
                    made["tool_calls"].append({**call, "function": function})
                case _:
                    known = '{"id", "type": "function", "function": {"name", "arguments"}}'
                    raise wrong(f"{where}.tool_calls[{i}]", call, f"a call: {known}")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledWire:
    """A call of one of the two, and the way to write its answers."""

    ids: ClassVar[str]
    kind: ClassVar[str]
    kind_of_event: ClassVar[str]
    asked: Any
    """The body."""
    call: ChatCall
    policy: CallPolicy
    """Its tokenizer gives the text of each token in logprobs."""

    def whole(self, answers: Sequence[CallAnswer]) -> dict[str, Any]:
        choices = [self.choice(i, answer) for i, answer in enumerate(answers)]
        return {**self._envelope(self.kind), "choices": choices, "usage": self._usage(answers)}

    def events(self, answers: Sequence[CallAnswer]) -> Iterable[str]:
        envelope = self._envelope(self.kind_of_event)
        for i, answer in enumerate(answers):
            for choice in self.chunks(i, answer):
                yield event({**envelope, "choices": [choice]})
        if self.asked.stream_options.include_usage:
            yield event({**envelope, "choices": [], "usage": self._usage(answers)})
        yield DONE

    def choice(self, index: int, answer: CallAnswer) -> dict[str, Any]:
        raise NotImplementedError

    def chunks(self, index: int, answer: CallAnswer) -> Iterator[dict[str, Any]]:
        """An answer's choices in a stream."""
        yield self.choice(index, answer)

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": f"{self.ids}-{new_id()}", "object": kind, "created": int(time.time()), "model": self.asked.model}

    def _usage(self, answers: Sequence[CallAnswer]) -> dict[str, int]:
        """Prompt tokens, counted once for all answers, and sampled tokens."""
        given = answers[0].num_prompt_tokens
        sampled = sum(len(answer.response.output_ids) for answer in answers)
        return {"prompt_tokens": given, "completion_tokens": sampled, "total_tokens": given + sampled}


class ChatWire(SampledWire):
    """A chat completion."""

    ids, kind, kind_of_event = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, answer: CallAnswer) -> dict[str, Any]:
        return {
            "index": index,
            "message": {**answer.spoken.message, "refusal": None, **answer.spoken.faults},
            "logprobs": self._logprobs(answer),
            "finish_reason": self._finish_reason(answer),
        }

    def chunks(self, index: int, answer: CallAnswer) -> Iterator[dict[str, Any]]:
        spoken, rest = answer.spoken, {"logprobs": None, "finish_reason": None}
        first = {"role": "assistant", "content": ""}
        yield {"index": index, "delta": first, **rest, "logprobs": self._logprobs(answer)}
        if spoken.reasoning:
            yield {"index": index, "delta": {"reasoning_content": spoken.reasoning}, **rest}
        if spoken.content:
            yield {"index": index, "delta": {"content": spoken.content}, **rest}
        for k, call in enumerate(spoken.tool_calls):
            called = {"index": k, **tool_call(call.id, call.name, call.arguments)}
            yield {"index": index, "delta": {"tool_calls": [called]}, **rest}
        yield {"index": index, "delta": spoken.faults, **rest, "finish_reason": self._finish_reason(answer)}

    def _finish_reason(self, answer: CallAnswer) -> str:
        """As OpenAI has it: a call that the program named is a stop."""
        reason = answer.spoken.finish_reason
        return "stop" if reason == "tool_calls" and self.call.asked.choice.is_named else reason

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


class CompletionWire(SampledWire):
    """A completion."""

    ids, kind, kind_of_event = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, answer: CallAnswer) -> dict[str, Any]:
        before = answer.turn.prompt.new_messages[0]["content"] if self.asked.echo else ""
        logprobs = None
        if self.asked.logprobs is not None:
            texts = self.policy.token_texts(answer.response)
            logprobs = {
                "tokens": texts,
                "token_logprobs": list(answer.response.output_logprobs),
                "top_logprobs": None,
                "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)),
            }
        return {
            "index": index,
            "text": before + answer.spoken.content,
            "logprobs": logprobs,
            "finish_reason": answer.spoken.finish_reason,
        }


def _chat(exchange: Exchange) -> ChatWire:
    asked, policy = exchange.parsed(ChatRequest), exchange.session.policy
    given, where = asked.response_format, "response_format.json_schema"
    if given.type == "json_schema" and given.json_schema is None:
        raise BodyError(f"{where} is missing", param=where)
    form = text_form(f"{where}.schema", given.type, given.json_schema and given.json_schema.json_schema)
    where, output = asked.form(*([("response_format", form)] if form else []))
    call = policy.call(
        tuple(_message(f"messages[{i}]", message) for i, message in enumerate(asked.messages)),
        [tool.function for tool in asked.tools],
        Asked(
            output=output, where=where, choice=openai_choice(asked.tool_choice), only_one=not asked.parallel_tool_calls
        ),
        n=asked.n,
        template_options=asked.chat_template_kwargs,
        **{**asked.sampling, "max_new_tokens": asked.max_completion_tokens or asked.max_tokens},
    )
    return ChatWire(asked=asked, call=call, policy=policy)


def _completion(exchange: Exchange) -> CompletionWire:
    asked, policy = exchange.parsed(CompletionRequest), exchange.session.policy
    if asked.logprobs:
        raise refused("logprobs", f"is {asked.logprobs}: {ONLY_SAMPLED}; set it to 0", can_be_dropped=True)
    where, output = asked.form()
    text = GivenText(prompt=_prompt(asked.prompt, policy.tokenizer), adds_special_tokens=asked.add_special_tokens)
    call = policy.call((), (), Asked(output=output, where=where), n=asked.n, text=text, **asked.sampling)
    return CompletionWire(asked=asked, call=call, policy=policy)


def _prompt(given: Any, tokenizer: Any) -> str | tuple[int, ...]:
    """The text or the tokens to continue; a list of one of them is that one."""
    one = given[0] if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list) else given
    if isinstance(one, str) and one:
        return one
    if isinstance(one, list) and one and set(map(type, one)) == {int}:
        if not all(0 <= token < len(tokenizer) for token in one):
            raise wrong("prompt", one, f"tokens of the model, below {len(tokenizer)}")
        return tuple(one)
    raise wrong("prompt", given, "a text or a list of token ids, not empty; send one prompt a call")


ENDPOINTS = (completing("/v1/chat/completions", _chat), completing("/v1/completions", _completion, said="prompt"))

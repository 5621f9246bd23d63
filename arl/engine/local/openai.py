"""The OpenAI side: /v1/chat/completions and /v1/completions, with the token ids and version spans that SGLang adds.

`return_token_ids` puts `prompt_token_ids` and `response_token_ids` into each choice, so that a client need never
tokenize an answer again. Tools are handed to the chat template; calls come back in the text, unparsed.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from arl.engine.local.body import ApiError, Body, MalformedError, shown
from arl.engine.local.endpoint import EventStream, Following, Serving, json_response, openai_error, read_body
from arl.engine.local.job import Job
from arl.engine.local.protocol import (
    Sampling,
    build_params,
    extra_key,
    num_settled_tokens,
    raise_if_failed,
    samples,
    version_spans,
)
from arl.engine.local.text import Text, TextOptions

# How OpenAI's two endpoints write what was generated, whole or in chunks, with what SGLang adds to them.


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIRequest:
    """What chat and plain completions have in common."""

    model: str
    rid: str
    sampling: Sampling
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool
    extra_key: str
    adapter: str


@dataclass(slots=True)
class _Sent:
    """What of a job has been streamed."""

    text: str = ""
    num_tokens: int = 0


class Form(ABC):
    """The answer to one request. The endpoints differ in names, and in where text, logprobs and ids stand."""

    whole_object: str
    chunk_object: str

    def __init__(self, asked: OpenAIRequest, text: Text, jobs: Sequence[Job], num_prompt_tokens: int) -> None:
        self._asked = asked
        self._text = text
        self._jobs = jobs
        self._num_prompt_tokens = num_prompt_tokens
        self._created = int(time.time())
        self._sent = {job: _Sent() for job in jobs}
        self._index = {job: i for i, job in enumerate(jobs)}

    def _envelope(self, kind: str, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        return {
            "id": self._asked.rid,
            "object": kind,
            "created": self._created,
            "model": self._asked.model,
            "choices": choices,
            **more,
        }

    def whole(self, weight_version: str) -> dict[str, Any]:
        """The answer to a request that does not stream; weight_version is told where no token was sampled."""
        versions = self._jobs[0].versions
        metadata = {
            "weight_version": versions[-1] if versions else weight_version,
            "weight_versions": version_spans(versions),
        }
        choices = [self._choice(i, job) for i, job in enumerate(self._jobs)]
        return self._envelope(self.whole_object, choices, usage=self._usage(), metadata=metadata)

    def _choice(self, index: int, job: Job) -> dict[str, Any]:
        text = self._text.decode(job, len(job.output_ids), self._asked.sampling.text)
        choice = {
            "index": index,
            **self._content(text),
            "logprobs": self._logprobs_if_asked(job, 0, len(job.output_ids)),
            **_ending(job),
        }
        return choice | self._token_ids(job) if self._asked.return_token_ids else choice

    def opening(self) -> list[dict[str, Any]]:
        """The chunks that come before any token."""
        return []

    def chunk(self, job: Job) -> dict[str, Any]:
        """What a job gained since its last chunk."""
        sent, num_tokens = self._sent[job], num_settled_tokens(job)
        text = self._text.decode(job, num_tokens, self._asked.sampling.text)
        choice = {
            "index": self._index[job],
            **self._delta(text[len(sent.text) :]),
            "logprobs": self._logprobs_if_asked(job, sent.num_tokens, num_tokens),
            **_ending(job),
        }
        self._sent[job] = _Sent(text, num_tokens)
        return self._envelope(self.chunk_object, [choice])

    def usage_chunk(self) -> dict[str, Any]:
        return self._envelope(self.chunk_object, [], usage=self._usage())

    def _usage(self) -> dict[str, int]:
        completion_tokens = sum(len(job.output_ids) for job in self._jobs)
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._num_prompt_tokens + completion_tokens,
        }

    def _logprobs_if_asked(self, job: Job, start: int, end: int) -> dict[str, Any] | None:
        if not self._asked.logprobs:
            return None
        pairs = zip(job.output_ids[start:end], job.output_logprobs[start:end], strict=True)
        return self._logprobs([(self._text.token_text(token), logprob) for token, logprob in pairs])

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _delta(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, tokens: Sequence[tuple[str, float]]) -> dict[str, Any]: ...

    @abstractmethod
    def _token_ids(self, job: Job) -> dict[str, Any]: ...


class ChatForm(Form):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        start = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._envelope(self.chunk_object, [{"index": i, **start}]) for i in range(len(self._jobs))]

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "reasoning_content": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _logprobs(self, tokens: Sequence[tuple[str, float]]) -> dict[str, Any]:
        return {
            "content": [
                {"token": text, "bytes": list(text.encode()), "logprob": logprob, "top_logprobs": []}
                for text, logprob in tokens
            ]
        }

    def _token_ids(self, job: Job) -> dict[str, Any]:
        return {"prompt_token_ids": job.input_ids, "response_token_ids": job.output_ids}


class PlainForm(Form):
    """/v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, tokens: Sequence[tuple[str, float]]) -> dict[str, Any]:
        return {
            "tokens": [text for text, _ in tokens],
            "token_logprobs": [logprob for _, logprob in tokens],
            "top_logprobs": None,
        }

    def _token_ids(self, job: Job) -> dict[str, Any]:
        return {"prompt_token_ids": job.input_ids, "token_ids": job.output_ids}


def _ending(job: Job) -> dict[str, Any]:
    reason = job.finish_reason or {}
    return {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}


_HARMLESS = frozenset((
    "data_parallel_rank", "metadata", "model", "parallel_tool_calls", "priority",
    "separate_reasoning", "service_tier", "session_id", "store", "stream_reasoning", "user",
))  # fmt: skip
_NEUTRAL = {"best_of": 1, "frequency_penalty": 0, "min_tokens": 0, "presence_penalty": 0, "repetition_penalty": 1}
_DEFAULT_COMPLETION_TOKENS = 16


def parse_common(body: Body, default_max_tokens: int | None) -> OpenAIRequest:
    """Read the fields that both endpoints share. `finish` is left to the caller."""
    max_tokens = body.integer("max_tokens", default_max_tokens)
    max_tokens = body.integer("max_completion_tokens", max_tokens)
    sampling = Sampling(
        params=build_params(
            max_new_tokens=1 if max_tokens is None else max_tokens,
            temperature=body.number("temperature", 1.0),
            top_p=body.number("top_p", 1.0),
            top_k=body.integer("top_k", -1),
            min_p=body.number("min_p", 0.0),
            stop=body.strings("stop"),
            stop_token_ids=body.token_ids("stop_token_ids"),
            ignore_eos=body.flag("ignore_eos"),
            seed=body.integer("seed", None),
        ),
        max_new_tokens=max_tokens,
        n=body.integer("n", 1),
        text=TextOptions(
            skip_special_tokens=body.flag("skip_special_tokens", True), trim_stop=not body.flag("no_stop_trim")
        ),
    )
    if sampling.n < 1:
        raise ApiError(f"n is {sampling.n}; it must be at least 1")
    stream = body.flag("stream")
    stream_options = Body(body.value("stream_options") or {}, "stream_options")
    return OpenAIRequest(
        model=body.text("model", "default"),
        rid=body.text("rid", None) or uuid.uuid4().hex,
        sampling=sampling,
        stream=stream,
        include_usage=stream_options.flag("include_usage"),
        logprobs=body.value("logprobs") not in (None, False),
        return_token_ids=body.flag("return_token_ids"),
        extra_key=extra_key(body.text("cache_salt", ""), body.text("extra_key", "")),
        adapter=body.text("lora_path", ""),
    )


def _messages(body: Body) -> list[dict[str, Any]]:
    messages = body.value("messages")
    if not isinstance(messages, list):
        raise MalformedError(f"messages is {shown(messages)}; it must be a list of messages")
    if not messages:
        raise ApiError("Messages cannot be empty.")
    return [_message(i, message) for i, message in enumerate(messages)]


def _message(i: int, message: Any) -> dict[str, Any]:
    """A message as templates expect it: its parts of text as one string, a space between two."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(f"messages[{i}] is {shown(message)}; it must be an object with a role and a content")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message if content is not None else {**message, "content": ""}
    if not isinstance(content, list):
        raise ApiError(f"messages[{i}].content is {shown(content)}; it must be a string or a list of text parts")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ApiError(f"Model only supports text input; messages[{i}] has a part of type {shown(kind)}.")
    return {**message, "content": " ".join(part["text"] for part in content)}


def _tools(body: Body) -> list[Any] | None:
    tools, choice = body.value("tools"), body.value("tool_choice")
    if tools is not None and not isinstance(tools, list):
        raise MalformedError(f"tools is {shown(tools)}; it must be a list of tools")
    if choice not in (None, "auto", "none"):
        raise ApiError(f"tool_choice is {shown(choice)}; this server cannot force a call, so only auto or none")
    return None if choice == "none" else tools or None


class OpenAI:
    """POST /v1/chat/completions, POST /v1/completions and POST /tokenize."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        asked = parse_common(body, None)
        if asked.stream and asked.return_token_ids:
            raise ApiError(
                "return_token_ids is not supported with streaming on /v1/chat/completions. "
                "Please set stream=false when using return_token_ids=true."
            )
        prompt = await self._chat_prompt(body)
        body.finish(_HARMLESS, {**_NEUTRAL, "top_logprobs": 0})
        return await self._complete(request, asked, [prompt], ChatForm)

    async def _chat_prompt(self, body: Body) -> list[int]:
        messages, tools = _messages(body), _tools(body)
        given = body.value("chat_template_kwargs") or {}
        if not isinstance(given, dict):
            raise ApiError(f"chat_template_kwargs is {shown(given)}; it must be an object")
        continues = body.flag("continue_final_message")
        options = {"add_generation_prompt": not continues, "continue_final_message": continues, **given}
        if (input_ids := body.value("input_ids")) is not None:
            return input_ids
        return await self._serving.encode(lambda: self._serving.text.chat_prompt(messages, tools, options))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        asked = parse_common(body, _DEFAULT_COMPLETION_TOKENS)
        prompt = body.value("prompt")
        is_batch = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
        prompts = [await self._prompt_ids(one) for one in (prompt if is_batch else [prompt])]
        body.finish(_HARMLESS, _NEUTRAL)
        return await self._complete(request, asked, prompts, PlainForm)

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        prompt, add_special_tokens = body.value("prompt"), body.flag("add_special_tokens", True)
        body.finish(frozenset(("model",)))
        texts = prompt if isinstance(prompt, list) else [prompt]
        if not all(isinstance(text, str) for text in texts):
            raise MalformedError(f"prompt is {shown(prompt)}; it must be a string or a list of strings")
        encode = partial(self._serving.text.encode, add_special_tokens=add_special_tokens)
        ids = [await self._serving.encode(partial(encode, text)) for text in texts]
        counts = [len(one) for one in ids]
        tokens, count = (ids, counts) if isinstance(prompt, list) else (ids[0], counts[0])
        limit = self._serving.limits.context_length
        return json_response({"tokens": tokens, "count": count, "max_model_len": limit})

    async def _prompt_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return await self._serving.encode(lambda: self._serving.text.encode(prompt))
        if not isinstance(prompt, list):
            raise ApiError(f"prompt is {shown(prompt)}; it must be text or token ids, or a list of either")
        return prompt

    def _adapter(self, model: str) -> str:
        """The one that `model` names, by itself or as `model:adapter`; none where it names the model, or anything."""
        name = model.rpartition(":")[2]
        return name if name in self._serving.scheduler.adapters.loaded else ""

    async def _complete(
        self, request: web.Request, asked: OpenAIRequest, prompts: Sequence[list[int]], make_form: type[Form]
    ) -> web.StreamResponse:
        self._serving.text.check()
        jobs: list[Job] = []
        for i, input_ids in enumerate(prompts):
            if not isinstance(input_ids, list):
                raise ApiError(f"input_ids is {shown(input_ids)}; it must be a list of token ids")
            params = asked.sampling.for_prompt(input_ids, self._serving.limits)
            rid = asked.rid if len(prompts) == 1 else f"{asked.rid}_{i}"
            job = Job(
                rid=rid,
                input_ids=input_ids,
                sampling=params,
                stream=asked.stream,
                extra_key=asked.extra_key,
                adapter=asked.adapter or self._adapter(asked.model),
            )
            jobs += samples(job, asked.sampling.n)
        form = make_form(asked, self._serving.text, jobs, num_prompt_tokens=sum(map(len, prompts)))
        named: dict[str, Sequence[Job]] = {job.rid: [job] for job in jobs}
        named[asked.rid] = jobs
        with self._serving.inflight.submit(self._serving.scheduler, named) as following:
            if asked.stream:
                return await _stream(request, following, form, asked.include_usage)
            await following.finish()
        raise_if_failed(jobs)
        return json_response(form.whole(self._serving.scheduler.weight_version))


async def _stream(request: web.Request, following: Following, form: Form, include_usage: bool) -> web.StreamResponse:
    stream = EventStream(request)
    await stream.send(*form.opening())
    while not following.is_done:
        changed = await following.progress()
        try:
            raise_if_failed(changed)
        except ApiError as error:
            await stream.send({"error": openai_error(error.message, error.status)})
            break
        await stream.send(*(form.chunk(job) for job in changed))
    if include_usage:
        await stream.send(form.usage_chunk())
    return await stream.end()

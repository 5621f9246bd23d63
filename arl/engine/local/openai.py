"""OpenAI's endpoints /v1/chat/completions and /v1/completions, with SGLang's token ids and version spans.

`return_token_ids` puts `prompt_token_ids` and `response_token_ids` into each choice, so that a client need never
tokenize an answer again. The chat template renders tools; calls come back in the text, unparsed.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from aiohttp import web
from pydantic import Field, PlainValidator, field_validator

from arl.engine.local.endpoint import Sampling, SamplingFields, Serving, extra_key, openai_error, raise_if_failed
from arl.engine.local.job import Job, Text
from arl.web.bodies import Integers, RequestBody, RequestError, must_be, parse, shown
from arl.web.server import DONE, EventStream, event, json_response

_IGNORED = (
    "data_parallel_rank", "metadata", "parallel_tool_calls", "priority", "separate_reasoning", "service_tier",
    "session_id", "store", "stream_reasoning", "user",
)  # fmt: skip
_ONLY: Mapping[str, Sequence[Any]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_logprobs": (0,),
}


class StreamOptions(RequestBody, takes_empty=True):
    include_usage: bool = False


class OpenAIBody(SamplingFields, takes_empty=True, ignored=_IGNORED, only=_ONLY):
    """The fields that chat and plain completions share."""

    model: str = "default"
    rid: str = Field(default_factory=lambda: uuid.uuid4().hex)
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    logprobs: bool | int = False
    return_token_ids: bool = False
    cache_salt: str = ""
    extra_key: str = ""
    lora_path: str = ""

    def read(self) -> Sampling:
        return self.sampled(self.max_completion_tokens or self.max_tokens, self.seed)


class ChatBody(OpenAIBody, takes_empty=True, ignored=_IGNORED, only=_ONLY):
    """The body of /v1/chat/completions."""

    messages: list[Any]
    tools: list[Any] | None = None
    tool_choice: Literal["auto", "none"] = "auto"
    """The server cannot force a call."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    continue_final_message: bool = False
    input_ids: Integers | None = None
    """The prompt's tokens, instead of messages."""

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as templates expect them. Raises RequestError."""
        if not self.messages:
            raise RequestError("Messages cannot be empty.")
        return [_message(i, message) for i, message in enumerate(self.messages)]


def _message(i: int, message: Any) -> dict[str, Any]:
    """A message with its text parts joined by spaces."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{i}] is {shown(message)}; it must be an object with a role and a content")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**message, "content": content or ""}
    if not isinstance(content, list):
        raise RequestError(f"messages[{i}].content is {shown(content)}; it must be a string or a list of text parts")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"Model only supports text input; messages[{i}] has a part of type {shown(kind)}.")
    return {**message, "content": " ".join(part["text"] for part in content)}


def _prompts(value: Any) -> list[Any]:
    prompts = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    for one in prompts:
        if not isinstance(one, str) and not (isinstance(one, list) and set(map(type, one)) <= {int}):
            raise must_be("text or token ids, or a list of either")
    return prompts


class CompletionBody(OpenAIBody, takes_empty=True, ignored=_IGNORED, only=_ONLY):
    """The body of /v1/completions."""

    prompt: Annotated[list[Any], PlainValidator(_prompts)]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16


class TokenizeBody(RequestBody, takes_empty=True, ignored=("model",)):
    """The body of /tokenize."""

    prompt: Any
    add_special_tokens: bool = True

    @field_validator("prompt")
    @classmethod
    def _is_text(cls, prompt: Any) -> Any:
        if not all(isinstance(text, str) for text in (prompt if isinstance(prompt, list) else [prompt])):
            raise must_be("a string or a list of strings")
        return prompt


class Form(ABC):
    """The answer to one request. The endpoints differ in names, and in the places of text, logprobs and ids."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    ids_name: ClassVar[str]

    def __init__(self, body: OpenAIBody, text: Text, jobs: Sequence[Job], num_prompt_tokens: int) -> None:
        self._body = body
        self._text = text
        self._options = body.read().text
        self._jobs = jobs
        self._num_prompt_tokens = num_prompt_tokens
        self._created = int(time.time())
        self._streamed: dict[Job, tuple[int, int]] = dict.fromkeys(jobs, (0, 0))  # characters and tokens
        self._index = {job: i for i, job in enumerate(jobs)}

    def _envelope(self, kind: str, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        named = {"id": self._body.rid, "object": kind, "created": self._created, "model": self._body.model}
        return {**named, "choices": choices, **more}

    def whole(self, weight_version: str) -> dict[str, Any]:
        """The answer to a request that does not stream. It has weight_version even if no token was sampled."""
        first = self._jobs[0]
        metadata = {
            "weight_version": first.versions[-1] if first.versions else weight_version,
            "weight_versions": first.version_spans(len(first.versions)),
        }
        choices = [self._choice(job) for job in self._jobs]
        return self._envelope(self.whole_object, choices, usage=self._usage(), metadata=metadata)

    def _choice(self, job: Job) -> dict[str, Any]:
        num_tokens = len(job.output_ids)
        said = self._content(self._text.decode(job, num_tokens, self._options))
        ids = {"prompt_token_ids": job.input_ids, self.ids_name: job.output_ids}
        return self._said(job, said, 0, num_tokens) | (ids if self._body.return_token_ids else {})

    def opening(self) -> list[dict[str, Any]]:
        """The chunks that come before any token."""
        return []

    def chunk(self, job: Job) -> dict[str, Any]:
        """A chunk with the tokens that a job gained since its last chunk."""
        (num_characters, start), num_tokens = self._streamed[job], job.num_settled_tokens
        text = self._text.decode(job, num_tokens, self._options)
        self._streamed[job] = (len(text), num_tokens)
        choice = self._said(job, self._delta(text[num_characters:]), start, num_tokens)
        return self._envelope(self.chunk_object, [choice])

    def usage_chunk(self) -> dict[str, Any]:
        return self._envelope(self.chunk_object, [], usage=self._usage())

    def _usage(self) -> dict[str, int]:
        new = sum(len(job.output_ids) for job in self._jobs)
        old = self._num_prompt_tokens
        return {"prompt_tokens": old, "completion_tokens": new, "total_tokens": old + new}

    def _said(self, job: Job, said: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
        """A choice with the logprobs of the job's output tokens start..end-1."""
        logprobs = None
        if self._body.logprobs:
            pairs = zip(job.output_ids[start:end], job.output_logprobs[start:end], strict=True)
            logprobs = self._logprobs([(self._text.token_text(token), logprob) for token, logprob in pairs])
        reason = job.finish_reason or {}
        ending = {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}
        return {"index": self._index[job], **said, "logprobs": logprobs, **ending}

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _delta(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, tokens: Sequence[tuple[str, float]]) -> dict[str, Any]: ...


class ChatForm(Form):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    ids_name = "response_token_ids"

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


class PlainForm(Form):
    """/v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"
    ids_name = "token_ids"

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, tokens: Sequence[tuple[str, float]]) -> dict[str, Any]:
        texts, logprobs = [text for text, _ in tokens], [logprob for _, logprob in tokens]
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None}


class OpenAI:
    """POST /v1/chat/completions, POST /v1/completions and POST /tokenize."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = parse(ChatBody, await request.read())
        if body.stream and body.return_token_ids:
            raise RequestError(
                "return_token_ids is not supported with streaming on /v1/chat/completions. "
                "Please set stream=false when using return_token_ids=true."
            )
        continues = body.continue_final_message
        options = {"add_generation_prompt": not continues, "continue_final_message": continues}
        messages, tools = body.conversation(), body.tools if body.tool_choice == "auto" else None
        render = partial(self._serving.text.chat_prompt, messages, tools or None, options | body.chat_template_kwargs)
        prompt = await self._serving.encode(render) if body.input_ids is None else list(body.input_ids)
        return await self._complete(request, body, [prompt], ChatForm)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = parse(CompletionBody, await request.read())
        return await self._complete(request, body, body.prompt, PlainForm)

    async def tokenize(self, body: TokenizeBody) -> Any:
        texts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        encode = partial(self._serving.text.encode, add_special_tokens=body.add_special_tokens)
        ids = [await self._serving.encode(partial(encode, text)) for text in texts]
        counts = [len(one) for one in ids]
        tokens, count = (ids, counts) if isinstance(body.prompt, list) else (ids[0], counts[0])
        return {"tokens": tokens, "count": count, "max_model_len": self._serving.scheduler.runner.context_length}

    def _adapter(self, model: str) -> str:
        """The adapter that `model` names, alone or as `model:adapter`; none if it names the model, or anything else."""
        name = model.rpartition(":")[2]
        return name if name in self._serving.scheduler.runner.adapters.loaded else ""

    async def _complete(
        self,
        request: web.Request,
        body: OpenAIBody,
        prompts: Sequence[str | list[int]],
        make_form: Callable[..., Form],
    ) -> web.StreamResponse:
        text, scheduler = self._serving.text, self._serving.scheduler
        text.check()
        sampling, jobs, num_prompt_tokens = body.read(), list[Job](), 0
        for i, prompt in enumerate(prompts):
            input_ids = await self._serving.prompt_ids(prompt)
            num_prompt_tokens += len(input_ids)
            job = Job(
                rid=body.rid if len(prompts) == 1 else f"{body.rid}_{i}",
                input_ids=input_ids,
                sampling=self._serving.fitted(sampling, len(input_ids)),
                stream=body.stream,
                extra_key=extra_key(body.cache_salt, body.extra_key),
                adapter=body.lora_path or self._adapter(body.model),
            )
            jobs += job.samples(sampling.n)
        form = make_form(body, text, jobs, num_prompt_tokens)
        named: dict[str, Sequence[Job]] = {**{job.rid: [job] for job in jobs}, body.rid: jobs}
        with self._serving.inflight.submit(scheduler, named) as following:
            if not body.stream:
                await following.finish()
                raise_if_failed(jobs)
                return json_response(form.whole(scheduler.weight_version))
            stream = EventStream(request)
            await stream.send("".join(map(event, form.opening())))
            while not following.is_done:
                changed = await following.progress()
                try:
                    raise_if_failed(changed)
                except RequestError as error:
                    await stream.send(event({"error": openai_error(error)}))
                    break
                await stream.send("".join(event(form.chunk(job)) for job in changed))
            return await stream.end((event(form.usage_chunk()) if body.stream_options.include_usage else "") + DONE)

"""How OpenAI's two endpoints write what was generated, whole or in chunks, with what SGLang adds to them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from arl.engine.local.job import Job
from arl.engine.local.protocol import Sampling, num_settled_tokens, version_spans
from arl.engine.local.text import Text


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

"""Shared parts of all endpoints: the server's state, sampling parameters, and errors in SGLang's shapes.

handler --submit--> Inflight --> Scheduler, on the model thread --deliver--> Following: the handler waits for it
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from aiohttp import web
from pydantic import Field

from arl.api.types import SamplingParams
from arl.engine.local.job import Job, Text, TextOptions
from arl.engine.local.scheduler import Scheduler
from arl.web.bodies import BodyError, Integers, RequestBody, RequestError, Strings, parse
from arl.web.server import Handler, json_response

B = TypeVar("B", bound=RequestBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The parts of the server that every handler uses."""

    scheduler: Scheduler
    inflight: Inflight
    text: Text
    tokenizing: ThreadPoolExecutor
    """One thread, which encodes texts."""
    model_path: str
    served_model_name: str

    async def encode(self, encode: Callable[[], list[int]]) -> list[int]:
        """Run a tokenizer call off the event loop. Raises TextError."""
        return await asyncio.get_running_loop().run_in_executor(self.tokenizing, encode)

    async def prompt_ids(self, prompt: str | list[int]) -> list[int]:
        """A prompt's tokens. Raises RequestError if the model lacks one, or its context has no room for more."""
        input_ids = await self.encode(lambda: self.text.encode(prompt)) if isinstance(prompt, str) else prompt
        vocab_size, context_length = self.scheduler.runner.vocab_size, self.scheduler.runner.context_length
        if not input_ids:
            raise RequestError("input_ids cannot be empty.")
        if min(input_ids) < 0 or max(input_ids) >= vocab_size:
            raise RequestError(f"input_ids holds a token outside the model's vocabulary of {vocab_size} tokens.")
        if len(input_ids) >= context_length:
            raise RequestError(
                f"The input ({len(input_ids)} tokens) is longer than the model's context length "
                f"({context_length} tokens)."
            )
        return input_ids

    def fitted(self, sampling: Sampling, num_prompt_tokens: int) -> SamplingParams:
        """The parameters for a prompt of this many tokens. Raises RequestError if the context cannot hold both."""
        context_length = self.scheduler.runner.context_length
        if sampling.params.stop and not self.text.has_tokenizer:
            raise RequestError("stop needs a tokenizer, which this model was saved without; use stop_token_ids")
        if sampling.max_new_tokens is None:
            return replace(sampling.params, max_new_tokens=context_length - num_prompt_tokens)
        total = num_prompt_tokens + sampling.params.max_new_tokens
        if total > context_length:
            raise RequestError(
                f"Requested token count exceeds the model's maximum context length of {context_length} tokens. "
                f"You requested a total of {total} tokens: {num_prompt_tokens} tokens from the input messages and "
                f"{sampling.params.max_new_tokens} tokens for the completion. Please reduce the number of tokens in "
                "the input messages or the completion to fit within the limit."
            )
        return sampling.params


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to continue one prompt."""

    params: SamplingParams
    max_new_tokens: int | None
    """As the client wrote it: None asks for as many as fit, 0 for none."""
    n: int
    text: TextOptions


class SamplingFields(RequestBody):
    """The fields that /generate's sampling_params and OpenAI's bodies share."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: Strings = ()
    stop_token_ids: Integers = ()
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1)] = 1
    skip_special_tokens: bool = True
    no_stop_trim: bool = False

    def sampled(self, max_new_tokens: int | None, seed: int | None) -> Sampling:
        """Raises RequestError for impossible values."""
        try:
            params = SamplingParams(
                max_new_tokens=max_new_tokens or 1,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                stop=tuple(self.stop),
                stop_token_ids=tuple(self.stop_token_ids),
                ignore_eos=self.ignore_eos,
                seed=seed,
            )
        except ValueError as error:
            raise RequestError(str(error)) from None
        text = TextOptions(skip_special_tokens=self.skip_special_tokens, trim_stop=not self.no_stop_trim)
        return Sampling(params=params, max_new_tokens=max_new_tokens, n=self.n, text=text)


def extra_key(cache_salt: str, key: str) -> str:
    """The key that keeps prefixes apart, made of SGLang's two fields."""
    return f"{cache_salt}/{key}" if cache_salt else key


def asked(body: type[B], answer: Callable[[B], Awaitable[Any]]) -> Handler:
    """A handler that reads a body and sends the answer of `answer`: an object to send as JSON, or a whole response."""

    async def handle(request: web.Request) -> web.StreamResponse:
        content = await answer(parse(body, await request.read()))
        return content if isinstance(content, web.StreamResponse) else json_response(content)

    return handle


# Errors. SGLang has one shape for every malformed body; other errors have the endpoint's shape.


def generate_error(error: RequestError) -> Mapping[str, Any]:
    if isinstance(error, BodyError) and (error.param or "").startswith("sampling_params."):
        return {"error": error.message}
    return _malformed(error) or {"error": {"message": error.message}}


def control_error(error: RequestError) -> Mapping[str, Any]:
    return _malformed(error) or {"success": False, "message": error.message}


def openai_error(error: RequestError) -> Mapping[str, Any]:
    kind = "BadRequestError" if error.status == 400 else "InternalServerError"
    told = {"object": "error", "message": error.message, "type": kind, "param": None, "code": error.status}
    return _malformed(error) or told


def path_error(error: RequestError) -> Mapping[str, Any]:
    """An unknown path, or a method that the path does not have."""
    return {"detail": error.message}


def _malformed(error: RequestError) -> Mapping[str, Any] | None:
    if not isinstance(error, BodyError) or error.code != "invalid_value":
        return None
    return {"object": "error", "message": error.message, "type": "Bad Request", "param": None, "code": error.status}


def raise_if_failed(jobs: Sequence[Job]) -> None:
    """If a job failed, not merely finished or was cancelled, the whole request fails."""
    for job in jobs:
        if job.finish_reason and (status := job.finish_reason.get("status_code")):
            raise RequestError(job.finish_reason["message"], status)


# Requests under way: the event loop's side of the scheduler.


class Following:
    """One request's view of its jobs."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.unfinished = set(jobs)
        self._changed: dict[Job, None] = {}
        self._event = asyncio.Event()

    @property
    def is_done(self) -> bool:
        return not self.unfinished and not self._changed

    async def progress(self) -> list[Job]:
        """Wait for the next change. Returns the jobs that finished or gained tokens since the last call."""
        await self._event.wait()
        self._event.clear()
        changed = list(self._changed)
        self._changed.clear()
        return changed

    async def finish(self) -> None:
        """Wait until every job is done."""
        while self.unfinished:
            await self.progress()

    def notice(self, job: Job) -> None:
        if job.is_done:
            self.unfinished.discard(job)
        self._changed[job] = None
        self._event.set()


class Inflight:
    """Which handler waits for which job, and which jobs a request id means. Belongs to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._following: dict[Job, tuple[Following, Job]] = {}  # by the job that the scheduler has
        self._named: dict[str, Sequence[Job]] = {}

    def deliver(self, jobs: Sequence[Job]) -> None:
        """Called on the model thread, once per step."""
        states = [(job, job.copy() if job.stream else job) for job in jobs]
        self._loop.call_soon_threadsafe(self._notice, states)

    def _notice(self, states: Sequence[tuple[Job, Job]]) -> None:
        for submitted, state in states:
            if submitted in self._following:
                following, job = self._following[submitted]
                if job is not submitted:
                    job.become(state)
                following.notice(job)

    @contextmanager
    def submit(self, scheduler: Scheduler, named: Mapping[str, Sequence[Job]]) -> Iterator[Following]:
        """Run jobs within the block; leaving it aborts the unfinished ones.

        named: each id by which a client may abort, and its jobs.
        """
        for rid in named:
            if rid in self._named:
                raise RequestError(f"Duplicate request ID detected: {rid}")
        if not scheduler.is_alive:
            raise RequestError("the model thread of this server has died; its log says why", 503)
        jobs = list(dict.fromkeys(job for members in named.values() for job in members))
        following = Following(jobs)
        self._named.update(named)
        submitted = {job.copy() if job.stream else job: job for job in jobs}
        self._following.update({one: (following, job) for one, job in submitted.items()})
        try:
            for one in submitted:
                scheduler.submit(one)
            yield following
        finally:
            for job in following.unfinished:
                scheduler.abort(job.rid)
            for one in submitted:
                del self._following[one]
            for rid in named:
                del self._named[rid]

    def abort(self, scheduler: Scheduler, rid: str | None) -> None:
        """Abort the jobs of `rid`, if any are under way; None aborts all."""
        if rid is None:
            scheduler.abort(None)
            return
        for job in self._named.get(rid, ()):
            scheduler.abort(job.rid)

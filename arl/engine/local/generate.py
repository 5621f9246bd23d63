"""POST /generate (single, batch, n samples, streaming) and POST /classify, which asks a reward model for scores."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TypeVar

from aiohttp import web
from pydantic import Field, PlainValidator, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from arl.api.types import SamplingParams
from arl.engine.local.endpoint import Sampling, SamplingFields, Serving, extra_key, raise_if_failed
from arl.engine.local.job import Job, TextOptions
from arl.web.bodies import RequestBody, RequestError, must_be, parse
from arl.web.server import DONE, EventStream, event, json_response

_AS_MANY_AS_FIT = 1 << 62
T = TypeVar("T")


def _one_or_many(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return [check(one) for one in value] if isinstance(value, list) else check(value)


def _token_ids(value: Any) -> Any:
    prompts = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    if not all(isinstance(ids, list) and set(map(type, ids)) <= {int} for ids in prompts):
        raise must_be("a list of integers, or a list of such lists")
    return value


OneOrMany = Annotated[T, WrapValidator(_one_or_many)]
"""One value for all prompts of a batch, or a list with one for each. Read it by PromptBody.each."""


class SamplingBody(
    SamplingFields,
    takes_empty=True,
    ignored=("spaces_between_special_tokens", "stream_interval"),
    only={
        "beam_width": (1,),
        "frequency_penalty": (0,),
        "min_new_tokens": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
    },
):
    """A sampling_params object."""

    max_new_tokens: int = 128
    sampling_seed: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _keep_null(cls, values: Any) -> Any:
        """A null max_new_tokens asks for as many as fit; an absent one for 128."""
        if isinstance(values, dict) and values.get("max_new_tokens", 0) is None:
            return {**values, "max_new_tokens": _AS_MANY_AS_FIT}
        return values

    def read(self) -> Sampling:
        is_unlimited = self.max_new_tokens == _AS_MANY_AS_FIT
        return self.sampled(None if is_unlimited else self.max_new_tokens, self.sampling_seed)


class PromptBody(RequestBody):
    """One prompt or a batch of them, as token ids or as texts."""

    input_ids: Annotated[Any, PlainValidator(_token_ids)] = None
    text: OneOrMany[str] | None = None
    rid: OneOrMany[str] | None = None

    @property
    def _given(self) -> Any:
        return self.text if self.input_ids is None else self.input_ids

    @cached_property
    def is_batch(self) -> bool:
        return isinstance(self._given, list) and bool(self._given) and isinstance(self._given[0], str | list)

    @cached_property
    def prompts(self) -> Sequence[str | list[int]]:
        """Raises RequestError if the body has no prompt."""
        if self._given is None:
            raise RequestError("Either text, input_ids or input_embeds should be provided.")
        if not self._given:
            raise RequestError(f"{'text' if self.input_ids is None else 'input_ids'} cannot be empty.")
        return self._given if self.is_batch else [self._given]

    def each(self, name: str) -> Sequence[Any]:
        """A field's value for each prompt. Raises RequestError for a list of another length."""
        value, count = getattr(self, name), len(self.prompts)
        if not isinstance(value, list):
            return [value] * count
        if len(value) != count:
            raise RequestError(f"{name} has {len(value)} entries for a batch of {count} prompts; they must be equal")
        return value

    def rids(self) -> Sequence[str]:
        """An id for each prompt, made up if the body gives none. Raises RequestError."""
        count = len(self.prompts)
        rid: Any = self.rid
        if rid is None:
            return [uuid.uuid4().hex for _ in range(count)]
        if isinstance(rid, str):
            return [f"{rid}_{i}" for i in range(count)] if self.is_batch else [rid]
        if len(rid) != count:
            raise RequestError("The specified rids length mismatch with the batch_size for batch processing.")
        if repeated := sorted({one for one in rid if rid.count(one) > 1}):
            raise RequestError(f"Duplicate request IDs detected within the request: {repeated}")
        return rid


class GenerateBody(
    PromptBody,
    takes_empty=True,
    only={"top_logprobs_num": (0,)},
    ignored=(
        "background", "bootstrap_host", "bootstrap_port", "bootstrap_room", "conversation_id", "custom_labels",
        "data_parallel_rank", "external_trace_header", "log_metrics", "no_logs", "priority",
        "routed_dp_rank", "routing_key", "session_id",
    ),
):  # fmt: skip
    """The body of /generate. The ignored fields route, label or trace a request, or have no effect on this server."""

    sampling_params: OneOrMany[SamplingBody] = SamplingBody()
    return_logprob: OneOrMany[bool] = False
    logprob_start_len: OneOrMany[Annotated[int, Field(ge=-1)] | None] = None
    cache_salt: OneOrMany[str | None] = None
    extra_key: OneOrMany[str | None] = None
    lora_path: OneOrMany[str | None] = None
    stream: bool = False

    def samplings(self) -> Sequence[Sampling]:
        """One for each prompt. Raises RequestError."""
        given = self.sampling_params
        if isinstance(given, SamplingBody):
            return [given.read()] * len(self.prompts)
        samplings = [one.read() for one in self.each("sampling_params")]
        if len({sampling.n for sampling in samplings}) > 1:
            raise RequestError(
                "n differs between the sampling_params of one batch; it must be the same for all of them"
            )
        return samplings


class ClassifyBody(
    PromptBody,
    takes_empty=True,
    ignored=("background", "external_trace_header", "log_metrics", "priority", "routing_key", "sampling_params"),
):
    """The body of /classify."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A job of a /generate request, and the way to write its answer."""

    job: Job
    text: TextOptions
    return_logprob: bool


class Generate:
    """POST /generate."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        started = time.perf_counter()
        body = parse(GenerateBody, await request.read())
        planned, named = await self._plan(body)
        is_list = body.is_batch or len(planned) > 1
        with self._serving.inflight.submit(self._serving.scheduler, named) as following:
            if body.stream:
                stream = EventStream(request)
                index = {one.job: i for i, one in enumerate(planned)}
                while not following.is_done:
                    changed = sorted(index[job] for job in await following.progress())
                    events = [self._event(planned[i], i if is_list else None, started) for i in changed]
                    await stream.send("".join(map(event, events)))
                return await stream.end(DONE)
            await following.finish()
        raise_if_failed([one.job for one in planned])
        answers = [self._answer(one, started) for one in planned]
        return json_response(answers if is_list else answers[0])

    async def _plan(self, body: GenerateBody) -> tuple[list[_Planned], dict[str, Sequence[Job]]]:
        """The jobs in the order of their answers, and the ids by which a client may abort them."""
        planned: list[_Planned] = []
        named: dict[str, Sequence[Job]] = {}
        columns = (
            body.prompts,
            body.samplings(),
            body.rids(),
            *map(body.each, ("return_logprob", "logprob_start_len", "cache_salt", "extra_key", "lora_path")),
        )
        for prompt, sampling, rid, return_logprob, start, salt, key, adapter in zip(*columns, strict=True):
            input_ids = await self._serving.prompt_ids(prompt)
            job = Job(
                rid=rid,
                input_ids=input_ids,
                sampling=self._serving.fitted(sampling, len(input_ids)),
                stream=body.stream,
                extra_key=extra_key(salt or "", key or ""),
                adapter=adapter or "",
                logprob_start=_logprob_start(start, input_ids) if return_logprob else None,
                is_prefill_only=sampling.max_new_tokens == 0,
            )
            jobs = job.samples(sampling.n)
            named[rid] = jobs
            named.update({job.rid: [job] for job in jobs})
            planned += [_Planned(job, sampling.text, return_logprob) for job in jobs]
        if isinstance(body.rid, str):
            named[body.rid] = [one.job for one in planned]
        return planned, named

    def _answer(self, one: _Planned, started: float) -> dict[str, Any]:
        num_tokens = one.job.num_settled_tokens
        info = meta_info(one.job, num_tokens, one.return_logprob)
        info["weight_version"] = info["weight_version"] or self._serving.scheduler.weight_version
        if one.job.is_done:
            info["e2e_latency"] = time.perf_counter() - started
        answer = {"output_ids": one.job.output_ids[:num_tokens], "meta_info": info}
        if not self._serving.text.has_tokenizer:
            return answer
        return {"text": self._serving.text.decode(one.job, num_tokens, one.text), **answer}

    def _event(self, one: _Planned, index: int | None, started: float) -> Mapping[str, Any]:
        try:
            raise_if_failed([one.job])
        except RequestError as error:
            kind = "invalid_request_error" if error.status < 500 else "internal_error"
            return {"error": {"message": error.message, "type": kind, "code": error.status, "retryable": False}}
        answer = self._answer(one, started)
        return answer if index is None else {**answer, "index": index}


def _logprob_start(start: int | None, input_ids: Sequence[int]) -> int | None:
    """None and -1 mean no token of the prompt."""
    if start is None or start == -1:
        return None
    if start > len(input_ids):
        raise RequestError(
            f"logprob_start_len={start} is higher than the number of input tokens {len(input_ids)}. "
            "Please use a smaller logprob_start_len."
        )
    return start


def meta_info(job: Job, num_tokens: int, return_logprob: bool) -> dict[str, Any]:
    """The meta_info of a job's first `num_tokens` output tokens; Generate adds e2e_latency."""
    info: dict[str, Any] = {
        "id": job.rid,
        "finish_reason": job.finish_reason,
        "prompt_tokens": len(job.input_ids),
        "weight_version": job.versions[num_tokens - 1] if num_tokens else None,
        "num_retractions": job.num_retractions,
        "completion_tokens": num_tokens,
        "cached_tokens": job.cached_tokens,
        "weight_versions": job.version_spans(num_tokens),
    }
    if return_logprob:
        pairs = zip(job.output_logprobs[:num_tokens], job.output_ids[:num_tokens], strict=True)
        info["input_token_logprobs"] = _input_logprobs(job)
        info["output_token_logprobs"] = [(logprob, token, None) for logprob, token in pairs]
        info["output_token_logprobs_length"] = num_tokens
    return info


def _input_logprobs(job: Job) -> list[tuple[float | None, int, None]]:
    """From logprob_start on. The first entry has no logprob, as its context may not be computed. All, or none yet."""
    if job.logprob_start is None or job.lacks_input_logprobs:
        return []
    pairs = zip([None, *job.input_logprobs], job.input_ids[job.logprob_start :], strict=False)
    return [(logprob, token, None) for logprob, token in pairs]


def classifying(serving: Serving) -> Callable[[ClassifyBody], Any]:
    """POST /classify."""

    async def classify(body: ClassifyBody) -> Any:
        started = time.perf_counter()
        params = SamplingParams(max_new_tokens=1)
        prompts = zip(body.rids(), body.prompts, strict=True)
        jobs = [Job(rid=rid, input_ids=await serving.prompt_ids(one), sampling=params) for rid, one in prompts]
        with serving.inflight.submit(serving.scheduler, {job.rid: [job] for job in jobs}) as following:
            await following.finish()
        raise_if_failed(jobs)
        answers = [_scored(job, started) for job in jobs]
        return answers if body.is_batch else answers[0]

    return classify


def _scored(job: Job, started: float) -> dict[str, Any]:
    if not job.scores:
        raise RequestError(f"the request was aborted: {(job.finish_reason or {}).get('message')}", 503)
    info = {
        "id": job.rid,
        "finish_reason": job.finish_reason,
        "prompt_tokens": len(job.input_ids),
        "weight_version": job.versions[-1],
        "num_retractions": job.num_retractions,
        "e2e_latency": time.perf_counter() - started,
    }
    return {"embedding": job.scores, "meta_info": info}

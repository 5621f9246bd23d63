"""POST /generate: single, batch, n samples, streaming."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from aiohttp import web

from arl.api.types import SamplingParams
from arl.engine.local.body import ApiError
from arl.engine.local.endpoint import EventStream, Handler, Serving, json_response, read_body
from arl.engine.local.job import Job
from arl.engine.local.protocol import (
    GenerateRequest,
    check_logprob_start,
    meta_info,
    num_settled_tokens,
    parse_generate,
    raise_if_failed,
    read_prompts,
    read_rids,
    samples,
)
from arl.engine.local.text import TextOptions


@dataclass(frozen=True, slots=True)
class _Planned:
    """A job of a /generate request, with how its answer is written."""

    job: Job
    text: TextOptions
    return_logprob: bool


class Generate:
    """POST /generate."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        started = time.perf_counter()
        asked = parse_generate(await read_body(request))
        planned, named = await self._plan(asked)
        with self._serving.inflight.submit(self._serving.scheduler, named) as following:
            if asked.stream:
                stream = EventStream(request)
                index = {one.job: i for i, one in enumerate(planned)}
                while not following.is_done:
                    changed = sorted(index[job] for job in await following.progress())
                    await stream.send(*(self._event(asked, i, planned[i], started) for i in changed))
                return await stream.end()
            await following.finish()
        raise_if_failed([one.job for one in planned])
        answers = [self._answer(one, started) for one in planned]
        return json_response(answers if asked.answers_list else answers[0])

    async def _plan(self, asked: GenerateRequest) -> tuple[list[_Planned], dict[str, Sequence[Job]]]:
        planned: list[_Planned] = []
        named: dict[str, Sequence[Job]] = {}
        for i, (prompt, sampling, rid) in enumerate(zip(asked.prompts, asked.samplings, asked.rids, strict=True)):
            input_ids = prompt
            if isinstance(input_ids, str):
                input_ids = await self._serving.encode(lambda text=input_ids: self._serving.text.encode(text))
            params = sampling.for_prompt(input_ids, self._serving.limits)
            check_logprob_start(asked.logprob_starts[i], input_ids)
            job = Job(
                rid=rid,
                input_ids=input_ids,
                sampling=params,
                stream=asked.stream,
                extra_key=asked.extra_keys[i],
                adapter=asked.adapters[i],
                logprob_start=asked.logprob_starts[i],
                is_prefill_only=sampling.max_new_tokens == 0,
            )
            jobs = samples(job, sampling.n)
            named[rid] = jobs
            named.update({job.rid: [job] for job in jobs})
            planned += [_Planned(job, sampling.text, asked.return_logprob[i]) for job in jobs]
        if asked.rid is not None:
            named[asked.rid] = [one.job for one in planned]
        return planned, named

    def _answer(self, one: _Planned, started: float) -> dict[str, Any]:
        num_tokens = num_settled_tokens(one.job)
        info = meta_info(one.job, num_tokens, one.return_logprob)
        info["weight_version"] = info["weight_version"] or self._serving.scheduler.weight_version
        if one.job.is_done:
            info["e2e_latency"] = time.perf_counter() - started
        answer = {"output_ids": one.job.output_ids[:num_tokens], "meta_info": info}
        if not self._serving.text.has_tokenizer:
            return answer
        return {"text": self._serving.text.decode(one.job, num_tokens, one.text), **answer}

    def _event(self, asked: GenerateRequest, index: int, one: _Planned, started: float) -> Mapping[str, Any]:
        try:
            raise_if_failed([one.job])
        except ApiError as error:
            kind = "invalid_request_error" if error.status < 500 else "internal_error"
            return {"error": {"message": error.message, "type": kind, "code": error.status, "retryable": False}}
        answer = self._answer(one, started)
        return {**answer, "index": index} if asked.answers_list else answer


# POST /classify: what a reward model says of whole sequences, one or a batch of them.


_HARMLESS = frozenset((
    "background", "external_trace_header", "log_metrics", "priority", "routing_key", "sampling_params",
))  # fmt: skip


class Classify:
    """POST /classify."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        started = time.perf_counter()
        body = await read_body(request)
        prompts, is_batch = read_prompts(body)
        rids = read_rids(body, len(prompts), is_batch)
        body.finish(_HARMLESS)
        jobs = [await self._job(rid, prompt) for rid, prompt in zip(rids, prompts, strict=True)]
        with self._serving.inflight.submit(self._serving.scheduler, {job.rid: [job] for job in jobs}) as following:
            await following.finish()
        raise_if_failed(jobs)
        answers = [_answer(job, started) for job in jobs]
        return json_response(answers if is_batch else answers[0])

    async def _job(self, rid: str, prompt: Any) -> Job:
        if isinstance(prompt, str):
            prompt = await self._serving.encode(lambda: self._serving.text.encode(prompt))
        self._serving.limits.check_prompt(prompt)
        return Job(rid=rid, input_ids=prompt, sampling=SamplingParams(max_new_tokens=1))


def _answer(job: Job, started: float) -> dict[str, Any]:
    if not job.scores:
        raise ApiError(f"the request was aborted: {(job.finish_reason or {}).get('message')}", 503)
    info = {
        "id": job.rid,
        "finish_reason": job.finish_reason,
        "prompt_tokens": len(job.input_ids),
        "weight_version": job.versions[-1],
        "num_retractions": job.num_retractions,
        "e2e_latency": time.perf_counter() - started,
    }
    return {"embedding": job.scores, "meta_info": info}


def refusing(sentence: str) -> Handler:
    """In the place of an endpoint that the served kind of model has no answer for."""

    async def refuse(request: web.Request) -> web.StreamResponse:
        raise ApiError(sentence)

    return refuse


# What the server tells of itself.


_HEALTH_TIMEOUT_S = 20.0


class Info:
    """The endpoints that are asked and change nothing."""

    def __init__(self, serving: Serving, settings: dict[str, Any]) -> None:
        self._serving = serving
        self._settings = settings

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if self._serving.scheduler.is_alive else 503)

    async def health_generate(self, request: web.Request) -> web.StreamResponse:
        """200 if one token can be generated in time. A paused server is taken to be well if its thread lives."""
        scheduler = self._serving.scheduler
        if not scheduler.is_alive or scheduler.is_paused:
            return await self.health(request)
        rid = f"HEALTH_CHECK_{uuid.uuid4().hex}"
        job = Job(rid=rid, input_ids=[0], sampling=SamplingParams(max_new_tokens=1, temperature=0.0))
        try:
            with self._serving.inflight.submit(scheduler, {rid: [job]}) as following:
                await asyncio.wait_for(following.finish(), _HEALTH_TIMEOUT_S)
        except (TimeoutError, ApiError):
            return web.Response(status=503)
        return await self.health(request)

    async def model_info(self, request: web.Request) -> web.StreamResponse:
        config = self._serving.scheduler.model_config
        return json_response(
            {
                "model_path": self._serving.model_path,
                "served_model_name": self._serving.served_model_name,
                "tokenizer_path": self._serving.model_path,
                "is_generation": not self._serving.scheduler.is_scorer,
                "vocab_size": self._serving.limits.vocab_size,
                "weight_version": self._serving.scheduler.weight_version,
                "load_format": "auto",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": getattr(config, "model_type", None),
                "architectures": getattr(config, "architectures", None),
            }
        )

    async def server_info(self, request: web.Request) -> web.StreamResponse:
        scheduler = self._serving.scheduler
        state = {"weight_version": scheduler.weight_version, "is_paused": scheduler.is_paused, **self._load()}
        return json_response({**self._settings, "version": version("arl"), "internal_states": [state]})

    def _load(self) -> dict[str, int]:
        load = self._serving.scheduler.load_stats
        return {"num_running_reqs": load.running, "num_waiting_reqs": load.queued}

    async def loads(self, request: web.Request) -> web.StreamResponse:
        load = {"timestamp": time.time(), "dp_rank": 0, **self._load()}
        return json_response({"version": version("arl"), "loads": [load]})

    async def models(self, request: web.Request) -> web.StreamResponse:
        name = self._serving.served_model_name
        card = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "arl",
            "root": name,
            "parent": None,
            "max_model_len": self._serving.limits.context_length,
        }
        loaded = self._serving.scheduler.adapters.loaded.items()
        adapters = [{**card, "id": id, "root": root, "parent": name, "max_model_len": None} for id, root in loaded]
        return json_response({"object": "list", "data": [card, *adapters]})

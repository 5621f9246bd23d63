"""POST /classify: what a reward model says of whole sequences, one or a batch of them."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from arl.api.types import SamplingParams
from arl.engine.local.body import ApiError
from arl.engine.local.endpoint import Handler, Serving, json_response, read_body
from arl.engine.local.job import Job
from arl.engine.local.protocol import raise_if_failed, read_prompts, read_rids

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

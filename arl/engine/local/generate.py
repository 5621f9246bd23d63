"""POST /generate: single, batch, n samples, streaming."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from arl.engine.local.body import ApiError
from arl.engine.local.endpoint import EventStream, Serving, json_response, read_body
from arl.engine.local.job import Job
from arl.engine.local.protocol import (
    GenerateRequest,
    check_logprob_start,
    meta_info,
    num_settled_tokens,
    parse_generate,
    raise_if_failed,
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

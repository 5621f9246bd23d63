"""The endpoints that need the model or its tokenizer: /generate, /classify (a reward model's scores) and /tokenize.

handler --submit--> Inflight --> Scheduler, on the model thread --deliver--> Inflight: the handler goes on
"""

from __future__ import annotations

import asyncio
import time
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, get_args

import numpy as np
from pydantic import Field

from arl.api.grammar import Grammar, GrammarKind
from arl.api.types import SamplingParams
from arl.engine.local.model_thread import Scheduler
from arl.engine.local.sampler import Grammars
from arl.engine.local.sequences import Job
from arl.engine.local.vision import ArrivedImages, SentImage
from arl.runtime.http.bodies import BodyError, Integers, Name, RequestBody, RequestError, Strings

_MAX_STOP_TOKENS = 4096
_MAX_GRAMMAR = 1 << 20
"""Most characters of a grammar."""
_MAX_IMAGES = 4096
_MAX_REQUESTS = 1 << 16
"""Most requests that may wait or run at once."""
_MAX_CHARACTERS = 32
"""Most characters of a text to tokenize, per token of the model's context."""


_Place = Annotated[list[int], Field(min_length=2, max_length=2)]
GrammarText = Annotated[str, Field(max_length=_MAX_GRAMMAR)]


class SamplingBody(RequestBody):
    max_new_tokens: int
    """0 computes the prompt alone."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: Strings = ()
    stop_token_ids: Annotated[Integers, Field(max_length=_MAX_STOP_TOKENS)] = ()
    ignore_eos: bool = False
    sampling_seed: int | None = None
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    no_stop_trim: bool = False
    """Keep in the text the stop string or stop token that ended it."""
    json_schema: GrammarText | None = None
    regex: GrammarText | None = None
    structural_tag: GrammarText | None = None

    def params(self) -> SamplingParams:
        """Raises RequestError for impossible values."""
        kinds: tuple[GrammarKind, ...] = get_args(GrammarKind)
        texts: dict[GrammarKind, str] = {kind: text for kind in kinds if (text := getattr(self, kind)) is not None}
        if len(texts) > 1:
            first, second, *_ = texts
            raise RequestError(f"{first} and {second} are both set; a response can match only one grammar")
        try:
            return SamplingParams(
                max_new_tokens=self.max_new_tokens or 1,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                stop=tuple(self.stop),
                stop_token_ids=tuple(self.stop_token_ids),
                ignore_eos=self.ignore_eos,
                seed=self.sampling_seed,
                grammar=next((Grammar(kind=kind, text=text) for kind, text in texts.items()), None),
            )
        except ValueError as error:
            raise RequestError(str(error)) from None


class ClassifyBody(RequestBody):
    input_ids: Integers
    rid: Name = Field(default_factory=lambda: uuid.uuid4().hex)


class SettingsBody(RequestBody):
    """All of a request but its prompt and its name."""

    sampling_params: SamplingBody
    extra_key: Name = ""
    lora_path: Name = ""
    """The name of a loaded adapter."""
    continued_tokens: Annotated[int, Field(ge=0)] = 0
    """The number of tokens at the end of input_ids that belong to the response; its grammar continues after them."""
    return_sampling_mask: bool = False
    """Return what each token was sampled among, and its logprob among these."""
    return_routed_experts: bool = False
    """Return which experts computed each token but the last."""
    routed_experts_start_len: Annotated[int, Field(ge=0)] = 0
    """The first token whose experts are returned."""


class GenerateBody(SettingsBody, ClassifyBody, takes_empty=True):
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1)] = -1
    """The first token of the prompt whose logprob is returned; -1 for none of them."""
    image_data: Annotated[list[str], Field(max_length=_MAX_IMAGES)] = Field(default_factory=list)
    """The images of the prompt, in order: data URLs, or files in base64. Each has all its placeholders in input_ids."""
    image_places: Annotated[list[_Place], Field(max_length=_MAX_IMAGES)] = Field(default_factory=list)
    """(start, stop) of each image's placeholders. Without it, they are those after <|vision_start|>, in order."""


class TokenizeBody(RequestBody):
    """The body has either a prompt or messages."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    """Rendered by the chat template."""
    add_generation_prompt: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of the template."""
    add_special_tokens: bool = True


class Inflight:
    """The jobs that requests wait for. Belongs to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, scheduler: Scheduler) -> None:
        """Start the scheduler with `deliver`."""
        self.scheduler = scheduler
        self._loop = loop
        self._waiting: dict[str, tuple[Job, Callable[[Job], object]]] = {}
        self._preparing: dict[str, Job] = {}
        """Jobs whose grammar is not compiled yet, or whose images are not read. The model thread does not know them."""

    def deliver(self, jobs: Sequence[Job]) -> None:
        """Called on the model thread with jobs that have ended."""
        self._loop.call_soon_threadsafe(self._notice, jobs)

    def _notice(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            awaited, ended = self._waiting.get(job.rid, (None, None))
            if awaited is job and ended is not None:
                del self._waiting[job.rid]
                ended(job)

    def submit(self, job: Job, ended: Callable[[Job], object]) -> None:
        """Run a job; `ended` is called with it at its end, unless it is withdrawn. Raises RequestError."""
        if job.rid in self._waiting:
            raise RequestError(f"Duplicate request ID detected: {job.rid}")
        if len(self._waiting) >= _MAX_REQUESTS:
            raise RequestError(f"The request queue is full: this server takes {_MAX_REQUESTS} requests at once", 503)
        if not self.scheduler.is_alive:
            raise RequestError("the model thread of this server has died; its log says why", 503)
        self._waiting[job.rid] = job, ended
        self._preparing[job.rid] = job
        self._go_on(job)

    def _go_on(self, job: Job) -> None:
        """Let a job run if its grammar is compiled and its images are read, or fail if one of these was impossible."""
        if self._preparing.get(job.rid) is not job:
            return  # it was withdrawn or aborted meanwhile
        for part in (job.compiled, job.view):
            if part is not None and not part.done():
                part.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._go_on, job))
                return
            if part is not None and (error := part.exception()) is not None:
                del self._preparing[job.rid]
                job.abort(str(error), error.status if isinstance(error, RequestError) else 500)
                self._loop.call_soon(self._notice, [job])
                return
        del self._preparing[job.rid]
        self.scheduler.submit(job)

    def abort(self, rid: str) -> None:
        """Finish the job `rid` with its tokens so far."""
        if (job := self._preparing.pop(rid, None)) is not None:
            job.abort("Aborted by request")
            self._notice([job])
        else:
            self.scheduler.abort(rid)

    def withdraw(self, job: Job) -> None:
        """Abort a job, if it has not ended."""
        if self._waiting.get(job.rid, (None,))[0] is job:
            del self._waiting[job.rid]
            if self._preparing.pop(job.rid, None) is None:
                self.scheduler.abort(job.rid)

    async def run(self, job: Job) -> None:
        """Run a job to its end; cancelling the call aborts it. Raises RequestError if it fails."""
        ended = asyncio.Event()
        self.submit(job, lambda _: ended.set())
        try:
            await ended.wait()
        finally:
            self.withdraw(job)
        check_job(job)


def check_job(job: Job) -> None:
    """Raise RequestError if it failed."""
    if job.finish_reason and (status := job.finish_reason.get("status_code")):
        raise RequestError(job.finish_reason["message"], status)


class Generation:
    def __init__(self, inflight: Inflight) -> None:
        self._inflight = inflight
        self._scheduler = inflight.scheduler
        self._model = inflight.scheduler.runner
        self._tokenizer: Any = self._model.tokenizer
        self._tokenizing = ThreadPoolExecutor(1, "tokenizing")
        self._grammars = Grammars(self._tokenizer, self._model.vocab_size, self._model.eos_ids)
        self.images = ArrivedImages(self._model.tower)

    async def generate(self, body: GenerateBody) -> Any:
        start = body.logprob_start_len
        if start > len(body.input_ids):
            raise RequestError(
                f"logprob_start_len={start} is higher than the number of input tokens {len(body.input_ids)}."
            )
        images = self.images.sent(body.image_data, body.image_places, body.input_ids)
        job = self.job(body.rid, body.input_ids, body, body.sampling_params.params(), images)
        job.logprob_start = start if body.return_logprob and start >= 0 else None
        await self._inflight.run(job)
        info = self._meta_info(job, body.return_logprob)
        if body.return_sampling_mask:  # in SGLang's form
            masks = [] if job.sets is None else job.sets.kept_ids().lists(self._model.vocab_size)
            info["output_token_sampling_mask"] = masks
            info["output_token_sampling_logprobs"] = job.kept_logprobs
            info["output_token_sampling_mask_length"] = len(masks)
        text = {} if self._tokenizer is None else {"text": self.text(job, body.sampling_params)}
        return {"output_ids": job.output_ids, "meta_info": info, **text}

    def job(
        self,
        rid: str,
        input_ids: Sequence[int] | np.ndarray,
        body: SettingsBody,
        sampling: SamplingParams,
        images: Sequence[SentImage] = (),
    ) -> Job:
        """A request for a continuation. sampling: the body's. Raises RequestError if it is impossible."""
        if self._model.is_scorer:
            raise RequestError(
                "this server has a reward model, which scores text and cannot generate it; ask POST /classify"
            )
        self._check_prompt(input_ids)
        if sampling.stop and self._tokenizer is None:
            raise RequestError("stop needs a tokenizer, which this model was saved without; use stop_token_ids")
        num_prompt, limit = len(input_ids), self._model.context_length
        num_new = body.sampling_params.max_new_tokens
        if num_prompt + sampling.max_new_tokens > limit:
            raise RequestError(
                f"Requested token count exceeds the model's maximum context length of {limit} tokens: "
                f"{num_prompt} of the prompt and {num_new} new ones."
            )
        if body.return_sampling_mask and not (sampling.is_filtered or sampling.grammar):
            raise RequestError(
                "return_sampling_mask needs top_k, top_p or min_p at a temperature above 0, or a grammar: without them "
                "every token is sampled among the whole vocabulary"
            )
        if body.return_routed_experts and self._model.routers is None:
            raise RequestError("this server's model has no routers whose choice it could return (routed_experts)")
        if body.routed_experts_start_len > num_prompt:
            raise RequestError(
                f"routed_experts_start_len={body.routed_experts_start_len} is higher than the number of input tokens "
                f"{num_prompt}."
            )
        if body.continued_tokens >= num_prompt:
            raise RequestError(f"continued_tokens={body.continued_tokens} leaves no prompt of {num_prompt} input_ids")
        return Job(
            rid=rid,
            input_ids=input_ids.tolist() if isinstance(input_ids, np.ndarray) else input_ids,
            sampling=sampling,
            extra_key=body.extra_key,
            adapter=body.lora_path,
            is_prefill_only=num_new == 0,
            num_continued=body.continued_tokens,
            returns_kept_ids=body.return_sampling_mask,
            routes_from=body.routed_experts_start_len if body.return_routed_experts else None,
            compiled=self._grammars.compiled(sampling.grammar) if sampling.grammar else None,
            view=self.images.view(input_ids, images),
        )

    def _check_prompt(self, input_ids: Sequence[int] | np.ndarray) -> None:
        """Raise RequestError if the model lacks one of the tokens, or its context has no room for another."""
        vocab_size, context_length = self._model.vocab_size, self._model.context_length
        if not len(input_ids):
            raise RequestError("input_ids cannot be empty.")
        is_array = isinstance(input_ids, np.ndarray)
        lowest, highest = (input_ids.min(), input_ids.max()) if is_array else (min(input_ids), max(input_ids))
        if lowest < 0 or highest >= vocab_size:
            raise RequestError(f"input_ids holds a token outside the model's vocabulary of {vocab_size} tokens.")
        if len(input_ids) >= context_length:
            raise RequestError(
                f"The input ({len(input_ids)} tokens) is longer than the model's context length "
                f"({context_length} tokens)."
            )

    def text(self, job: Job, sampling: SamplingBody) -> str:
        matched = None if sampling.no_stop_trim else (job.finish_reason or {}).get("matched")
        ids = job.output_ids[:-1] if isinstance(matched, int) else job.output_ids
        text: str = self._tokenizer.decode(ids, skip_special_tokens=sampling.skip_special_tokens)
        return text.partition(matched)[0] if isinstance(matched, str) else text

    def _meta_info(self, job: Job, return_logprob: bool) -> dict[str, Any]:
        info: dict[str, Any] = {
            "id": job.rid,
            "finish_reason": job.finish_reason,
            "prompt_tokens": len(job.input_ids),
            "weight_version": job.versions[-1] if job.versions else self._scheduler.batch.weight_version,
            "completion_tokens": len(job.output_ids),
            "cached_tokens": job.cached_tokens,
            "e2e_latency": time.monotonic() - job.began,
            "weight_versions": job.version_spans(),
        }
        if return_logprob:
            given: Iterable[tuple[float | None, int]] = ()  # an abort may have come before all were computed
            if job.logprob_start is not None and not job.lacks_input_logprobs:
                given = zip([None, *job.input_logprobs], job.input_ids[job.logprob_start :], strict=False)
            sampled = zip(job.output_logprobs, job.output_ids, strict=True)
            info["input_token_logprobs"] = [(logprob, token, None) for logprob, token in given]
            info["output_token_logprobs"] = [(logprob, token, None) for logprob, token in sampled]
        if (routes := job.returned_routes()) is not None:
            info["routed_experts"] = b64encode(routes.experts.astype("<i4").tobytes()).decode()
        return info

    async def classify(self, body: ClassifyBody) -> Any:
        if not self._model.is_scorer:
            raise RequestError("this server has a language model; /classify is for ForSequenceClassification models")
        self._check_prompt(body.input_ids)
        job = Job(rid=body.rid, input_ids=body.input_ids, sampling=SamplingParams(max_new_tokens=1))
        await self._inflight.run(job)
        if not job.scores:
            raise RequestError(f"the request was aborted: {(job.finish_reason or {}).get('message')}", 503)
        return {"embedding": job.scores, "meta_info": self._meta_info(job, return_logprob=False)}

    async def tokenize(self, body: TokenizeBody) -> Any:
        if self._tokenizer is None:
            raise RequestError("this model was saved without a tokenizer; send input_ids to /generate instead")
        if (body.prompt is None) == (body.messages is None):
            raise BodyError("Exactly one of 'prompt' or 'messages' must be provided.")

        def encode() -> list[int]:
            text = body.prompt
            if text is None:
                if not self._tokenizer.chat_template:
                    raise RequestError("this model's tokenizer has no chat template; send prompt")
                options = body.chat_template_kwargs | {"add_generation_prompt": body.add_generation_prompt}
                try:
                    text = self._tokenizer.apply_chat_template(body.messages, tokenize=False, **options)
                except Exception as error:  # whatever the template raises about its messages
                    raise RequestError(f"the chat template does not take these messages: {error}") from error
            if len(text) > (most := _MAX_CHARACTERS * self._model.context_length):
                raise RequestError(f"prompt has {len(text)} characters; this model's context has room for {most}")
            return self._tokenizer.encode(text, add_special_tokens=body.add_special_tokens)

        tokens = await asyncio.get_running_loop().run_in_executor(self._tokenizing, encode)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self._model.context_length}

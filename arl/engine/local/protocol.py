"""What /generate may be asked and what it answers: SGLang's names and shapes, checked. No I/O."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from arl.api.types import SamplingParams
from arl.engine.local.body import ApiError, Body, MalformedError, SamplingBody, shown
from arl.engine.local.job import Job
from arl.engine.local.text import TextOptions

DEFAULT_MAX_NEW_TOKENS = 128
_HARMLESS = frozenset((
    "background", "bootstrap_host", "bootstrap_port", "bootstrap_room", "conversation_id", "custom_labels",
    "data_parallel_rank", "external_trace_header", "log_metrics", "no_logs", "priority",
    "routed_dp_rank", "routing_key", "session_id",
))  # fmt: skip
"""Fields of SGLang's that route, label or trace a request, or that change nothing here."""
_HARMLESS_SAMPLING = frozenset(("spaces_between_special_tokens", "stream_interval"))
_NEUTRAL_SAMPLING: Mapping[str, Any] = {
    "beam_width": 1,
    "frequency_penalty": 0,
    "min_new_tokens": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request must fit into: token ids below vocab_size, and prompt plus response within context_length.

    Without a tokenizer there is no text in which a stop string could be found.
    """

    vocab_size: int
    context_length: int
    has_tokenizer: bool = True

    def check_prompt(self, input_ids: Any) -> None:
        if not input_ids:
            raise ApiError("input_ids cannot be empty.")
        if not set(map(type, input_ids)) <= {int}:
            raise MalformedError(
                f"input_ids is {shown(input_ids)}; it must be a list of integers, or a list of such lists"
            )
        if min(input_ids) < 0 or max(input_ids) >= self.vocab_size:
            raise ApiError(f"input_ids holds a token outside the model's vocabulary of {self.vocab_size} tokens.")
        if len(input_ids) >= self.context_length:
            raise ApiError(
                f"The input ({len(input_ids)} tokens) is longer than the model's context length "
                f"({self.context_length} tokens)."
            )

    def fit(self, sampling: SamplingParams, num_prompt_tokens: int) -> None:
        total = num_prompt_tokens + sampling.max_new_tokens
        if total > self.context_length:
            raise ApiError(
                f"Requested token count exceeds the model's maximum context length of {self.context_length} tokens. "
                f"You requested a total of {total} tokens: {num_prompt_tokens} tokens from the input messages and "
                f"{sampling.max_new_tokens} tokens for the completion. Please reduce the number of tokens in the "
                "input messages or the completion to fit within the limit."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one prompt is continued: n samples, drawn by `params`; max_new_tokens None is as many as fit, and 0 none."""

    params: SamplingParams
    max_new_tokens: int | None
    n: int
    text: TextOptions

    def for_prompt(self, input_ids: Sequence[int], limits: Limits) -> SamplingParams:
        limits.check_prompt(input_ids)
        if self.params.stop and not limits.has_tokenizer:
            raise ApiError("stop needs a tokenizer, which this model was saved without; use stop_token_ids")
        if self.max_new_tokens is None:
            return replace(self.params, max_new_tokens=limits.context_length - len(input_ids))
        limits.fit(self.params, len(input_ids))
        return self.params


def build_params(**values: Any) -> SamplingParams:
    """SamplingParams whose complaints are the client's."""
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise ApiError(str(error)) from None


def parse_sampling(fields: Any) -> Sampling:
    """One `sampling_params` object of /generate."""
    body = SamplingBody({} if fields is None else fields, "sampling_params")
    max_new_tokens = body.integer("max_new_tokens", None if "max_new_tokens" in body else DEFAULT_MAX_NEW_TOKENS)
    sampling = Sampling(
        params=build_params(
            max_new_tokens=DEFAULT_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens or 1,
            temperature=body.number("temperature", 1.0),
            top_p=body.number("top_p", 1.0),
            top_k=body.integer("top_k", -1),
            min_p=body.number("min_p", 0.0),
            stop=body.strings("stop"),
            stop_token_ids=body.token_ids("stop_token_ids"),
            ignore_eos=body.flag("ignore_eos"),
            seed=body.integer("sampling_seed", None),
        ),
        max_new_tokens=max_new_tokens,
        n=body.integer("n", 1),
        text=TextOptions(
            skip_special_tokens=body.flag("skip_special_tokens", True), trim_stop=not body.flag("no_stop_trim")
        ),
    )
    if sampling.n < 1:
        raise ApiError(f"n is {sampling.n}; it must be at least 1")
    body.finish(_HARMLESS_SAMPLING, _NEUTRAL_SAMPLING)
    return sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A checked /generate body. Prompts are token ids or texts; the other lists have one entry for each of them."""

    prompts: Sequence[list[int] | str]
    samplings: Sequence[Sampling]
    rids: Sequence[str]
    return_logprob: Sequence[bool]
    logprob_starts: Sequence[int | None]
    extra_keys: Sequence[str]
    adapters: Sequence[str]
    rid: str | None
    is_batch: bool
    stream: bool

    @property
    def answers_list(self) -> bool:
        return self.is_batch or self.samplings[0].n > 1


def parse_generate(body: Body) -> GenerateRequest:
    """Read a /generate body; raises ApiError naming the field that is wrong."""
    prompts, is_batch = read_prompts(body)
    fields = body.value("sampling_params")
    shared = not isinstance(fields, list)
    samplings = [parse_sampling(fields)] * len(prompts) if shared else [parse_sampling(item) for item in fields]
    _check_count("sampling_params", samplings, prompts)
    if len({sampling.n for sampling in samplings}) > 1:
        raise ApiError("n differs between the sampling_params of one batch; it must be the same for all of them")
    rids = read_rids(body, len(prompts), is_batch)
    logprobs = body.value("return_logprob")
    flags = logprobs if isinstance(logprobs, list) else [bool(logprobs)] * len(prompts)
    _check_count("return_logprob", flags, prompts)
    starts = _logprob_starts(body.value("logprob_start_len"), prompts)
    request = GenerateRequest(
        prompts=prompts,
        samplings=samplings,
        rids=rids,
        return_logprob=flags,
        logprob_starts=[start if wanted else None for start, wanted in zip(starts, flags, strict=True)],
        extra_keys=_extra_keys(body, prompts),
        adapters=_strings(body, "lora_path", prompts),
        rid=body.value("rid") if is_batch and isinstance(body.value("rid"), str) else None,
        is_batch=is_batch,
        stream=body.flag("stream"),
    )
    body.finish(_HARMLESS, {"top_logprobs_num": 0})
    return request


def read_prompts(body: Body) -> tuple[Sequence[Any], bool]:
    """Token ids or texts, and whether they came as a batch."""
    ids, text = body.value("input_ids"), body.value("text")
    if ids is None and text is None:
        raise ApiError("Either text, input_ids or input_embeds should be provided.")
    if ids is None:
        if not isinstance(text, str) and not (isinstance(text, list) and all(isinstance(item, str) for item in text)):
            raise MalformedError(f"text is {shown(text)}; it must be a string or a list of strings")
        ids = text
    elif not isinstance(ids, list):
        raise MalformedError(f"input_ids is {shown(ids)}; it must be a list of integers, or a list of such lists")
    if not ids:
        raise ApiError("input_ids cannot be empty." if text is None else "text cannot be empty.")
    is_batch = isinstance(ids, list) and isinstance(ids[0], str if ids is text else list)
    if is_batch and ids is not text and not all(isinstance(item, list) for item in ids):
        raise MalformedError(f"input_ids is {shown(ids)}; it must be a list of integers, or a list of such lists")
    return (ids if is_batch else [ids]), is_batch


def _logprob_starts(given: Any, prompts: Sequence[Any]) -> list[int | None]:
    values = given if isinstance(given, list) else [given] * len(prompts)
    _check_count("logprob_start_len", values, prompts)
    for value in values:
        if value is not None and type(value) is not int:
            raise MalformedError(f"logprob_start_len is {shown(given)}; it must be an integer, or a list of integers")
        if value is not None and value < -1:
            raise ApiError(f"logprob_start_len is {value}; it must be -1 (of output tokens alone) or a prompt's token")
    return [None if value == -1 else value for value in values]


def check_logprob_start(start: int | None, input_ids: Sequence[int]) -> None:
    if start is not None and start > len(input_ids):
        raise ApiError(
            f"logprob_start_len={start} is higher than the number of input tokens {len(input_ids)}. "
            "Please use a smaller logprob_start_len."
        )


def _check_count(name: str, values: Sequence[Any], prompts: Sequence[Any]) -> None:
    if len(values) != len(prompts):
        raise ApiError(f"{name} has {len(values)} entries for a batch of {len(prompts)} prompts; they must be equal")


def _extra_keys(body: Body, prompts: Sequence[Any]) -> list[str]:
    """For each prompt whose cached prefixes it may share: those of the same salt and key, as one string."""
    columns = [_strings(body, name, prompts) for name in ("cache_salt", "extra_key")]
    return [extra_key(*values) for values in zip(*columns, strict=True)]


def _strings(body: Body, name: str, prompts: Sequence[Any]) -> list[str]:
    """A field's string for each prompt: one for all of them, or a list; empty where there is none."""
    given = body.value(name)
    values = [value or "" for value in given] if isinstance(given, list) else [given or ""] * len(prompts)
    _check_count(name, values, prompts)
    if not all(isinstance(value, str) for value in values):
        raise MalformedError(f"{name} is {shown(given)}; it must be a string, or a list of strings for a batch")
    return values


def extra_key(cache_salt: str, key: str) -> str:
    """What separates prefixes, made of SGLang's two fields for it."""
    return f"{cache_salt}/{key}" if cache_salt else key


def read_rids(body: Body, count: int, is_batch: bool) -> list[str]:
    """An id for each of `count` prompts, made up where none is given."""
    rid = body.value("rid")
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        return [f"{rid}_{i}" for i in range(count)] if is_batch else [rid]
    if not isinstance(rid, list) or not all(isinstance(item, str) for item in rid):
        raise MalformedError(f"rid is {shown(rid)}; it must be a string, or a list of strings for a batch")
    if len(rid) != count:
        raise ApiError("The specified rids length mismatch with the batch_size for batch processing.")
    if repeated := sorted({item for item in rid if rid.count(item) > 1}):
        raise ApiError(f"Duplicate request IDs detected within the request: {repeated}")
    return rid


def samples(job: Job, n: int) -> list[Job]:
    """n jobs like a fresh one; with a seed, sample i is drawn with seed + i, or all would be the same."""
    if n == 1:
        return [job]
    jobs = [job.copy() for _ in range(n)]
    for i, one in enumerate(jobs):
        one.rid = f"{job.rid}_{i}"
        if job.sampling.seed is not None:
            one.sampling = replace(job.sampling, seed=job.sampling.seed + i)
    return jobs


def num_settled_tokens(job: Job) -> int:
    """How many output tokens are whole: the model thread may be in the middle of adding one."""
    return min(len(job.output_ids), len(job.output_logprobs), len(job.versions))


def version_spans(versions: Sequence[str]) -> list[dict[str, Any]]:
    """Runs of equal versions: [{"version", "start", "end"}, ..] over output token positions, end exclusive."""
    bounds = [0, *(i for i, (a, b) in enumerate(pairwise(versions), 1) if a != b), len(versions)]
    return [{"version": versions[i], "start": i, "end": j} for i, j in pairwise(bounds) if j > i]


def meta_info(job: Job, num_tokens: int, return_logprob: bool) -> dict[str, Any]:
    """What is known of a job's first `num_tokens` output tokens; e2e_latency is added by who measures it."""
    versions = job.versions[:num_tokens]
    info: dict[str, Any] = {
        "id": job.rid,
        "finish_reason": job.finish_reason,
        "prompt_tokens": len(job.input_ids),
        "weight_version": versions[-1] if versions else None,
        "num_retractions": job.num_retractions,
        "completion_tokens": num_tokens,
        "cached_tokens": job.cached_tokens,
        "weight_versions": version_spans(versions),
    }
    if return_logprob:
        pairs = zip(job.output_logprobs[:num_tokens], job.output_ids[:num_tokens], strict=True)
        info["input_token_logprobs"] = _input_logprobs(job)
        info["output_token_logprobs"] = [(logprob, token, None) for logprob, token in pairs]
        info["output_token_logprobs_length"] = num_tokens
    return info


def _input_logprobs(job: Job) -> list[tuple[float | None, int, None]]:
    """From logprob_start on; the first has none, as its context may not have been looked at. All, or none yet."""
    if job.logprob_start is None or job.lacks_input_logprobs:
        return []
    pairs = zip([None, *job.input_logprobs], job.input_ids[job.logprob_start :], strict=False)
    return [(logprob, token, None) for logprob, token in pairs]


def raise_if_failed(jobs: Sequence[Job]) -> None:
    """A job that failed, rather than finished or was cancelled, is an error of the whole request."""
    for job in jobs:
        if job.finish_reason and (status := job.finish_reason.get("status_code")):
            raise ApiError(job.finish_reason["message"], status)

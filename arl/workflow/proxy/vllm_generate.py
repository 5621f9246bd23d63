"""POST /inference/v1/generate: tokens in, tokens out, as vLLM serves it and trainers of verifiers environments call it.

The program renders prompts itself, and the endpoint records their tokens unchanged. Each sampled token comes back with
its logprob, under the name `token_id:ID`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from arl.api.types import new_id
from arl.web.bodies import Integers, RequestBody, Strings, parse, validated
from arl.workflow.proxy.calls import CallAnswer, Seed, TokenCall, wrong
from arl.workflow.proxy.chat import usage
from arl.workflow.proxy.exchange import completing, openai_error, openai_error_event
from arl.workflow.proxy.policy import CallPolicy

_MAX_TOKEN_ID = (1 << 31) - 1
_MAX_SAMPLES = 128


class GenerateSampling(
    RequestBody,
    ignored=(
        "detokenize", "include_stop_str_in_output", "routed_experts_prompt_start", "skip_special_tokens",
        "spaces_between_special_tokens",
    ),
    only={
        "bad_words": ([],),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "logprobs": (0, 1),
        "min_tokens": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
    },
):  # fmt: skip
    """The sampling parameters of a request."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: Strings = ()
    stop_token_ids: Integers = ()
    ignore_eos: bool = False
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_SAMPLES)] = 1


class GenerateRequest(
    RequestBody,
    ignored=("cache_salt", "model", "priority"),
    only={"stream": (False,)},
    refused={
        "content_parts": "the model takes text alone",
        "features": "the model takes text alone",
        "kv_transfer_params": "the servers behind this endpoint keep their own caches",
    },
):
    """The body of a request."""

    token_ids: Annotated[Integers, Field(min_length=1)]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    request_id: str = Field(default_factory=new_id)
    return_token_ids: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateWire:
    """A call of this endpoint, and the way to write its answers."""

    asked: GenerateRequest
    call: TokenCall
    streams: bool = False

    def whole(self, answers: Sequence[CallAnswer]) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "token_ids": answer.response.output_ids,
                "logprobs": {"content": _logprobs(answer)},
                "finish_reason": answer.spoken.finish_reason,
            }
            for i, answer in enumerate(answers)
        ]
        prompt = {"prompt_token_ids": self.call.input_ids} if self.asked.return_token_ids else {}
        return {"request_id": self.asked.request_id, "choices": choices, "usage": usage(answers), **prompt}

    def events(self, answers: Sequence[CallAnswer]) -> Iterable[str]:
        raise AssertionError("a stream is refused when the request is read")


def _logprobs(answer: CallAnswer) -> list[dict[str, Any]]:
    response = answer.response
    return [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(response.output_ids, response.output_logprobs, strict=True)
    ]


def read(raw: bytes, policy: CallPolicy) -> GenerateWire:
    """The call in a request. Raises RequestError for a field that is wrong or cannot be honoured."""
    asked = parse(GenerateRequest, raw)
    given = validated(GenerateSampling, asked.sampling_params)
    call = TokenCall(
        input_ids=_token_ids("token_ids", asked.token_ids),
        sampling=policy.sampling_of(
            max_new_tokens=given.max_tokens,
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=-1 if given.top_k == 0 else given.top_k,
            min_p=given.min_p,
            stop=tuple(given.stop) or None,
            stop_token_ids=_token_ids("stop_token_ids", given.stop_token_ids) or None,
            ignore_eos=given.ignore_eos or None,
            seed=given.seed,
        ),
        n=given.n,
    )
    return GenerateWire(asked=asked, call=call)


def _token_ids(name: str, values: Sequence[int]) -> tuple[int, ...]:
    if values and not 0 <= min(values) <= max(values) <= _MAX_TOKEN_ID:
        raise wrong(name, values, "a list of token ids")
    return tuple(values)


ENDPOINT = completing("/inference/v1/generate", read, openai_error, openai_error_event)

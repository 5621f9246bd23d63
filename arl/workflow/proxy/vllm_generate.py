"""POST /inference/v1/generate: tokens in, tokens out, as vLLM serves it and trainers of verifiers environments call it.

The program renders prompts itself; they are recorded as the tokens they are. Each token comes back with its logprob,
named `token_id:ID`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from arl.api.types import new_id
from arl.workflow.proxy.calls import Answer, TokenCall
from arl.workflow.proxy.chat import usage
from arl.workflow.proxy.exchange import completing, openai_error, openai_error_event
from arl.workflow.proxy.fields import Fields, wrong
from arl.workflow.proxy.policy import MAX_SEED, CallPolicy

_MAX_TOKEN_ID = (1 << 31) - 1
_MAX_SAMPLES = 128
_HARMLESS = frozenset(("cache_salt", "model", "priority"))
_NEUTRAL = {"stream": (False,)}
_REFUSED = {
    "content_parts": "the model takes text alone",
    "features": "the model takes text alone",
    "kv_transfer_params": "the servers behind this endpoint keep their own caches",
}
_SAMPLING_HARMLESS = frozenset((
    "detokenize", "include_stop_str_in_output", "routed_experts_prompt_start", "skip_special_tokens",
    "spaces_between_special_tokens",
))  # fmt: skip
_SAMPLING_NEUTRAL = {
    "bad_words": ([],),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (0, 1),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateWire:
    """tells_prompt: whether the prompt's tokens are in the answer again."""

    call: TokenCall
    request_id: str
    tells_prompt: bool
    streams: bool = False

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "token_ids": answer.response.output_ids,
                "logprobs": {"content": _logprobs(answer)},
                "finish_reason": answer.spoken.finish_reason,
            }
            for i, answer in enumerate(answers)
        ]
        prompt = {"prompt_token_ids": self.call.input_ids} if self.tells_prompt else {}
        return {"request_id": self.request_id, "choices": choices, "usage": usage(answers), **prompt}

    def events(self, answers: Sequence[Answer]) -> Iterable[str]:
        raise AssertionError("a stream is refused when the request is read")


def _logprobs(answer: Answer) -> list[dict[str, Any]]:
    response = answer.response
    return [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(response.output_ids, response.output_logprobs, strict=True)
    ]


def read(fields: Fields, policy: CallPolicy) -> GenerateWire:
    """The call in a request. Raises RefusedCallError for what is wrong with it, or cannot be honoured."""
    given = Fields(fields.mapping("sampling_params"))
    top_k = given.integer("top_k")
    input_ids = _token_ids("token_ids", fields.value("token_ids"))
    if not input_ids:
        raise wrong("token_ids", input_ids, "the prompt's tokens, one at least")
    call = TokenCall(
        input_ids=input_ids,
        sampling=policy.sampling_of(
            max_new_tokens=given.integer("max_tokens"),
            temperature=given.number("temperature"),
            top_p=given.number("top_p"),
            top_k=-1 if top_k == 0 else top_k,
            min_p=given.number("min_p"),
            stop=given.strings("stop") or None,
            stop_token_ids=_token_ids("sampling_params.stop_token_ids", given.value("stop_token_ids", [])) or None,
            ignore_eos=given.flag("ignore_eos") or None,
            seed=given.integer("seed", at_least=0, at_most=MAX_SEED),
        ),
        n=given.integer("n", at_least=1, at_most=_MAX_SAMPLES) or 1,
    )
    wire = GenerateWire(
        call=call, request_id=fields.text("request_id", new_id()), tells_prompt=fields.flag("return_token_ids")
    )
    given.finish(_SAMPLING_HARMLESS, _SAMPLING_NEUTRAL)
    fields.finish(_HARMLESS, _NEUTRAL, _REFUSED)
    return wire


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    is_list = isinstance(value, list) and set(map(type, value)) <= {int}
    if not is_list or (value and not 0 <= min(value) <= max(value) <= _MAX_TOKEN_ID):
        raise wrong(name, value, "a list of token ids")
    return tuple(value)


ENDPOINTS = (completing("/inference/v1/generate", read, openai_error, openai_error_event),)

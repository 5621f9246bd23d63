"""POST /v1/completions: continues a text or tokens as they are, without a chat template."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from arl.api.types import new_id
from arl.endpoint.answer_forms import Asked
from arl.endpoint.calls import ONLY_SAMPLED, CallAnswer, CallPolicy, ChatCall, GivenText, usage
from arl.endpoint.chat import UNALTERED, WHY_UNALTERED, SampledBody
from arl.endpoint.exchange import Exchange, completing, openai_error, openai_error_event
from arl.runtime.http.bodies import refused, wrong
from arl.runtime.http.server import DONE, event


class CompletionRequest(
    SampledBody,
    ignored=("metadata", "user"),
    only={**UNALTERED, "best_of": (1,), "suffix": ("",)},
    refused={
        **WHY_UNALTERED,
        "best_of": "the best of several answers would be trained as if the model had said it at once",
        "suffix": "the model continues texts, and fills no gaps",
    },
    vital=("suffix",),
):
    """The body of a completion."""

    prompt: Any = None
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionWire:
    """A completion, and the way to write its answers."""

    asked: CompletionRequest
    call: ChatCall
    policy: CallPolicy
    """Its tokenizer gives the text of each token in logprobs."""

    def whole(self, answers: Sequence[CallAnswer]) -> dict[str, Any]:
        choices = [self._choice(i, answer) for i, answer in enumerate(answers)]
        return {**self._envelope(), "choices": choices, "usage": usage(answers)}

    def events(self, answers: Sequence[CallAnswer]) -> Iterable[str]:
        envelope = self._envelope()
        for i, answer in enumerate(answers):
            yield event({**envelope, "choices": [self._choice(i, answer)]})
        if self.asked.stream_options.include_usage:
            yield event({**envelope, "choices": [], "usage": usage(answers)})
        yield DONE

    def _choice(self, index: int, answer: CallAnswer) -> dict[str, Any]:
        before = answer.turn.prompt.new_messages[0]["content"] if self.asked.echo else ""
        logprobs = None
        if self.asked.logprobs is not None:
            texts = self.policy.token_texts(answer.response)
            logprobs = {
                "tokens": texts,
                "token_logprobs": list(answer.response.output_logprobs),
                "top_logprobs": None,
                "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)),
            }
        return {
            "index": index,
            "text": before + answer.spoken.content,
            "logprobs": logprobs,
            "finish_reason": answer.spoken.finish_reason,
        }

    def _envelope(self) -> dict[str, Any]:
        identity = {"id": f"cmpl-{new_id()}", "object": "text_completion"}
        return {**identity, "created": int(time.time()), "model": self.asked.model}


def _prompt(given: Any, tokenizer: Any) -> str | tuple[int, ...]:
    """The text or the tokens to continue; a list of one of them is that one."""
    one = given[0] if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list) else given
    if isinstance(one, str) and one:
        return one
    if isinstance(one, list) and one and set(map(type, one)) == {int}:
        if not all(0 <= token < len(tokenizer) for token in one):
            raise wrong("prompt", one, f"tokens of the model, below {len(tokenizer)}")
        return tuple(one)
    raise wrong("prompt", given, "a text or a list of token ids, not empty; send one prompt a call")


def read(exchange: Exchange) -> CompletionWire:
    asked, policy = exchange.parsed(CompletionRequest), exchange.session.policy
    if asked.logprobs:
        raise refused("logprobs", f"is {asked.logprobs}: {ONLY_SAMPLED}; set it to 0", can_be_dropped=True)
    where, output = asked.form()
    call = policy.call(
        (),
        (),
        Asked(output=output, where=where),
        n=asked.n,
        text=GivenText(
            prompt=_prompt(asked.prompt, policy.template.tokenizer), adds_special_tokens=asked.add_special_tokens
        ),
        **asked.sampling,
    )
    return CompletionWire(asked=asked, call=call, policy=policy)


ENDPOINT = completing("/v1/completions", read, openai_error, openai_error_event)

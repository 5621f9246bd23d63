"""Models that judge: a teacher that says how likely it finds given tokens, and a reward model that scores sequences.

Both are asked over HTTP by workflows, thousands of episodes through one client:

    async with TeacherClient("http://teacher:30000", tokenizer=tokenizer) as teacher: ...
    async with RewardModelClient("http://judge:30001", tokenizer=tokenizer) as judge: ...

Their settings are ModelServer's. Batching is the server's. SGLang serves a reward model with `--is-embedding`; the
embedded server sees by the model's architecture what it serves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from arl.api.errors import ModelError, RequestTimeoutError, RewardError, RewardTimeoutError, ServerError
from arl.workflow.model_server import ModelServer

_NOTHING_NEW = {"max_new_tokens": 0, "temperature": 1.0}


class TeacherClient(ModelServer):
    """Asks a language model for the logprobs of given tokens. tokenizer: the student's; the teacher must have its
    tokens.

    Its logprobs are at temperature 1, always: SGLang scales those of given tokens by none.
    """

    async def logprobs(self, token_ids: Sequence[int], start: int = 1) -> tuple[float, ...]:
        """ln p(token_ids[t] | token_ids[:t]) for each t >= start; 0.0 before, so the first token has 0.0 always.

        A later start costs less: what lies before it may be in the server's cache. Raises ModelError where the
        teacher has other tokens, ServerError, RequestTimeoutError.
        """
        if start < 1:
            raise ValueError(f"start is {start}; the first token has no context, so it must be at least 1")
        ids = list(token_ids)
        if start >= len(ids):
            return (0.0,) * len(ids)
        await self.check_tokens(ids)
        body = {
            "input_ids": ids,
            "sampling_params": _NOTHING_NEW,
            "return_logprob": True,
            "logprob_start_len": start - 1,
        }
        answer = await self.ask("/generate", body)
        return (0.0,) * start + _given_logprobs(answer, ids[start - 1 :], self.url)

    def _check_kind(self, info: Mapping[str, Any]) -> None:
        if not info.get("is_generation", True):
            raise ModelError(f"{self.url} has a reward model; a teacher must be a language model")


class RewardModelClient(ModelServer):
    """Asks a reward model for the score of a whole sequence. tokenizer: what makes the sequences' tokens."""

    async def score(self, token_ids: Sequence[int]) -> float:
        """The reward model's score of prompt and answer together, at the last token.

        Raises RewardError and RewardTimeoutError, which name the server and what it said.
        """
        ids = list(token_ids)
        if not ids:
            raise RewardError(f"there is nothing to score: no tokens for {self.url}")
        try:
            await self.check_tokens(ids)
            answer = await self.ask("/classify", {"input_ids": ids})
        except RequestTimeoutError as timeout:
            raise RewardTimeoutError(str(timeout)) from timeout
        except (ServerError, ModelError) as error:
            raise RewardError(str(error)) from error
        scores = answer.get("embedding") if isinstance(answer, dict) else None
        if not isinstance(scores, list) or len(scores) != 1 or not _is_finite(scores[0]):
            raise RewardError(f"{self.url} answered /classify with {str(answer)[:200]}; a reward is one finite number")
        return float(scores[0])

    def _check_kind(self, info: Mapping[str, Any]) -> None:
        if info.get("is_generation", False):
            raise ModelError(f"{self.url} has a language model; a reward model is served with --is-embedding")


def _given_logprobs(answer: Any, ids: Sequence[int], url: str) -> tuple[float, ...]:
    """The logprobs of ids[1:]. Raises ServerError unless the answer is about these very tokens.

    SGLang tells the vocabulary's last token as 0; its logprob is right.
    """
    try:
        entries = answer["meta_info"]["input_token_logprobs"]
        told = [entry[1] for entry in entries]
        logprobs = tuple(entry[0] for entry in entries[1:])
    except (KeyError, TypeError, IndexError) as error:
        raise ServerError(
            f"{url} answered /generate without input_token_logprobs, which a teacher must have"
        ) from error
    if len(told) != len(ids):
        raise ServerError(f"{url} gave logprobs of {len(told)} tokens for {len(ids)}; is its prompt cut off?")
    last = max(ids)
    other = [(sent, got) for sent, got in zip(ids, told, strict=True) if got != sent and (sent, got) != (last, 0)]
    if other:
        raise ServerError(f"{url} was sent token {other[0][0]} and gave the logprob of token {other[0][1]}")
    if not all(_is_finite(logprob) for logprob in logprobs):
        raise ServerError(f"{url} gave a logprob that is not a finite number")
    return logprobs


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

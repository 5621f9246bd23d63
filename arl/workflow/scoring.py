"""Models that judge: a teacher that says how likely it finds given tokens, and a reward model that scores sequences.

Both are asked over HTTP by workflows, thousands of episodes through one client:

    teacher = TeacherClient("http://teacher:30000", tokenizer=tokenizer)
    reward_model = RewardModelClient("http://judge:30001", tokenizer=tokenizer)

Batching is the server's. SGLang serves a reward model with `--is-embedding`; the embedded server sees by the model's
architecture what it serves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from arl.api.errors import ModelError, RequestTimeoutError, RewardError, RewardTimeoutError, ServerError
from arl.workflow.model_server import ModelServer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NOTHING_NEW = {"max_new_tokens": 0, "temperature": 1.0}


class TeacherClient:
    """Asks a language model for the logprobs of given tokens. Close it by `aclose`, or use it in `async with`.

    tokenizer: the student's; the teacher must have the same tokens, which is seen when it is first asked. A server
    that tells the size of its vocabulary (the embedded one) can do without: then sizes alone are compared.
    max_concurrent, timeout_s, retries: see ModelServer.

    Its logprobs are at temperature 1, always: SGLang scales those of given tokens by none.
    """

    def __init__(
        self,
        url: str,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        api_key: str | None = None,
        max_concurrent: int = 64,
        timeout_s: float = 120.0,
        retries: int = 4,
    ) -> None:
        self._server = ModelServer(
            url,
            tokenizer=tokenizer,
            api_key=api_key,
            max_concurrent=max_concurrent,
            timeout_s=timeout_s,
            retries=retries,
        )

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
        if not (await self._server.info()).get("is_generation", True):
            raise ModelError(f"{self._server.url} has a reward model; a teacher must be a language model")
        await self._server.check_tokens(ids)
        body = {
            "input_ids": ids,
            "sampling_params": _NOTHING_NEW,
            "return_logprob": True,
            "logprob_start_len": start - 1,
        }
        answer = await self._server.ask("/generate", body)
        return (0.0,) * start + _given_logprobs(answer, ids[start - 1 :], self._server.url)

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        await self._server.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class RewardModelClient:
    """Asks a reward model for the score of a whole sequence. Close it by `aclose`, or use it in `async with`.

    tokenizer: what makes the tokens; the reward model must have the same ones. max_concurrent, timeout_s, retries: see
    ModelServer. Raises RewardError and RewardTimeoutError, which name the server and what it said.
    """

    def __init__(
        self,
        url: str,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        api_key: str | None = None,
        max_concurrent: int = 64,
        timeout_s: float = 60.0,
        retries: int = 4,
    ) -> None:
        self._server = ModelServer(
            url,
            tokenizer=tokenizer,
            api_key=api_key,
            max_concurrent=max_concurrent,
            timeout_s=timeout_s,
            retries=retries,
        )

    async def score(self, token_ids: Sequence[int]) -> float:
        """The reward model's score of prompt and answer together, at the last token."""
        url, ids = self._server.url, list(token_ids)
        if not ids:
            raise RewardError(f"there is nothing to score: no tokens for {url}")
        try:
            if (await self._server.info()).get("is_generation", False):
                raise RewardError(f"{url} has a language model; a reward model is served with --is-embedding")
            await self._server.check_tokens(ids)
            answer = await self._server.ask("/classify", {"input_ids": ids})
        except RequestTimeoutError as timeout:
            raise RewardTimeoutError(str(timeout)) from timeout
        except (ServerError, ModelError) as error:
            raise RewardError(str(error)) from error
        scores = answer.get("embedding") if isinstance(answer, dict) else None
        if not isinstance(scores, list) or len(scores) != 1 or not _is_finite(scores[0]):
            raise RewardError(f"{url} answered /classify with {str(answer)[:200]}; a reward is one finite number")
        return float(scores[0])

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        await self._server.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


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

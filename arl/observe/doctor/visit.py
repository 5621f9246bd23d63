"""A Visit: one server under examination, what it is compared with, and the fixed texts that are sent to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from arl.api.errors import ModelError, ServerError
from arl.api.routed_experts import Routing
from arl.api.types import SamplingParams
from arl.observe.doctor.causes import Cause, Checked
from arl.observe.doctor.trainer_probe import Floats, Sampled, TrainerProbe

TEXTS = (
    "The quick brown fox jumps over the lazy dog.\n",
    "def fib(n):\n\treturn n if n < 2 else fib(n - 1) + fib(n - 2)  # O(2^n)",
    "Q: What is 17 * 23 - 4?\nA: Let us see. 17 * 23 is 391, so it is 387.",
    "Ein Gespräch über Bäume: « C'est déjà vu », 你好世界。 🙂 naïve café",
)
"""Prose, code, numbers, other scripts."""
CHATS: tuple[Sequence[dict[str, Any]], ...] = (
    ({"role": "user", "content": "What is 2 + 2?"},),
    ({"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Capital of France?"}),
    (
        {"role": "user", "content": "Say hi."},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "And now in French, please."},
    ),
)
"""With and without a system prompt, and with an earlier answer."""
_SHORT, _LEAST = 48, 4
"""Tokens of a short prompt, and the fewest: servers refuse an empty one, and one token has no logprob."""

EXACT = 2e-4
"""Nats, on average, where both sides compute in float32. The embedded server differs from the trainer by 1e-6, and
SGLang by 1e-5; other orders of summation on a GPU cost ten times that."""
ROUNDED = 0.1
"""Nats, on average: the most that bfloat16 explains. Models differ by 0.005 to 0.05."""

Encode = Callable[[str], list[int]]
"""A text in token ids, without special tokens around it."""


class ProbedServer(Protocol):
    """The requests of the doctor to one server of any kind. They raise ServerError."""

    address: str
    context_length: int | None
    """None if it does not say."""
    num_late: int
    """How many tokens of a response may have too new a label after an update in place (SGLang's overlap scheduler)."""

    async def tokens_of(self, text: str) -> list[int] | None:
        """None if the server has no tokenizer."""
        ...

    async def rendered(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None
    ) -> list[int] | None:
        """Messages as the server's chat template renders them. None if it cannot say."""
        ...

    async def score(self, token_ids: Sequence[int], adapter: str | None = None) -> Sequence[float]:
        """[T - 1] The logprob of each token except the first, at temperature 1, computed without a cached prefix."""
        ...

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        adapter: str | None = None,
        wants_kept_ids: bool = False,
        routing: Routing | None = None,
    ) -> Sampled:
        """Without a cached prefix. routing: ask for routes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The things that a run would use: its tokenizer, its sampling, its model."""

    encode: Encode
    special_tokens: Sequence[str]
    """Texts that are one token each."""
    render: Callable[[Sequence[Mapping[str, Any]]], list[int]] | None
    """Messages as the workflow renders them; None without a chat template."""
    template_options: Mapping[str, Any] | None
    sampling: SamplingParams | None
    """The workflow's own; None if the workflow does not show it."""
    model_context: int | None
    """The most tokens that the model has positions for."""
    context_length: int | None
    """The context length that the settings ask for; None if they do not."""
    is_exact: bool
    """Whether trainer, stored weights and server should all be float32."""
    replays_truncation: bool
    """Whether logprobs under top_p, top_k and min_p are those over the kept ids."""
    routing: Routing | None
    """The model's routing, if it is a mixture of experts whose routes the run replays."""
    adapters: bool
    """Whether each version is an adapter beside the model."""


@dataclass(slots=True, kw_only=True, eq=False)
class Visit:
    """Checks read it, and check_precision sets the limit. The Examination adds versions."""

    server: ProbedServer
    trainer: TrainerProbe
    subject: Subject
    prompts: Sequence[Sequence[int]]
    """Short ones."""
    scores: list[list[Floats]]
    """The trainer's logprobs of the prompts under each version so far. The server should hold the last one."""
    version: int
    adapter: str | None = None
    limit: float = ROUNDED
    """The largest mean difference of logprobs, in nats."""
    says_address: bool = False
    """Whether results name the server: there are several."""

    @property
    def room(self) -> int:
        """The most tokens of prompt and response together: the smaller of the server's and the model's context."""
        known = [n for n in (self.server.context_length, self.subject.model_context) if n is not None]
        return min(known, default=4096)

    @property
    def why(self) -> str:
        """The limit, and its reason."""
        return f"{self.limit:.2g} nats, for {'float32 on both sides' if self.limit == EXACT else 'the rounding seen'}"

    def ok(self, check: str, measured: str, threshold: str = "") -> Checked:
        return Checked(check=check, outcome="ok", server=self._name, measured=measured, threshold=threshold)

    def fault(self, check: str, cause: Cause, measured: str, threshold: str = "", detail: str = "") -> Checked:
        found = Checked(check=check, outcome="fault", server=self._name, measured=measured, threshold=threshold)
        return replace(found, cause=cause, detail=detail)

    def judged(
        self, is_ok: bool, check: str, cause: Cause, measured: str, threshold: str = "", detail: str = ""
    ) -> Checked:
        """`ok`, or else the fault."""
        return self.ok(check, measured, threshold) if is_ok else self.fault(check, cause, measured, threshold, detail)

    def skipped(self, check: str, why: str) -> Checked:
        return Checked(check=check, outcome="skipped", server=self._name, measured=why)

    @property
    def _name(self) -> str:
        return self.server.address if self.says_address else ""

    async def score(self) -> list[Floats]:
        """The server's logprobs of the prompts, one request at a time."""
        return [np.array(await self.server.score(ids, self.adapter), np.float64) for ids in self.prompts]

    async def sample_all(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Sampled]:
        """Concurrent responses, each with its own seed."""
        async with asyncio.TaskGroup() as tasks:
            made = [tasks.create_task(self.sample(ids, sampling, seed)) for seed, ids in enumerate(prompts)]
        return [task.result() for task in made]

    async def sample(self, ids: Sequence[int], sampling: SamplingParams, seed: int = 0) -> Sampled:
        """At most max_new_tokens tokens, fewer if the context is short. Raises ServerError if it has no room at all."""
        count = min(sampling.max_new_tokens, self.room_after(ids))
        return await self.server.sample(
            ids,
            replace(sampling, max_new_tokens=count, seed=seed),
            adapter=self.adapter,
            wants_kept_ids=self.subject.replays_truncation and sampling.is_filtered,
            routing=self.subject.routing,
        )

    def room_after(self, ids: Sequence[int]) -> int:
        """How many tokens an answer may have. Raises ServerError if none."""
        count = self.room - len(ids) - 8
        if count < 1:
            raise ServerError(f"{self.server.address} has no room for an answer to {len(ids)} tokens")
        return count


def gap(a: Sequence[Floats], b: Sequence[Floats]) -> float:
    """The mean absolute difference, in nats."""
    return float(np.abs(np.concatenate(a) - np.concatenate(b)).mean())


def short_prompts(encode: Encode, limit: int) -> list[list[int]]:
    """The texts as token ids. limit: the most tokens of each. Raises ModelError if one has hardly any."""
    prompts = [encode(text)[: max(_LEAST, min(_SHORT, limit))] for text in TEXTS]
    for text, ids in zip(TEXTS, prompts, strict=True):
        if len(ids) < _LEAST:
            raise ModelError(
                f"the model's tokenizer makes {len(ids)} tokens of {text!r}; the doctor's prompts need {_LEAST}"
            )
    return prompts


def long_prompt(encode: Encode, length: int) -> list[int]:
    """The texts, repeated and numbered so that no two places look alike."""
    ids: list[int] = []
    number = 0
    while len(ids) < max(length, _LEAST):
        ids += encode(f"{number}. {TEXTS[number % len(TEXTS)]}\n")
        number += 1
    return ids[: max(length, _LEAST)]

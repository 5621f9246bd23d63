"""A Visit: one server under examination, and everything that its checks compare it with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arl.api.errors import ServerError
from arl.api.routes import Routing
from arl.api.types import SamplingParams
from arl.doctor.causes import Cause
from arl.doctor.checked import Checked, Outcome
from arl.doctor.evidence import Tolerance
from arl.doctor.probes import Encode
from arl.doctor.reference_model import ReferenceModel
from arl.doctor.server_probe import Floats, Sampled, ServerFacts, ServerProbe
from arl.doctor.trainer_probe import TrainerProbe


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a run would use: its tokenizer, its sampling, its model."""

    encode: Encode
    decode: Callable[[Sequence[int]], str]
    """With special tokens."""
    special_tokens: Sequence[str]
    """Texts that are one token each."""
    render: Callable[[Sequence[Mapping[str, Any]]], list[int]] | None
    """Messages as the workflow renders them; None without a chat template."""
    template_options: Mapping[str, Any] | None
    sampling: SamplingParams | None
    """Of the workflow, if it shows it."""
    end_token_ids: frozenset[int]
    model_context: int | None
    """The most tokens that the model has positions for."""
    context_length: int | None
    """What the server should take, if the settings say."""
    is_exact: bool
    """Trainer, stored weights and server all are to be in float32."""
    replays_truncation: bool
    """Logprobs under top_p, top_k and min_p are those among the kept ids."""
    routing: Routing | None
    """How the model routes, if it is a mixture of experts whose routes the run replays."""
    adapters: bool
    """Each version is an adapter beside the model."""
    shards: Sequence[int]
    """How many ranks the trainer has."""

    @property
    def samplings(self) -> list[SamplingParams]:
        """What to sample with, all of the distribution: at the run's temperature, or at two of them."""
        known = [self.sampling.logprob_temperature] if self.sampling is not None else [1.0, 0.7]
        return [SamplingParams(temperature=t, ignore_eos=True, max_new_tokens=64) for t in known]


@dataclass(slots=True, kw_only=True)
class Trained:
    """The version that servers should hold now, and the trainer's logprobs under it."""

    version: int
    adapter: str | None = None
    short: list[Floats] = field(default_factory=list[Floats])
    """Of the short prompts."""


@dataclass(slots=True, kw_only=True, eq=False)
class Visit:
    """Checks of one server read all of it, and change nothing but what is named so."""

    server: ServerProbe
    facts: ServerFacts
    trainer: TrainerProbe
    reference: ReferenceModel
    subject: Subject
    tolerance: Tolerance
    prompts: Sequence[Sequence[int]]
    """Short ones."""
    trained: Trained
    says_address: bool = False
    """There are several servers."""

    @property
    def room(self) -> int:
        """The most tokens that prompt and response may have together, by the server's or else the model's word."""
        known = [n for n in (self.facts.context_length, self.subject.model_context) if n is not None]
        return min(known, default=4096)

    def ok(self, check: str, measured: str, threshold: str = "") -> Checked:
        return self._told(check, "ok", measured, threshold)

    def fault(self, check: str, cause: Cause, measured: str, threshold: str = "", detail: str = "") -> Checked:
        return self._told(check, "fault", measured, threshold, cause=cause, detail=detail)

    def skipped(self, check: str, why: str) -> Checked:
        return self._told(check, "skipped", why, "")

    def _told(self, check: str, outcome: Outcome, measured: str, threshold: str, **more: Any) -> Checked:
        server = self.server.address if self.says_address else ""
        return Checked(check=check, outcome=outcome, server=server, measured=measured, threshold=threshold, **more)

    async def sample_all(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, key: str = ""
    ) -> list[Sampled]:
        """At once, each with a seed of its own."""
        async with asyncio.TaskGroup() as tasks:
            made = [tasks.create_task(self.sample(ids, sampling, seed, key=key)) for seed, ids in enumerate(prompts)]
        return [task.result() for task in made]

    async def sample(self, ids: Sequence[int], sampling: SamplingParams, seed: int = 0, *, key: str = "") -> Sampled:
        """As many tokens as the context has room for, at most max_new_tokens. Raises ServerError without any."""
        count = min(sampling.max_new_tokens, self.room - len(ids) - 8)
        if count < 1:
            raise ServerError(f"{self.server.address} has no room for an answer to {len(ids)} tokens")
        values = {name: getattr(sampling, name) for name in _CARRIED}
        asked = SamplingParams(**values, max_new_tokens=count, seed=seed)
        return await self.server.sample(
            ids,
            asked,
            key=key,
            adapter=self.trained.adapter,
            wants_kept_ids=self.subject.replays_truncation,
            routing=self.subject.routing,
        )


_CARRIED = ("temperature", "top_p", "top_k", "min_p", "stop", "ignore_eos", "grammar")

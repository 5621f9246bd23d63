"""A Visit: one server under examination, and everything that it is compared with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arl.api.errors import ServerError
from arl.api.routed_experts import Routing
from arl.api.types import SamplingParams
from arl.observe.doctor.causes import Cause
from arl.observe.doctor.checked import Checked, Outcome
from arl.observe.doctor.evidence import Tolerance
from arl.observe.doctor.probes import Encode
from arl.observe.doctor.reference_model import ReferenceModel
from arl.observe.doctor.server_probe import Floats, Sampled, ServerFacts, ServerProbe
from arl.observe.doctor.trainer_probe import TrainerProbe


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The things that a run would use: its tokenizer, its sampling, its model."""

    encode: Encode
    decode: Callable[[Sequence[int]], str]
    """With special tokens."""
    special_tokens: Sequence[str]
    """Texts that are one token each."""
    render: Callable[[Sequence[Mapping[str, Any]]], list[int]] | None
    """Messages as the workflow renders them; None without a chat template."""
    template_options: Mapping[str, Any] | None
    sampling: SamplingParams | None
    """The workflow's own; None if the workflow does not show it."""
    end_token_ids: frozenset[int]
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
    shards: Sequence[int]
    """Possible numbers of parts of a weight, from the trainer's ranks."""

    @property
    def samplings(self) -> list[SamplingParams]:
        """Settings to sample the whole distribution: at the run's temperature, or at two if it is unknown."""
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
    """Checks read it. Only the Examination changes it: `trained` and `tolerance`."""

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
    """Whether results name the server: there are several."""

    @property
    def room(self) -> int:
        """The most tokens of prompt and response together: the smaller of the server's and the model's context."""
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
        """Concurrent responses, each with its own seed."""
        async with asyncio.TaskGroup() as tasks:
            made = [tasks.create_task(self.sample(ids, sampling, seed, key=key)) for seed, ids in enumerate(prompts)]
        return [task.result() for task in made]

    async def sample(self, ids: Sequence[int], sampling: SamplingParams, seed: int = 0, *, key: str = "") -> Sampled:
        """At most max_new_tokens tokens, fewer if the context is short. Raises ServerError if it has no room at all."""
        count = min(sampling.max_new_tokens, self.room_after(ids))
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

    def room_after(self, ids: Sequence[int]) -> int:
        """How many tokens an answer may have. Raises ServerError if none."""
        count = self.room - len(ids) - 8
        if count < 1:
            raise ServerError(f"{self.server.address} has no room for an answer to {len(ids)} tokens")
        return count


_CARRIED = ("temperature", "top_p", "top_k", "min_p", "stop", "ignore_eos", "grammar")

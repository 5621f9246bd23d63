"""One sequence to generate, as it travels between the HTTP side and the model thread."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from arl.api.types import SamplingParams


@dataclass(slots=True, eq=False)
class Job:
    """A request for one continuation of `input_ids`. The model thread alone writes the fields from output_ids on.

    Keys and values of its prompt are shared with jobs of the same extra_key alone.

    output_ids, output_logprobs and versions grow together: for each sampled token its id, its logprob (natural log,
    of logits / temperature, before top_p, top_k and min_p) and the weight version that sampled it. The stop token is
    among them. finish_reason is None while the job is queued or running, then SGLang's:
    {"type": "stop", "matched": id or string}, {"type": "length", "length": n} or
    {"type": "abort", "message": str, "status_code": 400 or 500 where the job failed}.
    """

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    stream: bool = False
    extra_key: str = ""

    output_ids: list[int] = field(default_factory=list[int])
    output_logprobs: list[float] = field(default_factory=list[float])
    versions: list[str] = field(default_factory=list[str])
    cached_tokens: int = 0
    num_retractions: int = 0
    finish_reason: dict[str, Any] | None = None

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    def copy(self) -> Job:
        """Another job in the same state, which no later step changes."""
        lists = (list(self.output_ids), list(self.output_logprobs), list(self.versions))
        return replace(self, output_ids=lists[0], output_logprobs=lists[1], versions=lists[2])

    def become(self, state: Job) -> None:
        """Take over what was generated in `state`."""
        self.output_ids, self.output_logprobs, self.versions = state.output_ids, state.output_logprobs, state.versions
        self.cached_tokens, self.num_retractions = state.cached_tokens, state.num_retractions
        self.finish_reason = state.finish_reason

    def abort(self, message: str, status_code: int | None = None) -> None:
        """Finish with what was generated so far. status_code says that the job failed, rather than was cancelled."""
        reason: dict[str, Any] = {"type": "abort", "message": message}
        if status_code is not None:
            reason["status_code"] = status_code
        self.finish_reason = reason

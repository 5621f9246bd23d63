"""One sequence to generate, as it travels between the HTTP side and the model thread."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from arl.api.types import SamplingParams


@dataclass(slots=True, eq=False)
class Job:
    """A request for one continuation of `input_ids`. The model thread alone writes the fields from output_ids on.

    adapter: the name of the one that it is generated under; empty for the model alone. Keys and values of its prompt
    are shared with jobs of the same adapter and extra_key alone. logprob_start: the logprobs of the prompt's own tokens
    after this one are wanted too. is_prefill_only: nothing is sampled; it ends with its prompt.

    input_logprobs: of input_ids[logprob_start + 1:], of the logits as they are, whatever the temperature.
    scores: what a reward model says of the prompt, one for each label, by the weights of the one version in `versions`.

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
    adapter: str = ""
    logprob_start: int | None = None
    is_prefill_only: bool = False

    input_logprobs: list[float] = field(default_factory=list[float])
    scores: list[float] = field(default_factory=list[float])
    output_ids: list[int] = field(default_factory=list[int])
    output_logprobs: list[float] = field(default_factory=list[float])
    versions: list[str] = field(default_factory=list[str])
    cached_tokens: int = 0
    num_retractions: int = 0
    finish_reason: dict[str, Any] | None = None

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_input_logprobs(self) -> int:
        """How many of its prompt's tokens have a logprob that is wanted."""
        return 0 if self.logprob_start is None else max(0, len(self.input_ids) - 1 - self.logprob_start)

    @property
    def lacks_input_logprobs(self) -> bool:
        return len(self.input_logprobs) < self.num_input_logprobs

    def scored(self, start: int, end: int) -> range:
        """Of the prompt's positions start..end-1, those whose logits give a logprob that is wanted and not there."""
        if self.logprob_start is None or not self.lacks_input_logprobs:
            return range(0)
        return range(max(start, self.logprob_start), min(end, len(self.input_ids) - 1))

    def copy(self) -> Job:
        """Another job in the same state, which no later step changes."""
        lists = (list(self.output_ids), list(self.output_logprobs), list(self.versions), list(self.input_logprobs))
        return replace(self, output_ids=lists[0], output_logprobs=lists[1], versions=lists[2], input_logprobs=lists[3])

    def become(self, state: Job) -> None:
        """Take over what was generated in `state`."""
        self.output_ids, self.output_logprobs, self.versions = state.output_ids, state.output_logprobs, state.versions
        self.input_logprobs = state.input_logprobs
        self.cached_tokens, self.num_retractions = state.cached_tokens, state.num_retractions
        self.finish_reason = state.finish_reason

    def abort(self, message: str, status_code: int | None = None) -> None:
        """Finish with what was generated so far. status_code says that the job failed, rather than was cancelled."""
        reason: dict[str, Any] = {"type": "abort", "message": message}
        if status_code is not None:
            reason["status_code"] = status_code
        self.finish_reason = reason

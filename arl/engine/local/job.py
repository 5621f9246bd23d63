"""A job: one sequence to generate, passed between the HTTP side and the model thread; and the text of its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from arl.api.types import SamplingParams

_INCOMPLETE = "\ufffd"
"""A tokenizer decodes the first bytes of an unfinished character to this."""


@dataclass(slots=True, eq=False)
class Job:
    """A request for one continuation of `input_ids`. Only the model thread writes the fields from input_logprobs on.

    output_ids, output_logprobs and versions grow together, one entry for each sampled token.
    """

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    stream: bool = False
    extra_key: str = ""
    """Only jobs of the same extra_key and adapter share keys and values of a prompt."""
    adapter: str = ""
    """The name of the adapter that computes it; empty for the model alone."""
    logprob_start: int | None = None
    """Also compute the logprobs of the prompt's tokens after this index."""
    is_prefill_only: bool = False
    """The job samples nothing and ends with its prompt."""

    input_logprobs: list[float] = field(default_factory=list[float])
    """Logprobs of input_ids[logprob_start + 1:], from the unscaled logits, whatever the temperature."""
    scores: list[float] = field(default_factory=list[float])
    """A reward model's score of the prompt for each label, under the one version in `versions`."""
    output_ids: list[int] = field(default_factory=list[int])
    """The sampled tokens, with the stop token."""
    output_logprobs: list[float] = field(default_factory=list[float])
    """Natural log, of logits / temperature, before top_p, top_k and min_p."""
    versions: list[str] = field(default_factory=list[str])
    """The weight version that sampled each token."""
    cached_tokens: int = 0
    num_retractions: int = 0
    finish_reason: dict[str, Any] | None = None
    """None while it is queued or runs, then SGLang's: {"type": "stop", "matched": id or string},
    {"type": "length", "length": n} or {"type": "abort", "message": str, "status_code": 400 or 500 if it failed}."""

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_input_logprobs(self) -> int:
        """How many of its prompt's tokens need a logprob."""
        return 0 if self.logprob_start is None else max(0, len(self.input_ids) - 1 - self.logprob_start)

    @property
    def lacks_input_logprobs(self) -> bool:
        return len(self.input_logprobs) < self.num_input_logprobs

    @property
    def num_settled_tokens(self) -> int:
        """How many output tokens are complete; the model thread may be adding another."""
        return min(len(self.output_ids), len(self.output_logprobs), len(self.versions))

    def scored(self, start: int, end: int) -> range:
        """The prompt's positions in start..end-1 whose logits give a needed and still missing logprob."""
        if self.logprob_start is None or not self.lacks_input_logprobs:
            return range(0)
        return range(max(start, self.logprob_start), min(end, len(self.input_ids) - 1))

    def version_spans(self, num_tokens: int) -> list[dict[str, Any]]:
        """Runs of equal versions among its first output tokens: [{"version", "start", "end"}, ..], end exclusive."""
        versions = self.versions[:num_tokens]
        bounds = [0, *(i for i, (a, b) in enumerate(pairwise(versions), 1) if a != b), len(versions)]
        return [{"version": versions[i], "start": i, "end": j} for i, j in pairwise(bounds) if j > i]

    def copy(self) -> Job:
        """A copy that no later step changes."""
        lists = (list(self.output_ids), list(self.output_logprobs), list(self.versions), list(self.input_logprobs))
        return replace(self, output_ids=lists[0], output_logprobs=lists[1], versions=lists[2], input_logprobs=lists[3])

    def become(self, state: Job) -> None:
        """Take over the tokens generated in `state`."""
        self.output_ids, self.output_logprobs, self.versions = state.output_ids, state.output_logprobs, state.versions
        self.input_logprobs = state.input_logprobs
        self.cached_tokens, self.num_retractions = state.cached_tokens, state.num_retractions
        self.finish_reason = state.finish_reason

    def samples(self, n: int) -> list[Job]:
        """n jobs like this fresh one. With a seed, sample i uses seed + i, so that the samples differ."""
        if n == 1:
            return [self]
        jobs = [self.copy() for _ in range(n)]
        for i, job in enumerate(jobs):
            job.rid = f"{self.rid}_{i}"
            if job.sampling.seed is not None:
                job.sampling = replace(job.sampling, seed=job.sampling.seed + i)
        return jobs

    def abort(self, message: str, status_code: int | None = None) -> None:
        """Finish with the tokens so far. A status_code means that the job failed; without one it was cancelled."""
        reason: dict[str, Any] = {"type": "abort", "message": message}
        if status_code is not None:
            reason["status_code"] = status_code
        self.finish_reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How output tokens become text."""

    skip_special_tokens: bool = True
    trim_stop: bool = True
    """Leave out the stop string or stop token that ended the job."""


class TextError(ValueError):
    """The model has no tokenizer or no chat template, or the template cannot render these messages."""


class Text:
    """A model's tokenizer, as the endpoints need it; None if the model has none and serves only token ids."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._known = tokenizer
        self._pieces: dict[int, str] = {}

    @property
    def has_tokenizer(self) -> bool:
        return self._known is not None

    def check(self) -> None:
        """Raise TextError if the model has no tokenizer."""
        if self._known is None:
            raise TextError("this model was saved without a tokenizer; send input_ids to /generate instead")

    @property
    def _tokenizer(self) -> Any:
        self.check()
        return self._known

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises TextError."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def chat_prompt(self, messages: list[Any], tools: list[Any] | None, options: Mapping[str, Any]) -> list[int]:
        """The token ids of a conversation, by the tokenizer's own chat template. Raises TextError."""
        if not self._tokenizer.chat_template:
            raise TextError("this model's tokenizer has no chat template; send input_ids to /generate instead")
        try:
            return self._tokenizer.apply_chat_template(messages, tools=tools, return_dict=False, **options)
        except Exception as error:  # a template is a program and raises what it likes
            raise TextError(f"the chat template refused these messages: {error}") from error

    def token_text(self, token_id: int) -> str:
        """The text of a single token."""
        if token_id not in self._pieces:
            self._pieces[token_id] = self._tokenizer.decode([token_id])
        return self._pieces[token_id]

    def decode(self, job: Job, num_tokens: int, options: TextOptions) -> str:
        """The text of a job's first `num_tokens` output tokens.

        While the job runs, the text lacks the end that a later token may still change: an unfinished character, or
        the possible beginning of a stop string.
        """
        matched = (job.finish_reason or {}).get("matched") if options.trim_stop else None
        ids = job.output_ids[:num_tokens]
        if isinstance(matched, int):
            ids = ids[:-1]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=options.skip_special_tokens)
        if isinstance(matched, str):
            return text.partition(matched)[0]
        return text if job.is_done else _settled(text, job.sampling.stop)


def _settled(text: str, stops: Sequence[str]) -> str:
    text = text.rstrip(_INCOMPLETE)
    held = max((k for stop in stops for k in range(1, len(stop)) if text.endswith(stop[:k])), default=0)
    return text[: len(text) - held]

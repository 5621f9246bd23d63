"""The sequences of a batch, the prefixes that they share, and the plan of one step: which tokens it computes.

rows: [ decoding ... | prefilling ... ] --plan--> tokens: [ one of each decoding row | chunks of prompts ]
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch

from arl.api.routed_experts import Routes
from arl.api.sampling_mask import SetTable
from arl.api.types import SamplingParams
from arl.engine.local.adapters import Adapter
from arl.engine.local.runner import StepInput
from arl.engine.local.sampler import Constraint
from arl.engine.local.slot_attention import Chunk
from arl.engine.local.vision import ShownImages, Tower, View

_BLOCK = 16
"""Prefixes that can be rewound are indexed at multiples of this many tokens, and at a sequence's end."""


@dataclass(slots=True, eq=False)
class Job:
    """A request for one continuation of `input_ids`. Only the model thread writes the fields from input_logprobs on.

    output_ids, output_logprobs, kept_logprobs and versions grow together, one entry for each sampled token.
    """

    rid: str
    input_ids: Sequence[int]
    sampling: SamplingParams
    extra_key: str = ""
    """Only jobs of the same extra_key and adapter share keys and values of a prompt."""
    adapter: str = ""
    """The name of the adapter that computes it; empty for the model alone."""
    logprob_start: int | None = None
    """Also compute the logprobs of the prompt's tokens after this index."""
    is_prefill_only: bool = False
    """The job samples nothing and ends with its prompt."""
    num_continued: int = 0
    """The number of tokens at the end of input_ids that belong to the response: its grammar continues after them."""
    returns_kept_ids: bool = False
    """Note what each token was sampled among."""
    compiled: Future[Any] | None = None
    """The compiled grammar that the response must match, if any; done when the model thread gets the job."""
    view: Future[View] | None = None
    """The images of the prompt, if any; done when the model thread gets the job."""

    input_logprobs: list[float] = field(default_factory=list[float])
    """Logprobs of input_ids[logprob_start + 1:], from the unscaled logits, whatever the temperature."""
    scores: list[float] = field(default_factory=list[float])
    """A reward model's score of the prompt for each label, under the one version in `versions`."""
    output_ids: list[int] = field(default_factory=list[int])
    """The sampled tokens, with the stop token."""
    output_logprobs: list[float] = field(default_factory=list[float])
    """Natural log, of logits / temperature and after a grammar, before top_p, top_k and min_p."""
    kept_logprobs: list[float] = field(default_factory=list[float])
    """Among the kept ids, after top_p, top_k and min_p; only if these are returned."""
    versions: list[str] = field(default_factory=list[str])
    """The weight version that sampled each token."""
    routes_from: int | None = None
    """The first token whose routes are returned; None: none are."""
    experts: np.ndarray | None = None
    """[the first tokens of prompt and output, layers, experts per token]: the routes that the job will not compute
    anew, as the first pass over a token counts."""
    sets: SetTable | None = None
    """The ids from which each token was sampled, if they are to be returned."""
    cached_tokens: int = 0
    began: float = field(default_factory=time.monotonic)
    """When it came, by the monotonic clock."""
    finish_reason: dict[str, Any] | None = None
    """None while it is queued or runs, then SGLang's: {"type": "stop", "matched": id or string},
    {"type": "length", "length": n} or {"type": "abort", "message": str, "status_code": 400 or 500 if it failed}."""

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    @property
    def lacks_input_logprobs(self) -> bool:
        return (
            self.logprob_start is not None and self.logprob_start + len(self.input_logprobs) < len(self.input_ids) - 1
        )

    def scored(self, start: int, end: int) -> range:
        """The prompt's positions in start..end-1 whose logits give a needed and still missing logprob."""
        if self.logprob_start is None or not self.lacks_input_logprobs:
            return range(0)
        return range(max(start, self.logprob_start), min(end, len(self.input_ids) - 1))

    def version_spans(self) -> list[dict[str, Any]]:
        """Runs of equal versions among its output tokens: [{"version", "start", "end"}, ..], end exclusive."""
        spans: list[dict[str, Any]] = []
        end = 0
        for version, run in groupby(self.versions):
            start, end = end, end + len(list(run))
            spans.append({"version": version, "start": start, "end": end})
        return spans

    def settle_routes(self, experts: np.ndarray) -> None:
        """experts: of the first tokens of prompt and output. Of tokens that were known before, the old routes stay:
        what was sampled after them was sampled under these."""
        known = experts[:0] if self.experts is None else self.experts
        self.experts = np.concatenate([known, experts[len(known) :]])

    def returned_routes(self) -> Routes | None:
        """The routes of the tokens from routes_from on, without the last; None if they were not asked for, or are
        unknown."""
        if self.routes_from is None or self.experts is None:
            return None
        return Routes.of(self.experts[self.routes_from : len(self.input_ids) + len(self.output_ids) - 1])

    def abort(self, message: str, status_code: int | None = None) -> None:
        """Finish with the tokens so far. A status_code means that the job failed; without one it was cancelled."""
        status = {} if status_code is None else {"status_code": status_code}
        self.finish_reason = {"type": "abort", "message": message, **status}


@dataclass(slots=True, eq=False)
class Prefix:
    """Tokens that a sequence may begin with, under one extra key."""

    tokens: list[int]
    num_computed: int = 0
    """How many first tokens have their keys and values in the cache, or in `kv`."""
    extra_key: str = ""
    experts: np.ndarray | None = field(default=None, kw_only=True)
    """[at least num_computed, layers, experts per token]: its tokens' routes, in a mixture of experts."""
    keys: list[tuple[int, int]] = field(kw_only=True)
    """(length, key of the first `length` tokens), as PrefixIndex.keys makes them."""


@dataclass(slots=True, eq=False)
class Retained(Prefix):
    kv: Any = field(kw_only=True)
    """Its exported cache row, of all its tokens."""


class PrefixIndex:
    """Finds running and retained prefixes by tokens. max_bytes: for retained ones; the least recently used go first.

    can_rewind: the first tokens of a prefix serve without the others. Else a retained prefix serves only whole, and a
    running one only before its last token; both are indexed by their ends.
    """

    def __init__(self, max_bytes: int, *, can_rewind: bool = True) -> None:
        self._max_bytes = max_bytes
        self._can_rewind = can_rewind
        self._num_bytes = 0
        self._by_key: dict[int, Prefix] = {}
        self._retained: OrderedDict[Retained, None] = OrderedDict()

    def find(self, row: Row) -> tuple[Prefix, int] | None:
        """The prefix of its extra key that shares most tokens with a row, and the number of shared tokens."""
        best, length = None, 0
        for indexed_length, key in row.keys:
            if (prefix := self._by_key.get(key)) and prefix.extra_key == row.extra_key:
                end = len(prefix.tokens) - (not isinstance(prefix, Retained))
                if self._can_rewind or end <= min(indexed_length, row.num_reusable):
                    best, length = prefix, indexed_length
        if best is None or best.tokens[:length] != row.tokens[:length]:  # hashes may be equal by chance
            return None
        end = min(len(best.tokens), len(row.tokens))
        while length < end and best.tokens[length] == row.tokens[length]:
            length += 1
        if isinstance(best, Retained):
            self._retained.move_to_end(best)
        return best, length

    def add(self, prefix: Prefix) -> None:
        """Make a prefix findable by its keys; retain it if it brings its keys and values."""
        for _, key in prefix.keys if self._can_rewind else prefix.keys[-1:]:
            self._by_key[key] = prefix
        if isinstance(prefix, Retained):
            self._retained[prefix] = None
            self._num_bytes += prefix.kv.nbytes
            while self._num_bytes > self._max_bytes:
                self.remove(next(iter(self._retained)))

    def remove(self, prefix: Prefix) -> None:
        for _, key in prefix.keys:
            if self._by_key.get(key) is prefix:
                del self._by_key[key]
        if isinstance(prefix, Retained):
            del self._retained[prefix]
            self._num_bytes -= prefix.kv.nbytes

    def clear(self) -> None:
        self._by_key.clear()
        self._retained.clear()
        self._num_bytes = 0

    def keys(
        self, tokens: Sequence[int], extra_key: str, begun: Sequence[tuple[int, int]] = ()
    ) -> list[tuple[int, int]]:
        """(length, key of the first `length` tokens) at the end of each block and of the sequence.

        begun: keys of the same sequence when it was shorter. They stay, also the one of its end then.
        """
        block = _BLOCK if self._can_rewind else 1
        keys = list(begun)
        first, key = 0, hash(extra_key)
        for length, known in reversed(begun):
            if length % block == 0:
                first, key = length, known
                break
        for start in range(first, len(tokens), block):
            end = min(start + block, len(tokens))
            key = hash((key, *tokens[start:end]))
            keys.append((end, key))
        return keys


@dataclass(slots=True, eq=False)
class Row(Prefix):
    """A sequence in the batch, or waiting for a place. `tokens`: prompt and output."""

    job: Job = field(kw_only=True)
    adapter: Adapter | None = field(kw_only=True)
    """The adapter that computes its tokens, even after it was unloaded."""
    max_length: int = field(kw_only=True)
    stream: int = field(kw_only=True)
    """The sequence's stream of random numbers."""
    stop: tuple[str, ...] = field(kw_only=True)
    stop_ids: frozenset[int] = field(kw_only=True)
    index: int = field(default=-1, kw_only=True)
    """Its row of the cache; -1 outside the batch."""
    constraint: Constraint | None = field(default=None, kw_only=True)
    """Its place in its grammar, if it has one."""
    is_mixed: bool = field(default=False, kw_only=True)
    """Whether some of its keys and values are of older weights."""
    view: View | None = field(default=None, kw_only=True)
    """Its images. Then `tokens` holds View.marked."""

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def num_reusable(self) -> int:
        """How many leading tokens need no computing if their keys and values are known.

        The last token always needs logits; so do the tokens that give logprobs of the prompt.
        """
        before_last = len(self.tokens) - 1
        start = self.job.logprob_start
        return before_last if start is None or not self.job.lacks_input_logprobs else min(before_last, start)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The tokens of one step: one of each decoding row, then a chunk of each of the rows after them."""

    rows: Sequence[Row]
    input: StepInput
    num_sampled: int
    """This step completes the tokens of the first `num_sampled` rows, and each of them samples its next token."""
    given_counts: Sequence[int]
    """For each chunk, the number of logprobs of given tokens that its job gets."""
    followers: Sequence[Row] = ()
    """Rows after the others that compute nothing: each has the tokens of one of `rows` and samples from its logits."""
    leaders: Sequence[int] = ()
    """The place in `rows` of the row that each follower has the tokens of; followers of one stand together."""

    @classmethod
    def of(cls, rows: Sequence[Row], num_decoding: int, prefill_tokens: int, *, can_rewind: bool = True) -> StepPlan:
        """The next step of a batch. Each of the first `num_decoding` rows lacks one token.

        prefill_tokens: most tokens in all chunks. A row gets its last chunk only if every row before it does. If rows
        cannot be rewound, the last token of a prompt is a chunk by itself: the row before it serves equal prompts.
        """
        chunks: list[Chunk] = []
        all_end = True
        for row in rows[num_decoding:]:
            length = min(row.num_pending if can_rewind else max(row.num_pending - 1, 1), prefill_tokens)
            ends = length == row.num_pending
            if length == 0 or (ends and not all_end):
                break
            all_end = all_end and ends
            chunks.append(Chunk(row=row.index, start=row.num_computed, length=length))
            prefill_tokens -= length
        rows = rows[: num_decoding + len(chunks)]
        decoding, prefilling = rows[:num_decoding], rows[num_decoding:]
        parts = list(zip(prefilling, chunks, strict=True))
        ends = list(accumulate((chunk.length for chunk in chunks), initial=num_decoding))
        sampled = [*range(num_decoding)]
        sampled += [end - 1 for end, (row, chunk) in zip(ends[1:], parts, strict=True) if chunk.end == len(row.tokens)]
        scored = [row.job.scored(chunk.start, chunk.end) for row, chunk in parts]
        given = [
            (first + position - chunk.start, row.job.input_ids[position + 1])
            for first, (row, chunk), positions in zip(ends, parts, scored, strict=False)
            for position in positions
        ]
        return cls(
            rows=rows,
            input=StepInput(
                token_ids=[row.tokens[-1] for row in decoding]
                + [token for row, chunk in parts for token in row.tokens[chunk.start : chunk.end]],
                positions=[row.num_computed for row in decoding]
                + [position for chunk in chunks for position in range(chunk.start, chunk.end)],
                chunks=chunks,
                keep=sampled if chunks else None,
                given=given,
            ),
            num_sampled=len(sampled),
            given_counts=list(map(len, scored)),
        )

    @property
    def num_decoding(self) -> int:
        return len(self.rows) - len(self.input.chunks)

    @property
    def sampled(self) -> Sequence[Row]:
        return [*self.rows[: self.num_sampled], *self.followers]

    @property
    def prefilling(self) -> Sequence[Row]:
        return self.rows[self.num_decoding :]

    @property
    def lengths(self) -> Sequence[int]:
        """How many tokens of each row the step computes."""
        return [1] * self.num_decoding + [chunk.length for chunk in self.input.chunks]

    def seen_by(self, tower: Tower) -> StepInput:
        """The input, with the images of its rows. Computes those that the tower does not know yet."""
        if not any(row.view for row in self.rows):
            return self.input
        ids = list(self.input.token_ids)
        rotary = np.tile(np.array(self.input.positions, np.int64), (3, 1))
        places: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        start = 0
        for row, length in zip(self.rows, self.lengths, strict=True):
            if (view := row.view) is not None:
                known, tokens = row.num_computed, slice(start, start + length)
                if known >= view.end:
                    rotary[:, tokens] += view.shift
                else:
                    rotary[:, tokens] = view.positions(known, known + length)
                for image, index, first, last in view.parts(known, known + length):
                    place = start + index - known
                    ids[place : place + last - first] = [view.placeholder] * (last - first)
                    places.append(torch.arange(place, place + last - first))
                    parts.append(tower.vectors(image, row.adapter)[:, first:last])
            start += length
        if not parts:
            return replace(self.input, token_ids=ids, rotary=rotary[0])
        vectors = torch.cat(parts, 1)
        shown = ShownImages(torch.cat(places).to(vectors.device), vectors)
        return replace(self.input, token_ids=ids, rotary=rotary, shown=shown)

"""From logits to tokens, vectorised over the batch.

Each sequence draws from a separate random stream, indexed by the token's position. So its samples depend only on its
seed and its text, and not on the rest of the batch or on interruptions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from arl.api.types import SamplingParams
from arl.engine.local.grammars import Allowed

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

_LIKELIEST = 1024
"""If a filter may keep fewer tokens, this many of the likeliest are examined first."""


def uniforms(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) on a grid of 2^-32, one for each (stream, position); both uint64.

    SplitMix64 (Steele, Lea and Flood 2014) at an index, so that no state is carried.
    """
    z = streams + positions * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(32)) * 2.0**-32


def random_stream(seed: int | None) -> int:
    """The stream of a request's seed; a fresh one without a seed."""
    if seed is None:
        return random.getrandbits(64)
    z = (seed + _GOLDEN) & (2**64 - 1)
    z = ((z ^ (z >> 33)) * 0xFF51AFD7ED558CCD) & (2**64 - 1)
    z = ((z ^ (z >> 33)) * 0xC4CEB9FE1A85EC53) & (2**64 - 1)
    return z ^ (z >> 33)


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A token for each of B rows, and what it was drawn among."""

    tokens: list[int]
    logprobs: list[float]
    """Under logits / temperature and the row's grammar, before top_k, top_p and min_p."""
    kept_logprobs: list[float]
    """After these, if the row's kept ids are noted; else the same."""
    kept: dict[int, np.ndarray]
    """For each row whose kept ids are noted and that top_k, top_p or min_p narrow: the ids, int32, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Filter:
    """The limits on which tokens may be sampled: top_k int64[B, 1], top_p and min_p float32[B, 1], or [1, 1] for
    all."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> Filter | None:
        if not any(p.is_filtered for p in params):
            return None
        top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
        top_p = [p.top_p if p.top_p < 1 else 2.0 for p in params]  # rounding must not cut the tail where top_p is off
        return cls(
            top_k=torch.tensor(top_k, device=device)[:, None],
            top_p=torch.tensor(top_p, device=device)[:, None],
            min_p=torch.tensor([float(p.min_p) for p in params], device=device)[:, None],
        )

    def apply(self, probs: torch.Tensor) -> torch.Tensor:
        """probs [B, V] with 0 for the filtered tokens; not normalised. The most likely token always stays.

        Most rows keep few tokens, which need no sorting of all: only rows that keep all of the likeliest get it.
        """
        filtered = torch.zeros_like(probs)
        ordered, token_ids = probs.topk(min(_LIKELIEST, probs.shape[-1]))
        kept = self._keeps(ordered)
        filtered.scatter_(1, token_ids, ordered * kept)
        if kept.shape[1] < probs.shape[1] and len(rows := kept[:, -1].nonzero()[:, 0]):
            ordered, token_ids = probs[rows].sort(dim=-1, descending=True)
            kept = self._of(rows)._keeps(ordered)
            filtered[rows] = torch.zeros_like(ordered).scatter_(1, token_ids, ordered * kept)
        return filtered

    def _keeps(self, ordered: torch.Tensor) -> torch.Tensor:
        """A mask of the likeliest tokens that stay, from their probabilities in descending order."""
        mass_before = ordered.cumsum(-1) - ordered
        ranks = torch.arange(ordered.shape[-1], device=ordered.device)
        return (ranks < self.top_k) & (mass_before <= self.top_p) & (ordered >= ordered[:, :1] * self.min_p)

    def _of(self, rows: torch.Tensor) -> Filter:
        if len(self.top_k) == 1:
            return self
        return Filter(top_k=self.top_k[rows], top_p=self.top_p[rows], min_p=self.min_p[rows])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchSampler:
    """The sampling parameters of a batch, as columns; made anew when the batch's members change."""

    temperature: torch.Tensor | None
    """float32[B, 1], or [1, 1] for all; None where all are 1."""
    greedy: torch.Tensor | None
    """bool[B], or [1] for all; None if no sequence is greedy."""
    is_all_greedy: bool
    filter: Filter | None
    noted: Sequence[int]
    """The rows whose kept ids are noted, of those that the filter narrows."""
    streams: np.ndarray

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        streams: Sequence[int],
        vocab_size: int,
        device: torch.device,
        notes: Sequence[bool] = (),
    ) -> BatchSampler:
        """notes: whether each row's kept ids are noted; empty: none are."""
        noted = [row for row, is_noted in enumerate(notes) if is_noted and params[row].is_filtered]
        if len({(p.temperature, p.top_k, p.top_p, p.min_p) for p in params}) == 1:
            params = params[:1]  # columns of one row serve all
        temperatures = [p.logprob_temperature for p in params]
        greedy = [p.temperature == 0 for p in params]
        return cls(
            temperature=None
            if all(t == 1 for t in temperatures)
            else torch.tensor(temperatures, dtype=torch.float32, device=device)[:, None],
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            is_all_greedy=all(greedy),
            filter=Filter.of(params, vocab_size, device),
            noted=noted,
            streams=np.array(streams, dtype=np.uint64),
        )

    def sample(self, logits: torch.Tensor, positions: Sequence[int], allowed: Allowed | None = None) -> Samples:
        """One token for each row of logits [B, V].

        positions: where in its sequence each sampled token will stand. allowed: what constrained rows may sample.
        """
        logits = logits.float() if allowed is None else allowed.only(logits.float())
        scaled = logits if self.temperature is None else logits / self.temperature
        logprobs = scaled.log_softmax(-1)
        filtered: torch.Tensor | None = None
        if self.is_all_greedy:
            tokens = logits.argmax(-1)
        else:
            probs = logprobs.exp()
            if self.filter is not None:
                probs = self.filter.apply(probs)
                filtered = probs[self.noted] if self.noted else None
            tokens = self._draw(probs, positions)
            if self.greedy is not None:
                tokens = torch.where(self.greedy, logits.argmax(-1), tokens)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        before = chosen.tolist()
        if filtered is None:
            return Samples(tokens=tokens.tolist(), logprobs=before, kept_logprobs=before, kept={})
        chosen[self.noted] -= filtered.sum(-1).log()
        kept = dict(zip(self.noted, _ids_of_rows(filtered > 0), strict=True))
        among = chosen.clamp(max=0).tolist()
        return Samples(tokens=tokens.tolist(), logprobs=before, kept_logprobs=among, kept=kept)

    def _draw(self, probs: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """Invert the cumulative distribution in token order, so that filters of other rows cannot change a draw."""
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        u = torch.from_numpy(uniforms(self.streams, np.array(positions, dtype=np.uint64)))
        targets = u.to(probs.device)[:, None] * cumulative[:, -1:]
        # NaN logits land past the end: their logprob reports them, but such an index would kill a GPU.
        return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp_(max=probs.shape[-1] - 1)


def _ids_of_rows(is_kept: torch.Tensor) -> list[np.ndarray]:
    """The ids that each row of bool [B, V] holds, int32."""
    ids = is_kept.nonzero()[:, 1].int().cpu().numpy()
    ends = is_kept.sum(-1).cumsum(0).tolist()
    return [ids[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


class StopStrings:
    """Finds stop strings that end within the newest token, wherever token boundaries fall."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def find(self, output_ids: Sequence[int], stop: Sequence[str]) -> str | None:
        """The first of `stop` in the text of the newest tokens, or None. Called after each token."""
        piece = self._piece(output_ids[-1])
        if not any(_may_end_in(piece, string) for string in stop):
            return None
        # A token adds at least one byte of text, so these hold any match that the newest token completes.
        num_tokens = max(len(string.encode()) for string in stop) + 1
        tail = self._decode(output_ids[-num_tokens:])
        return next((string for string in stop if string in tail), None)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _piece(self, token_id: int) -> str:
        if token_id not in self._pieces:
            self._pieces[token_id] = self._decode([token_id])
        return self._pieces[token_id]


def _may_end_in(piece: str, string: str) -> bool:
    """Whether a match of `string` can end within a token that reads `piece` on its own.

    A token on its own may lose its spaces (empty or stripped pieces) or hold a part of a character (U+FFFD).
    """
    last = string[-1]
    return last in piece or not piece or "\ufffd" in piece or last.isspace()

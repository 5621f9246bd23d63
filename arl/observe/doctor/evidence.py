"""Pure functions on logprobs and logits: how far two sides differ, and what explains the difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arl.observe.doctor.reference_model import BLOCK, Logits, chosen
from arl.observe.doctor.server_probe import Floats

EXACT = 2e-4
"""Nats, on average. In float32 the embedded server differs from the trainer by 1e-6, and SGLang by 1e-5; other orders
of summation on a GPU cost ten times that."""
ROUNDINGS = 4.0
"""Two ways to round to bfloat16 differ by less than this many times the change of one rounding."""
SURE = 1e-9
"""A healthy server's samples accuse it once in a thousand million times."""
_GRID = np.geomspace(0.1, 10.0, 21)
"""Temperatures to try."""
_HALVINGS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Mean differences of logprobs, in nats."""

    rounding: float
    """The change that bfloat16 causes (ReferenceModel.rounding)."""
    is_exact: bool
    """Server and trainer both compute in float32, with the same numbers."""

    @property
    def coarse(self) -> float:
        """The most that rounding can explain."""
        return max(EXACT, ROUNDINGS * self.rounding)

    @property
    def limit(self) -> float:
        """The limit under the run's settings."""
        return EXACT if self.is_exact else self.coarse

    @property
    def why(self) -> str:
        if self.is_exact:
            return f"{self.limit:.2g} nats, for float32 on both sides"
        return f"{self.limit:.2g} nats, {ROUNDINGS:g} times the rounding of bfloat16"


def gap(a: Sequence[Floats], b: Sequence[Floats]) -> float:
    """The mean absolute difference, in nats."""
    return float(np.abs(np.concatenate(a) - np.concatenate(b)).mean())


def worst(a: Sequence[Floats], b: Sequence[Floats]) -> float:
    """The largest absolute difference, in nats."""
    return float(np.abs(np.concatenate(a) - np.concatenate(b)).max())


# Temperature


def reported_temperature(logits: Logits, token_ids: Sequence[int], logprobs: Floats) -> tuple[float, float]:
    """The temperature whose logprobs are nearest to the reported ones, and the mean difference that remains."""
    return _best(lambda t: float(np.abs(chosen(logits, token_ids, t) - logprobs).mean()))


def sampled_temperature(logits: Logits, token_ids: Sequence[int], temperature: float) -> tuple[float, float]:
    """The likeliest temperature of the samples, and how much likelier it is than `temperature`, as chi-squared(1)."""
    found, loss = _best(lambda t: -float(chosen(logits, token_ids, t).sum()))
    return found, 2 * (float(-chosen(logits, token_ids, temperature).sum()) - loss)


def _best(loss_of: Callable[[float], float]) -> tuple[float, float]:
    """The temperature with the least loss, and that loss. The loss must have one minimum."""
    losses = {t: loss_of(t) for t in map(float, _GRID)}
    best, factor = min(losses, key=losses.__getitem__), float(_GRID[1] / _GRID[0])
    for _ in range(_HALVINGS):
        factor **= 0.5
        losses |= {t: loss_of(t) for t in (best / factor, best * factor)}
        best = min(losses, key=losses.__getitem__)
    return best, losses[best]


# Truncation


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """The part of the distribution from which nothing was sampled."""

    kind: str
    """top_p, top_k or min_p: the one that explains the samples best."""
    value: float
    """The setting that the samples suggest."""
    chance: float
    """The probability that samples of the whole distribution stay within this part."""


def missing_tail(logits: Logits, token_ids: Sequence[int], temperature: float) -> Missing:
    """Which truncation the samples suggest, and its chance without any truncation.

    Each kind keeps the tokens for which one number is at most a limit: the probability of all likelier tokens (top_p),
    the rank (top_k), or minus the probability relative to the likeliest token (min_p). If this number is at most q for
    N independent tokens, the chance of that is the product, over the tokens, of the probability that it is at most q.
    """
    most: dict[str, float] = dict.fromkeys(_KINDS, -np.inf)
    for block in _blocks(len(token_ids)):
        ranked = _Ranked.of(logits[block], temperature)
        for kind, number in ranked.numbers().items():
            most[kind] = max(most[kind], float(number[ranked.places(token_ids[block])].max()))
    chances: dict[str, float] = dict.fromkeys(_KINDS, 0.0)
    for block in _blocks(len(token_ids)):
        ranked = _Ranked.of(logits[block], temperature)
        for kind, number in ranked.numbers().items():
            within = np.where(number <= most[kind] + 1e-9, ranked.probs, 0.0).sum(-1)
            chances[kind] += float(np.log(np.clip(within, 1e-300, 1.0)).sum())
    kind = min(_KINDS, key=chances.__getitem__)
    return Missing(kind=kind, value=abs(most[kind]), chance=float(np.exp(chances[kind])))


@dataclass(frozen=True, slots=True, eq=False)
class _Ranked:
    """Distributions [N, V], the likeliest token first."""

    probs: npt.NDArray[np.float64]
    order: npt.NDArray[np.intp]
    """The token of each rank."""

    @classmethod
    def of(cls, logits: Logits, temperature: float) -> _Ranked:
        scaled = logits.astype(np.float64) / temperature
        probs = np.exp(scaled - scaled.max(-1, keepdims=True))
        order = np.argsort(-probs, axis=-1, kind="stable")
        return cls(np.take_along_axis(probs / probs.sum(-1, keepdims=True), order, -1), order)

    def numbers(self) -> dict[str, npt.NDArray[np.float64]]:
        """The number that each kind of truncation limits, ascending with the rank."""
        ranks = np.arange(1.0, self.probs.shape[-1] + 1)
        return {
            "top_p": np.cumsum(self.probs, -1) - self.probs,
            "top_k": np.broadcast_to(ranks, self.probs.shape),
            "min_p": -self.probs / self.probs[:, :1],
        }

    def places(self, token_ids: Sequence[int]) -> tuple[npt.NDArray[np.intp], ...]:
        """Indices of one token in each row."""
        return np.nonzero(self.order == np.array(token_ids)[:, None])


_KINDS: tuple[str, ...] = ("top_p", "top_k", "min_p")


def _blocks(count: int) -> Iterator[slice]:
    """Rows are processed a few at a time, because a row is as long as the vocabulary."""
    for start in range(0, count, BLOCK):
        yield slice(start, start + BLOCK)


def kept_mass(logprobs: Floats, of_all: Floats) -> float | None:
    """The mean share of the distribution that was kept, if all `logprobs` fit a renormalised part of it; else None."""
    above = logprobs - of_all
    return float(np.exp(-above).mean()) if (above > -EXACT).all() and above.mean() > EXACT else None


# Places


def first_far(ours: Floats, theirs: Floats, limit: float) -> int | None:
    """The place from which on two rows of logprobs differ by more than the limit on average; None if they do not.

    It is the place that best splits the row into a part that agrees and a part that does not.
    """
    off = np.abs(ours - theirs)
    if off.mean() <= limit and off[len(off) // 2 :].mean() <= limit:
        return None
    is_far = off > limit
    before = np.concatenate([[0], np.cumsum(is_far)])
    after = np.concatenate([np.cumsum((~is_far)[::-1])[::-1], [0]])
    return int((before + after).argmin())


_BY_CHANCE = 3e-3
"""A number drawn between two others is nearer to one of them than this share of their distance this rarely."""


def mislabelled(of_old: Floats, of_new: Floats, logprobs: Floats, num_old: int, limit: float) -> tuple[int, int]:
    """(tokens labelled old that the old weights did not sample, tokens labelled new that they did).

    of_old, of_new: the logprobs of the response's tokens under either version. num_old: how many of its first tokens
    are labelled old. Behind an update in place nothing equals the new version, because old keys and values stay: a
    logprob lies anywhere near both, sometimes close to the old one. But what the old weights sampled equals it, so only
    a token that is nearer to it by _BY_CHANCE of the distance between both counts.
    """
    off = np.abs(logprobs - of_old)
    late = int((off[:num_old] > limit).sum())
    early = 0
    for told, apart in zip(off[num_old:], np.abs(of_old - of_new)[num_old:], strict=True):
        if told > limit:
            break
        early += bool(apart > 3 * limit and told <= _BY_CHANCE * apart)
    return late, early

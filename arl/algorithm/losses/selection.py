"""Selections: tokens that a loss treats apart, chosen over a whole minibatch before it is split."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter

import torch

from arl.algorithm.batch import Batch
from arl.api.settings.objective import ClipCovSelection, KLCovSelection, SecondMomentSelection, SelectionConfig


def selected_tokens(batch: Batch, config: SelectionConfig | None, *, seed: int) -> torch.Tensor:
    """bool[T]: the tokens that `config` chooses among the trained tokens of `batch`, a minibatch.

    The choice uses numbers from before any update on the batch: proximal_logprobs p, behavior_logprobs b and advantages
    A. The papers use current logprobs; before the first update these are p. So one choice holds for the minibatch,
    however it is split later. It depends on the set of trajectories, not on their order, and a random one on `seed`.
    """
    if config is None:
        return batch.selected
    mask = batch.loss_mask
    fields = (batch.advantages, batch.proximal_logprobs, batch.behavior_logprobs)
    advantages, proximal, behavior = (values[mask].double() for values in fields)
    if config.kind == "second_moment":
        chosen = largest_moments(proximal - behavior, advantages, config)
    else:
        covariances = _centred(proximal) * _centred(advantages)
        chosen = extreme_covariances(covariances, _random_keys(batch, seed)[mask], config)
    return torch.zeros_like(mask).masked_scatter(mask, chosen)


def largest_moments(log_ratio: torch.Tensor, advantages: torch.Tensor, config: SecondMomentSelection) -> torch.Tensor:
    """M2PO's mask (2510.01161), bool[N] over N trained tokens, True for tokens to leave out.

    Only tokens that a clip could affect count: A > 0 with a log-ratio p - b above 0, or A < 0 with one below 0. Of
    these, the tokens with the largest (p - b)^2 are left out until the mean over the rest is at most config.limit.
    Equal values go together. The authors' code differs: it bounds moments at a threshold instead of leaving tokens out,
    ignores ratios near 1, and uses c.
    """
    moments = log_ratio.square()
    is_concerned = advantages * log_ratio > 0
    ascending = moments[is_concerned].sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1)
    # The last of a run of equal values decides for all of them.
    is_last_of_equals = torch.cat([ascending[1:] > ascending[:-1], torch.ones_like(ascending[:1]).bool()])
    kept = ascending[is_last_of_equals & (means <= config.limit)]
    largest_kept = kept[-1] if len(kept) else torch.tensor(-1.0)
    return is_concerned & (moments > largest_kept)


def extreme_covariances(
    covariances: torch.Tensor, keys: torch.Tensor, config: ClipCovSelection | KLCovSelection
) -> torch.Tensor:
    """Clip-Cov's and KL-Cov's choice (2505.22617, section 4), bool[N]: share * N tokens, rounded down, at least one.

    covariances: each token's (p - mean p) (A - mean A), both means over the N. keys: random numbers that draw tokens
    and order equal ones. clip_cov draws from the tokens with a covariance in [low, high], and takes all of these if
    they are too few. kl_cov takes the tokens with the largest covariance.
    """
    chosen = torch.zeros_like(covariances).bool()
    drawn = keys.argsort()
    if config.kind == "clip_cov":
        is_candidate = (covariances >= config.low) & (covariances <= config.high)
        ranked = drawn[is_candidate[drawn]]
    else:
        ranked = drawn[covariances[drawn].argsort(descending=True, stable=True)]
    chosen[ranked[: max(int(config.share * len(covariances)), 1)]] = True
    return chosen


def _centred(values: torch.Tensor) -> torch.Tensor:
    # fsum is exact, so the mean does not depend on the order of the sequences.
    return values - math.fsum(values.tolist()) / max(len(values), 1)


def _random_keys(batch: Batch, seed: int) -> torch.Tensor:
    """A number in [0, 1) for each token, float64[T]: a function of the seed, its trajectory and its place there.

    The trainer's logprobs play no part, because other packings round them differently. Trajectories with equal samples
    are numbered in the order of their advantages.
    """
    columns = (batch.token_ids, batch.behavior_logprobs, batch.loss_mask, batch.advantages)
    contents = [(_digest(*row), of.tolist()) for *row, of in zip(*map(batch.split, columns), strict=True)]
    keys, seen = [torch.empty(0, dtype=torch.float64)] * len(batch), Counter[bytes]()
    for i in sorted(range(len(batch)), key=contents.__getitem__):
        content, _ = contents[i]
        seen[content] += 1
        origin = hashlib.sha256(content + f"{seed} {seen[content]}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(origin[:8], "little", signed=True))
        keys[i] = torch.rand(batch.lengths[i], dtype=torch.float64, generator=generator)
    return torch.cat([torch.empty(0, dtype=torch.float64), *keys])


def _digest(token_ids: torch.Tensor, behavior: torch.Tensor, loss_mask: torch.Tensor) -> bytes:
    content = hashlib.sha256(array("q", token_ids.tolist()))
    for values in (behavior, loss_mask):
        content.update(array("d", values.tolist()))
    return content.digest()

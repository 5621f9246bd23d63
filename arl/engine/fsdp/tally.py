"""What a minibatch's microbatches report, added up over microbatches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from arl.api.engine import TokenLosses
from arl.engine.fsdp.minibatch import Microbatch

_KINDS = ("loss", "mean", "weighted", "above", "below", "size", "square")
"""What is summed: the loss, means, weighted sums, both sides of quotients, and weights with their squares."""


@dataclass(slots=True, kw_only=True)
class MinibatchTally:
    """Sums and maxima over a minibatch. `add` each microbatch, then `reduce` once, then read `metrics`."""

    budget: int
    loss: float = 0.0
    tokens: int = 0
    forwarded_tokens: int = 0
    trained_tokens: int = 0
    microbatches: int = 0
    lr: float = 0.0
    grad_norm: float = 0.0
    nonfinite_grads: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    _sums: dict[tuple[str, str], list[torch.Tensor]] = field(default_factory=dict)
    _maxima: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def add(self, batch: Microbatch, loss: torch.Tensor, losses: TokenLosses) -> None:
        """loss: the microbatch's share of the minibatch's loss, detached. Nothing waits for the device here."""
        self._add("loss", {"": loss})
        self._add("mean", losses.means)
        self._add("weighted", {name: v * batch.tokens.loss_weights for name, v in losses.weighted.items()})
        self._add("above", {name: above for name, (above, _) in losses.quotients.items()})
        self._add("below", {name: below for name, (_, below) in losses.quotients.items()})
        self._add("size", losses.sample_sizes)
        self._add("square", {name: weights.double().square() for name, weights in losses.sample_sizes.items()})
        for name, values in losses.maxima.items():
            peak = values.max() if len(values) else torch.tensor(-math.inf, device=values.device)
            self._maxima.setdefault(name, []).append(peak.double())
        self.trained_tokens += len(batch.targets)
        if len(batch.targets):
            self.tokens += batch.num_tokens
            self.forwarded_tokens += batch.num_forwarded_tokens
        self.microbatches += 1

    def _add(self, kind: str, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            self._sums.setdefault((kind, name), []).append(value.double().sum())

    def reduce(self, device: torch.device, group: dist.ProcessGroup) -> None:
        """Add up over microbatches and ranks. Every rank has the same names, as every rank ran the same loss."""
        if not self.microbatches:
            return
        sums = torch.stack([torch.stack(parts).sum() for parts in self._sums.values()])
        counts = [self.trained_tokens, self.tokens, self.forwarded_tokens, self.microbatches]
        totals = torch.cat([sums, torch.tensor(counts, dtype=sums.dtype, device=device)])
        dist.all_reduce(totals, group=group)
        *values, trained, tokens, forwarded, microbatches = totals.tolist()
        self.trained_tokens, self.microbatches = int(trained), int(microbatches)
        self.tokens, self.forwarded_tokens = int(tokens), int(forwarded)
        self._read(dict(zip(self._sums, values, strict=True)))
        if self._maxima and self.trained_tokens:
            peaks = torch.stack([torch.stack(parts).max() for parts in self._maxima.values()])
            dist.all_reduce(peaks, dist.ReduceOp.MAX, group=group)
            self.maxima = dict(zip(self._maxima, peaks.tolist(), strict=True))

    def _read(self, sums: Mapping[tuple[str, str], float]) -> None:
        of: dict[str, dict[str, float]] = {kind: {} for kind in _KINDS}
        for (kind, name), value in sums.items():
            of[kind][name] = value
        count = max(self.trained_tokens, 1)
        self.loss = of["loss"][""]
        self.metrics = {
            **{name: value / count for name, value in of["mean"].items()},
            **of["weighted"],
            **{name: above / of["below"][name] for name, above in of["above"].items() if of["below"][name]},
            **{name: size**2 / (count * of["square"][name]) for name, size in of["size"].items() if of["square"][name]},
        }


def mean_of_minibatches(tallies: Sequence[MinibatchTally]) -> dict[str, float]:
    """The metrics of one train_batch: means of the minibatches' metrics, maxima of their maxima, sums of their counts.

    Minibatches in which nothing was trained count for the sums alone; gradient norms that are not finite count for
    `nonfinite_grads` alone; a minibatch that does not report a metric does not count for it.
    """
    trained = [tally for tally in tallies if tally.trained_tokens]
    metrics = {
        "loss": _mean([t.loss for t in trained]),
        "grad_norm": _mean([t.grad_norm for t in trained if not t.nonfinite_grads]),
        "lr": _mean([t.lr for t in trained]),
        "nonfinite_grads": float(sum(t.nonfinite_grads for t in tallies)),
        "tokens": float(sum(t.tokens for t in tallies)),
        "forwarded_tokens": float(sum(t.forwarded_tokens for t in tallies)),
        "trained_tokens": float(sum(t.trained_tokens for t in tallies)),
        "microbatches": float(sum(t.microbatches for t in tallies)),
    }
    room = sum(t.microbatches * t.budget for t in tallies)
    metrics["packing_efficiency"] = metrics["forwarded_tokens"] / room if room else 0.0
    metrics["forwarded_share"] = metrics["forwarded_tokens"] / metrics["tokens"] if metrics["tokens"] else 0.0
    metrics |= _merged([t.metrics for t in trained], _mean)
    metrics |= _merged([t.maxima for t in trained], max)
    return metrics


def _merged(parts: Sequence[Mapping[str, float]], merge: Callable[[Sequence[float]], float]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: merge([part[name] for part in parts if name in part]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

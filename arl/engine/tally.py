"""What a minibatch's microbatches report, added up over microbatches and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from arl.api.engine import TokenLosses
from arl.engine.microbatch import Microbatch


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
    means: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    _sums: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    _maxima: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def add(self, batch: Microbatch, loss: torch.Tensor, losses: TokenLosses) -> None:
        """loss: the microbatch's share of the minibatch's loss, detached. Nothing waits for the device here."""
        self._sums.setdefault("loss", []).append(loss.double())
        for name, values in losses.means.items():
            self._sums.setdefault("mean/" + name, []).append(values.double().sum())
        for name, values in losses.maxima.items():
            peak = values.max() if len(values) else torch.tensor(-math.inf, device=values.device)
            self._maxima.setdefault(name, []).append(peak.double())
        self.trained_tokens += len(batch.targets)
        if len(batch.targets):
            self.tokens += batch.num_tokens
            self.forwarded_tokens += batch.num_forwarded_tokens
        self.microbatches += 1

    def reduce(self, device: torch.device, group: dist.ProcessGroup) -> None:
        """Add up over microbatches and ranks. Every rank has the same names, as every rank ran the same loss."""
        if not self.microbatches:
            return
        sums = torch.stack([torch.stack(parts).sum() for parts in self._sums.values()])
        counts = [self.trained_tokens, self.tokens, self.forwarded_tokens, self.microbatches]
        totals = torch.cat([sums, torch.tensor(counts, dtype=sums.dtype, device=device)])
        dist.all_reduce(totals, group=group)
        *values, trained, tokens, forwarded, microbatches = totals.tolist()
        by_name = dict(zip(self._sums, values, strict=True))
        self.loss = by_name.pop("loss")
        self.trained_tokens, self.microbatches = int(trained), int(microbatches)
        self.tokens, self.forwarded_tokens = int(tokens), int(forwarded)
        self.means = {n.removeprefix("mean/"): v / max(self.trained_tokens, 1) for n, v in by_name.items()}
        if self._maxima and self.trained_tokens:
            peaks = torch.stack([torch.stack(parts).max() for parts in self._maxima.values()])
            dist.all_reduce(peaks, dist.ReduceOp.MAX, group=group)
            self.maxima = dict(zip(self._maxima, peaks.tolist(), strict=True))


def mean_of_minibatches(tallies: Sequence[MinibatchTally]) -> dict[str, float]:
    """The metrics of one train_batch: means of the minibatches' means, maxima of their maxima, sums of their counts.

    Minibatches in which nothing was trained count for the sums alone; gradient norms that are not finite count for
    `nonfinite_grads` alone.
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
    if trained:
        metrics |= {name: _mean([t.means[name] for t in trained]) for name in trained[0].means}
        metrics |= {name: max(t.maxima[name] for t in trained) for name in trained[0].maxima}
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

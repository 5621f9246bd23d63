"""What a train engine gives to losses and takes from them: trained tokens, flat, and what is reported.

sequences --packed_tokens--> PackedTokens --+
    | the engine's model                    +--TokenLoss--> TokenLosses --LossReport--> metrics
    +----------------------> TokenOutputs --+                   | unpacked
                                                                +--> values of each sequence

Microbatches only save memory: a minibatch's loss weights hold its denominators, so losses add up over any split.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from arl.api.train_engine import TOKEN_FIELDS, PackedTokens, TokenLosses, TrainSequence


def packed_tokens(sequences: Sequence[TrainSequence]) -> PackedTokens:
    """The trained tokens of these sequences, in their order."""
    counts = torch.tensor([int(sequence.loss_mask.sum()) for sequence in sequences], dtype=torch.int64)
    sequence_ids = torch.arange(len(sequences)).repeat_interleave(counts)
    return PackedTokens(
        **{name: torch.cat([getattr(s, name)[s.loss_mask] for s in sequences]) for name in TOKEN_FIELDS},
        sequence_ids=sequence_ids,
        unit_ids=unit_numbers([sequence.unit for sequence in sequences], sequence_ids),
    )


def unit_numbers(units: Sequence[int], sequence_ids: torch.Tensor) -> torch.Tensor:
    """int64[M]: the number of each trained token's unit, by first appearance. sequence_ids: PackedTokens'.

    Units without a trained token have none, so every number is below M, as losses of units need it.
    """
    numbers: dict[int | tuple[int], int] = {}
    present, counts = sequence_ids.unique_consecutive(return_counts=True)
    keys = [units[i] if units[i] >= 0 else (i,) for i in present.tolist()]  # without a unit: one of its own
    of_present = torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)
    return of_present.repeat_interleave(counts)


def unpacked(values: torch.Tensor, sequences: Sequence[TrainSequence], fill: float = 0.0) -> list[torch.Tensor]:
    """Values of the trained tokens, float[M] -> float32[T] for each sequence, `fill` where loss_mask is 0."""
    rows = [torch.full((len(sequence),), fill) for sequence in sequences]
    parts = values.detach().float().cpu().split([int(sequence.loss_mask.sum()) for sequence in sequences])
    for row, sequence, part in zip(rows, sequences, parts, strict=True):
        row[sequence.loss_mask] = part
    return rows


Reduce = Callable[[torch.Tensor, bool], None]
"""Reduces a tensor in place over the ranks that share a minibatch: to the sum, or, if True, to the largest."""


class LossReport:
    """The metrics of one `train_batch`: `add` each microbatch, `end_minibatch` after each optimizer step.

    A minibatch's metrics are over all its trained tokens, however it was split. Those of the batch are means over the
    minibatches that have the metric, and maxima of their maxima. A minibatch without trained tokens reports nothing.
    """

    def __init__(self, reduce: Reduce = lambda values, is_max: None) -> None:
        self.counts = Counter[str]()
        """`trained_tokens` and what else `add` was told, added up over the minibatches that have ended."""
        self._reduce = reduce
        self._names: list[tuple[str, str]] = []
        self._sums: list[torch.Tensor] = []
        self._largest: list[dict[str, torch.Tensor]] = []
        self._own = Counter[str]()
        self._means: list[dict[str, float]] = []
        self._maxima: list[dict[str, float]] = []

    def add(self, losses: TokenLosses, tokens: PackedTokens, /, **counts: int) -> None:
        """Does not wait for the device. A loss reports the same names each time, also of an empty microbatch."""
        weights = tokens.loss_weights
        values = {
            ("loss", "loss"): losses.loss.detach() * weights,
            **{("mean", name): value for name, value in losses.means.items()},
            **{("weighted", name): value * weights for name, value in losses.weighted.items()},
            **{("above", name): above for name, (above, _) in losses.quotients.items()},
            **{("below", name): below for name, (_, below) in losses.quotients.items()},
            **{("size", name): size for name, size in losses.sample_sizes.items()},
            **{("square", name): size.double().square() for name, size in losses.sample_sizes.items()},
        }
        self._names = list(values)
        self._sums.append(torch.stack(list(values.values())).double().sum(1))
        lowest = weights.new_full((1,), -torch.inf, dtype=torch.float64)
        self._largest.append({name: torch.cat([value.double(), lowest]).max() for name, value in losses.maxima.items()})
        self._own.update(trained_tokens=len(weights), **counts)

    def end_minibatch(self, **numbers: float) -> dict[str, float]:
        """numbers: of the optimizer step, such as grad_norm and lr. Returns the minibatch's metrics but for maxima, to
        which more numbers may be added; nothing without a trained token. A collective, if there is a `reduce`."""
        sums, largest, counts = self._sums, self._largest, self._own
        self._sums, self._largest, self._own = [], [], Counter[str]()
        if not sums:
            return {}
        total = torch.stack(sums).sum(0)
        total = torch.cat([total, total.new_tensor(list(counts.values()))])
        self._reduce(total, False)
        values = total.tolist()
        reduced = {name: int(count) for name, count in zip(counts, values[len(self._names) :], strict=True)}
        self.counts.update(reduced)
        if not (num_tokens := reduced["trained_tokens"]):
            return {}
        of = defaultdict[str, dict[str, float]](dict)
        for (kind, name), value in zip(self._names, values, strict=False):
            of[kind][name] = value
        found = of["loss"] | {name: value / num_tokens for name, value in of["mean"].items()} | of["weighted"]
        found |= {name: value / below for name, value in of["above"].items() if (below := of["below"][name])}
        for name, value in of["size"].items():
            if square := of["square"][name]:
                found[name] = value**2 / (num_tokens * square)
        if names := largest[0].keys():
            peaks = torch.stack([torch.stack([part[name] for part in largest]).max() for name in names])
            self._reduce(peaks, True)
            self._maxima.append(dict(zip(names, peaks.tolist(), strict=True)))
        self._means.append(found | numbers)
        return self._means[-1]

    @property
    def metrics(self) -> dict[str, float]:
        means, maxima = _by_name(self._means), _by_name(self._maxima)
        return {name: sum(own) / len(own) for name, own in means.items()} | {n: max(own) for n, own in maxima.items()}


def _by_name(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row[name] for row in rows if name in row] for name in names}

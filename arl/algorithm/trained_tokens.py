"""What a train engine of one process gives to losses and takes from them: trained tokens, flat, and what is reported.

sequences --packed_tokens--> PackedTokens --+
    | the engine's model                    +--TokenLoss--> TokenLosses --LossReport--> metrics
    +----------------------> TokenOutputs --+                   | unpacked
                                                                +--> values of each sequence

Microbatches only save memory: a minibatch's loss weights hold its denominators, so losses add up over any split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


class LossReport:
    """The metrics of one `train_batch`: `add` each microbatch, `end_minibatch` after each optimizer step.

    A minibatch's metrics are over all its trained tokens, however it was split. Those of the batch are means over the
    minibatches that have the metric, and maxima of their maxima. A minibatch without trained tokens reports nothing.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[TokenLosses, PackedTokens]] = []
        self._means: list[dict[str, float]] = []
        self._maxima: list[dict[str, float]] = []

    def add(self, losses: TokenLosses, tokens: PackedTokens) -> None:
        if len(tokens.behavior_logprobs):
            self._parts.append((losses, tokens))

    def end_minibatch(self, **numbers: float) -> None:
        """numbers: of the optimizer step, such as grad_norm and lr."""
        parts, self._parts = self._parts, []
        if not parts:
            return
        weights = torch.cat([tokens.loss_weights for _, tokens in parts]).double()
        found = {"loss": float(torch.cat([losses.loss.detach() for losses, _ in parts]).double() @ weights), **numbers}
        for name, value in _joined([losses.means for losses, _ in parts]).items():
            found[name] = float(value.mean())
        for name, value in _joined([losses.weighted for losses, _ in parts]).items():
            found[name] = float(value @ weights)
        above, below = (
            _joined([{n: q[i] for n, q in losses.quotients.items()} for losses, _ in parts]) for i in (0, 1)
        )
        found |= {name: float(above[name].sum() / own.sum()) for name, own in below.items() if own.sum()}
        for name, value in _joined([losses.sample_sizes for losses, _ in parts]).items():
            if squares := float(value.square().sum()):
                found[name] = float(value.sum()) ** 2 / (len(value) * squares)
        self._means.append(found)
        self._maxima.append({n: float(v.max()) for n, v in _joined([losses.maxima for losses, _ in parts]).items()})

    @property
    def metrics(self) -> dict[str, float]:
        means, maxima = _by_name(self._means), _by_name(self._maxima)
        return {name: sum(own) / len(own) for name, own in means.items()} | {n: max(own) for n, own in maxima.items()}


def _joined(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """name -> float64[M] over all parts, which have the same names."""
    return {name: torch.cat([part[name] for part in parts]).double() for name in parts[0]}


def _by_name(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row[name] for row in rows if name in row] for name in names}

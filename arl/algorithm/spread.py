"""Mean and standard deviation, the same to the last bit in whatever order the numbers come."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean, and the sample standard deviation (n - 1), 0 for fewer than two and where only rounding differs."""

    mean: float
    std: float

    @property
    def divisor(self) -> float:
        """What to divide by to get unit variance: nothing is scaled up where there is no spread."""
        return self.std + EPSILON if self.std > 0 else 1.0


def spread_of(numbers: Sequence[float]) -> Spread:
    if not numbers or _are_equal(min(numbers), max(numbers)):
        return Spread(min(numbers, default=0.0), 0.0)
    # fsum is exact, so the result does not depend on the order in which episodes finished.
    mean = math.fsum(numbers) / len(numbers)
    squares = math.fsum((n - mean) * (n - mean) for n in numbers)
    return Spread(mean, math.sqrt(squares / (len(numbers) - 1)))


def _are_equal(low: float, high: float) -> bool:
    """Whether numbers from low to high differ by rounding alone.

    Compared before subtracting: the rounded mean of equal numbers may differ from each of them, and a difference in
    the last bit of a large one is not small.
    """
    return high - low <= 4 * math.ulp(max(abs(low), abs(high)))


def pooled_spread(parts: Sequence[torch.Tensor], *, each_part_once: bool = False) -> Spread:
    """The spread of all numbers of some 1-D tensors, whose order does not matter; empty ones count nowhere.

    each_part_once: a tensor weighs the same however long it is, as if it were one number.
    """
    parts = [part for part in parts if len(part)]
    if not parts:
        return Spread(0.0, 0.0)
    low, high = min(float(part.min()) for part in parts), max(float(part.max()) for part in parts)
    count = len(parts) if each_part_once else sum(map(len, parts))
    if _are_equal(low, high):
        return Spread(low, 0.0)

    def total(values: Sequence[torch.Tensor]) -> float:
        return math.fsum(float(v.mean() if each_part_once else v.sum()) for v in values)

    mean = total(parts) / count
    squares = total([(part - mean) ** 2 for part in parts])
    return Spread(mean, math.sqrt(squares / (count - 1)) if count > 1 else 0.0)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One 1-D tensor of all numbers, the same in whatever order the parts come."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts)).sort().values


def whitened(
    values: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], once: Sequence[Hashable] | None = None
) -> list[torch.Tensor]:
    """(values - mean) / (std + 1e-6) over everything that is masked in, and 0 elsewhere.

    Numbers that are all equal, and one that is alone, become 0 exactly. once: for each sequence of what it is a part;
    for mean and std those with the same weigh as much together as others do, however many numbers are masked in.
    """
    parts = [v[m] for v, m in zip(values, masks, strict=True)]
    if once is not None:
        whole: defaultdict[Hashable, list[torch.Tensor]] = defaultdict(list)
        for part, of in zip(parts, once, strict=True):
            whole[of].append(part)
        parts = [joined(members) for members in whole.values()]
    spread = pooled_spread(parts, each_part_once=once is not None)
    if spread.std == 0:
        return [torch.zeros_like(v) for v in values]
    return [torch.where(m, (v - spread.mean) / spread.divisor, 0.0) for v, m in zip(values, masks, strict=True)]

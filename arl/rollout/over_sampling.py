"""Which episodes of a group to train, where more have finished than are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate


def most_varied(rewards: Sequence[float], count: int) -> list[int]:
    """The indices, ascending, of `count` of the rewards with the largest variance among them (PODS, 2504.13818).

    The best choice is one of the count + 1 that take the k lowest and the count - k highest: the variance is convex in
    each of its members, so that exchanging one for an outer neighbour, on one side or the other, never makes it
    smaller. Exact arithmetic, so that equal rewards are equal: of those the smaller index counts as the lower, and of
    equally good choices the one with the most low ones is made.
    """
    ascending = sorted(range(len(rewards)), key=lambda i: (rewards[i], i))
    exact = [Fraction(rewards[i]) for i in ascending]
    sums = [Fraction(0), *accumulate(exact)]
    squares = [Fraction(0), *accumulate(value * value for value in exact)]

    def spread(num_lowest: int) -> Fraction:
        """count^2 times the variance."""
        high = len(exact) - (count - num_lowest)
        total = sums[num_lowest] + sums[-1] - sums[high]
        return count * (squares[num_lowest] + squares[-1] - squares[high]) - total * total

    best = max(range(count, -1, -1), key=spread)
    high = len(ascending) - (count - best)
    return sorted(ascending[:best] + ascending[high:])

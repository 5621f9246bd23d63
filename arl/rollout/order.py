"""The order in which an epoch hands out its examples: shuffled ahead of time, or computed place by place."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import overload

LARGE = 1 << 20
"""From so many examples on the order is computed: a shuffle would take 16 bytes and a microsecond for each of them."""

_ROUNDS = 4
_MASK = (1 << 64) - 1


class Shuffle:
    """Shuffles 0, 1, ..., step by step, into the order of `random.shuffle` with the same seed."""

    def __init__(self, indices: array[int], seed: str) -> None:
        self._order = indices[:]
        self._random = random.Random(seed)
        self.steps_left = max(len(indices) - 1, 0)

    def advance(self, steps: int) -> None:
        order = self._order
        for i in range(self.steps_left, max(self.steps_left - steps, 0), -1):
            j = self._random.randrange(i + 1)
            order[i], order[j] = order[j], order[i]
        self.steps_left = max(self.steps_left - steps, 0)

    def finished(self) -> array[int]:
        self.advance(self.steps_left)
        return self._order


class ComputedOrder(Sequence[int]):
    """A pseudorandom order of 0 to num_examples - 1 that takes no memory: each place is computed when it is asked for.

    A Feistel network over pairs (left, right) with left < a and right < b, a b >= num_examples, applied again while its
    result is no index (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). seed: any text.
    """

    def __init__(self, num_examples: int, seed: str) -> None:
        self._length = num_examples
        self._left = max(math.isqrt(num_examples - 1) + 1, 1) if num_examples else 1
        self._right = -(-num_examples // self._left)
        digest = blake2b(seed.encode(), digest_size=16 * _ROUNDS // 2).digest()
        keys = [int.from_bytes(digest[i : i + 4]) for i in range(0, len(digest), 4)]
        self._keys = list(zip(keys[:_ROUNDS], keys[_ROUNDS:], strict=True))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self._at(place) for place in range(self._length)[index]]
        return self._at(range(self._length)[index])

    def __iter__(self) -> Iterator[int]:
        return map(self._at, range(self._length))

    def _at(self, place: int) -> int:
        a, b = self._left, self._right
        while True:
            left, right = place % a, place // a
            for first, second in self._keys:
                left = (left + _mixed(right ^ first << 32)) % a
                right = (right + _mixed(left ^ second << 32)) % b
            place = right * a + left
            if place < self._length:
                return place


def _mixed(value: int) -> int:
    """64 bits, each of which depends on all of `value` (splitmix64's finalizer; Steele, Lea and Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31

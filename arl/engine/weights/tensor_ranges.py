"""Tensors are sent end to end, as bytes, in ranges of one dtype."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache

from arl.api.engine import TensorSpec


@cache
def byte_size(spec: TensorSpec) -> int:
    bits = re.search(r"\d+", spec.dtype)  # bool has none
    return math.prod(spec.shape) * max(int(bits[0]) // 8 if bits else 1, 1)


def ranges(specs: Sequence[TensorSpec], max_bytes: int) -> list[tuple[int, int]]:
    """Split `specs` into (start, stop) of one dtype and at most max_bytes; a larger tensor gets its own range."""
    found: list[tuple[int, int]] = []
    start, size = 0, 0
    for i, spec in enumerate(specs):
        grown = size + byte_size(spec)
        if i > start and (grown > max_bytes or spec.dtype != specs[start].dtype):
            found.append((start, i))
            start, grown = i, byte_size(spec)
        size = grown
    return [*found, (start, len(specs))] if specs else []

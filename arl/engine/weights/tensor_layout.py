"""How tensors are laid out: end to end, as bytes, in ranges of one dtype."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from arl.api.engine import TensorSpec

if TYPE_CHECKING:
    import torch


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


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    import torch  # the script's process makes ranges without it

    return getattr(torch, spec.dtype)


def spec_of(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> TensorSpec:
    return TensorSpec(name=name, dtype=str(dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def views(specs: Sequence[TensorSpec], flat: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that lie end to end in `flat` (uint8), without a copy."""
    parts = flat.split([byte_size(spec) for spec in specs])
    return [part.view(torch_dtype(spec)).view(spec.shape) for spec, part in zip(specs, parts, strict=True)]


def rows_of(num_rows: int, rank: int, num_ranks: int) -> range:
    """A rank's rows of a tensor sharded over its first dimension, by torch.chunk's rule."""
    each = -(-num_rows // num_ranks)
    return range(min(rank * each, num_rows), min((rank + 1) * each, num_rows))

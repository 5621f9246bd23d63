"""How weights lie in memory while they travel: tensors end to end, as bytes, in chunks of one dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from arl.api.engine import TensorSpec


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    return getattr(torch, spec.dtype)


def spec_of(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> TensorSpec:
    return TensorSpec(name=name, dtype=str(dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def byte_size(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * torch_dtype(spec).itemsize


def ranges(specs: Sequence[TensorSpec], max_bytes: int) -> list[tuple[int, int]]:
    """Split `specs` into (start, stop) of one dtype and at most max_bytes each; a larger tensor has its own range."""
    found: list[tuple[int, int]] = []
    start, size = 0, 0
    for i, spec in enumerate(specs):
        grown = size + byte_size(spec)
        if i > start and (grown > max_bytes or spec.dtype != specs[start].dtype):
            found.append((start, i))
            start, grown = i, byte_size(spec)
        size = grown
    return [*found, (start, len(specs))] if specs else []


def views(specs: Sequence[TensorSpec], flat: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that lie end to end in `flat` (uint8); nothing is copied."""
    parts = flat.split([byte_size(spec) for spec in specs])
    return [part.view(torch_dtype(spec)).view(spec.shape) for spec, part in zip(specs, parts, strict=True)]


def rows_of(num_rows: int, rank: int, num_ranks: int) -> range:
    """A rank's rows of a tensor that is sharded over its first dimension, by torch.chunk's rule."""
    each = -(-num_rows // num_ranks)
    return range(min(rank * each, num_rows), min((rank + 1) * each, num_rows))

"""The fingerprints of sharded weights: each rank adds up its own elements, wherever they lie in the whole tensor.

element i of a tensor = (row r, column c)      k_i = K(r) K(c)      s_i = S(r) S(c)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from arl.api.train_engine import TensorPrint
from arl.engine.fsdp.minibatch import reduce_over
from arl.engine.fsdp.policy import local_shard

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)
_HALF = 1 << 33
"""Columns have other numbers than rows."""
_CHUNK = 1 << 22
"""Elements that are looked at together."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of as many bytes as an element has."""


@torch.no_grad()
def fingerprints(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, TensorPrint]:
    """The print of each tensor, the same on every rank; a collective. device: where the ranks' group reduces."""
    bits = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    sums = torch.zeros(len(tensors), 2, dtype=torch.float64, device=device)
    for i, tensor in enumerate(tensors.values()):
        shard = local_shard(tensor.detach())
        if shard.numel() and _is_ours(tensor):
            bits[i], sums[i, 0], sums[i, 1] = _of_shard(shard, _offsets(tensor), tensor.shape)
    reduce_over(bits)
    reduce_over(sums)
    rows = zip(tensors, bits.tolist(), sums.tolist(), strict=True)
    return {
        name: TensorPrint(bits=own & (2**64 - 1), norm=math.sqrt(square), projection=projection)
        for name, own, (square, projection) in rows
    }


def _of_shard(
    shard: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sums of bits (wrapping), squares and signed elements. offsets: of the shard's first element in `shape`."""
    rows = torch.arange(shard.shape[0] if shard.ndim else 1, device=shard.device) + (offsets[0] if offsets else 0)
    columns = _columns(shard, offsets, shape) + _HALF
    flat = shard.reshape(len(rows), -1)
    of_rows, of_columns = _numbers(rows), _numbers(columns)
    row_signs, column_signs = _signs(of_rows), _signs(of_columns)
    bits = torch.zeros((), dtype=torch.int64, device=shard.device)
    square, projection = (torch.zeros((), dtype=torch.float64, device=shard.device) for _ in range(2))
    step = max(_CHUNK // flat.shape[1], 1)
    for part in (slice(start, start + step) for start in range(0, len(rows), step)):
        own = flat[part].contiguous()
        words = own.view(_BITS[own.element_size()]).long()
        bits += ((words * of_columns).sum(1) * of_rows[part]).sum()
        wide = own.double()
        square += wide.square().sum()
        projection += row_signs[part] @ (wide @ column_signs)
    return bits, square, projection


def _columns(shard: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """int64: where each element of one of the shard's rows lies in a row of the whole tensor."""
    places = torch.zeros(1, dtype=torch.int64, device=shard.device)
    for size, offset, whole in zip(shard.shape[1:], offsets[1:], shape[1:], strict=True):
        places = (places[:, None] * whole + torch.arange(size, device=shard.device) + offset).flatten()
    return places


def _numbers(places: torch.Tensor) -> torch.Tensor:
    """An odd pseudo-random int64 for each place, after SplitMix64 (Steele, Lea and Flood 2014)."""
    z = places * _GOLDEN + _GOLDEN
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX
    return (z ^ ((z >> 27) & 0x1FFFFFFFFF)) | 1


def _signs(numbers: torch.Tensor) -> torch.Tensor:
    """float64: 1 or -1."""
    return 1.0 - 2.0 * ((numbers >> 40) & 1).double()


def _offsets(tensor: torch.Tensor) -> Sequence[int]:
    """Where this rank's part begins in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return [0] * tensor.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1]


def _is_ours(tensor: torch.Tensor) -> bool:
    """Whether this rank counts its part, of which others may have copies: the first one does."""
    if not isinstance(tensor, DTensor):
        return torch.distributed.get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return all(place == 0 for place, kind in zip(coordinate, tensor.placements, strict=True) if kind.is_replicate())

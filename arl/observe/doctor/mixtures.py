"""Mixtures of two versions that faulty loads leave in a server, each with the cause that it would prove."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from arl.observe.doctor.causes import (
    BASE_SERVED,
    NOT_LOADED,
    OTHER_ADAPTER,
    PACKED,
    PARTS_NOT_UPDATED,
    PRECISION,
    SHARD,
    TIED_HEAD,
    Cause,
)
from arl.observe.doctor.reference_model import Mix, part_of

_ROW_PARALLEL = ("o_proj", "down_proj")
"""Layers that tensor parallelism splits along their inputs; it splits others along their outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """The weights that a server would hold if this were the cause."""

    cause: Cause
    detail: str
    mix: Mix
    is_of_first: bool = False
    """Whether it mixes with the first version instead of the previous one."""


def suspicions(parts: Sequence[str], shards: Sequence[int], *, is_tied: bool, adapters: bool) -> Iterator[Suspicion]:
    """What may have gone wrong in a load, the simplest cause first. shards: possible numbers of parts of a weight."""
    if adapters:
        yield Suspicion(cause=BASE_SERVED, detail="", mix=_all_old, is_of_first=True)
        yield Suspicion(cause=OTHER_ADAPTER, detail="", mix=_all_old)
    else:
        yield Suspicion(cause=NOT_LOADED, detail="", mix=_all_old)
    if is_tied:
        yield Suspicion(cause=TIED_HEAD, detail="The head is old, the embedding new", mix=_old_in({"head"}))
        yield Suspicion(cause=TIED_HEAD, detail="The embedding is old, the head new", mix=_old_in({"embedding"}))
        both = _old_in({"embedding", "head"})
        yield Suspicion(cause=PARTS_NOT_UPDATED, detail="The embedding, which is the head, is old", mix=both)
    yield Suspicion(cause=PRECISION, detail="The load rounds weights to bfloat16", mix=_rounded)
    yield Suspicion(cause=PACKED, detail="", mix=_old_linear(with_head=False))
    yield Suspicion(cause=PACKED, detail="The head is old, too", mix=_old_linear(with_head=True))
    for part in parts:
        if not (is_tied and part in ("embedding", "head")):
            yield Suspicion(cause=PARTS_NOT_UPDATED, detail=f"Old: {part}", mix=_old_in({part}))
    for number in sorted(set(shards) - {1}):
        for rank in range(number):
            detail = f"Old: part {rank} of {number}"
            yield Suspicion(cause=SHARD, detail=detail, mix=_old_shard(rank, number, is_tensor_parallel=True))
            yield Suspicion(
                cause=SHARD, detail=f"{detail}, in rows", mix=_old_shard(rank, number, is_tensor_parallel=False)
            )


def old_parts(parts: set[str]) -> Suspicion:
    """Several parts at once."""
    return Suspicion(cause=PARTS_NOT_UPDATED, detail=f"Old: {', '.join(sorted(parts))}", mix=_old_in(parts))


def _all_old(_name: str, old: torch.Tensor, _new: torch.Tensor) -> torch.Tensor:
    return old


def _rounded(_name: str, _old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return new.bfloat16().float()


def _old_in(parts: set[str]) -> Mix:
    return lambda name, old, new: old if part_of(name) in parts else new


def _old_linear(*, with_head: bool) -> Mix:
    def mix(name: str, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        is_linear = old.dim() >= 2 and part_of(name) != "embedding"
        return old if is_linear and (with_head or part_of(name) != "head") else new

    return mix


def _old_shard(rank: int, number: int, *, is_tensor_parallel: bool) -> Mix:
    """One rank's part of each matrix is old. Every rank has whole vectors, unless all tensors are split by rows."""

    def mix(name: str, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        dim = 1 if is_tensor_parallel and any(layer in name for layer in _ROW_PARALLEL) else 0
        if old.dim() <= dim or (is_tensor_parallel and old.dim() < 2):
            return new
        size = -(-old.shape[dim] // number)
        length = min(size, old.shape[dim] - rank * size)
        if length <= 0:
            return new
        mixed = new.clone()
        mixed.narrow(dim, rank * size, length).copy_(old.narrow(dim, rank * size, length))
        return mixed

    return mix

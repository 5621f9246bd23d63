"""Weights that a trainer broadcasts: process groups, and the begin .. end transaction that applies them at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed import distributed_c10d as c10d

from arl.engine.local.received_weights import Shapes, WeightsError, check_fit

Expected = tuple[str, str, Sequence[int]]
"""A tensor that is announced: its name, dtype and shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAddress:
    """Where a trainer gathers its group: rank 0 listens at address:port, this server joins as `rank`."""

    address: str
    port: int
    rank: int
    world_size: int
    name: str
    backend: str


@dataclass(slots=True)
class _Transaction:
    """What was received since begin_weight_update, and how it is to be applied."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    weight_version: str | None = None
    flush_cache: bool = False
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedWeights:
    """A finished transaction: the tensors to load, and how."""

    tensors: dict[str, torch.Tensor]
    weight_version: str | None
    flush_cache: bool


def join_group(at: GroupAddress, timeout: timedelta) -> dist.ProcessGroup:
    """Join a trainer's group, beside any other that this process is in; returns when all ranks have joined.

    Raises RuntimeError when the group does not gather in time.
    """
    gathering = rendezvous(f"tcp://{at.address}:{at.port}", at.rank, at.world_size, timeout=timeout)
    store, _, _ = next(gathering)
    return form_group(store, at, timeout)


def form_group(store: Store, at: GroupAddress, timeout: timedelta) -> dist.ProcessGroup:
    """The process group of the ranks that meet in `store`, the one at the group's address; returns when all have met.

    The names under which they find each other there are those of SGLang and of the trainers that speak to it, hence
    the prefix, and the private function: torch has no public way to a group outside the default one.
    """
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        at.world_size,
        at.rank,
        [],
        dist.Backend(at.backend),
        PrefixStore(at.name, store),
        group_name=at.name,  # pyright: ignore[reportArgumentType]
        timeout=timeout,
    )
    if not isinstance(group, dist.ProcessGroup):
        raise RuntimeError(f"rank {at.rank} is not in a group of {at.world_size}")
    c10d._world.pg_group_ranks[group] = {i: i for i in range(at.world_size)}
    return group


class WeightReceiver:
    """Joins trainers' groups and receives what they broadcast. Its calls block; make them all from one thread.

    A trainer that dies or stalls costs `timeout_s` and an error, never the server. After a failed receive the group
    is left, as a later broadcast could not be told from the one that failed, and the open transaction can only end
    with that error. Joining or leaving a group discards a transaction that a former trainer left open.
    """

    def __init__(self, parameters: Shapes, device: str, timeout_s: float) -> None:
        self._parameters = parameters
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._open: _Transaction | None = None

    def join(self, at: GroupAddress) -> None:
        """Join the group of that name. Raises WeightsError if it does not gather in time."""
        if at.name in self._groups:
            raise WeightsError(f"the group {at.name!r} was joined already; destroy it first")
        if not dist.is_backend_available(at.backend.lower()):
            raise WeightsError(f"backend {at.backend!r} is not available here; gloo works between CPU processes")
        self._open = None
        try:
            self._groups[at.name] = join_group(at, self._timeout)
        except (RuntimeError, ValueError) as error:
            raise WeightsError(f"cannot join the group at {at.address}:{at.port}: {first_line(error)}") from error

    def leave(self, name: str) -> None:
        """Leave a group, and forget a transaction that is open. Raises WeightsError if it was not joined."""
        self._open = None
        if name not in self._groups:
            raise WeightsError("The group to be destroyed does not exist.")
        dist.destroy_process_group(self._groups.pop(name))

    def begin(self) -> None:
        if self._open is not None:
            raise WeightsError("a weight-update session is already open; call end_weight_update() first")
        self._open = _Transaction()

    def receive(self, group_name: str, expected: Sequence[Expected], *, in_one: bool) -> None:
        """Receive what rank 0 broadcasts for each (name, dtype, shape), in that order, into the transaction.

        in_one: as a single broadcast of bytes in which the tensors lie end to end; else one for each tensor.
        """
        if self._open is None:
            raise WeightsError(
                "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )
        try:
            buffers, tensors = (_one_buffer if in_one else _buffers)(expected, self._device)
            self._broadcasts(group_name, buffers)
            check_fit(tensors, self._parameters)
        except WeightsError as error:
            self._open.failure = str(error)
            raise
        self._open.tensors.update(tensors)

    def _broadcasts(self, group_name: str, buffers: Sequence[torch.Tensor]) -> None:
        group = self._groups.get(group_name)
        if group is None:
            raise WeightsError(f"no group {group_name!r}; call init_weights_update_group() first")
        try:
            for buffer in buffers:
                dist.broadcast(buffer, group_src=0, group=group)
        except RuntimeError as error:
            dist.destroy_process_group(self._groups.pop(group_name))
            raise WeightsError(f"receiving from the group {group_name!r} failed: {first_line(error)}") from error

    def mark(self, weight_version: str | None, flush_cache: bool) -> None:
        """How the open transaction is to be applied: the last version named, and a flush if any bucket asks for one."""
        if self._open is not None:
            self._open.weight_version = weight_version or self._open.weight_version
            self._open.flush_cache |= flush_cache

    def end(self) -> ReceivedWeights:
        """Close the transaction. Raises WeightsError, with nothing to apply, if any part of it failed."""
        if self._open is None:
            raise WeightsError("no weight-update session is open; call begin_weight_update() first")
        ended, self._open = self._open, None
        if ended.failure:
            raise WeightsError(f"nothing was applied: {ended.failure}")
        return ReceivedWeights(
            tensors=ended.tensors, weight_version=ended.weight_version, flush_cache=ended.flush_cache
        )


def _buffers(expected: Sequence[Expected], device: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """What to receive, and the tensors that it will hold: one for each."""
    tensors = {
        name: torch.empty(tuple(shape), dtype=_dtype(name, dtype), device=device) for name, dtype, shape in expected
    }
    return list(tensors.values()), tensors


def _one_buffer(expected: Sequence[Expected], device: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """What to receive, and the tensors that it will hold: end to end in one buffer of bytes."""
    dtypes = [_dtype(name, dtype) for name, dtype, _ in expected]
    sizes = [math.prod(shape) * dtype.itemsize for (_, _, shape), dtype in zip(expected, dtypes, strict=True)]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    tensors: dict[str, torch.Tensor] = {}
    start = 0
    for (name, _, shape), dtype, size in zip(expected, dtypes, sizes, strict=True):
        if start % dtype.itemsize:
            raise WeightsError(f"{name} would begin at byte {start}, which is no place for {dtype}: send it apart")
        tensors[name] = flat[start : start + size].view(dtype).view(tuple(shape))
        start += size
    return [flat], tensors


def _dtype(name: str, dtype: str) -> torch.dtype:
    kind = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype):
        raise WeightsError(f"the dtype of {name} is {dtype!r}; torch has none of that name")
    return kind


def first_line(error: Exception) -> str:
    """What went wrong, without torch's stack of native frames."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

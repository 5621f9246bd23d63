"""Putting whole tensors together on rank 0 out of all ranks' shards, beside training and apart from its collectives."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from arl.api.engine import TensorSpec
from arl.api.errors import TransportError
from arl.engine.fsdp.parallel import whole_tensor
from arl.engine.weights.layout import byte_size, ranges, rows_of, torch_dtype, views

_TIMEOUT_S = 600.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """Tensors that travel together. is_sharded: whether each rank has rows of one; if not, rank 0 has all of it."""

    specs: Sequence[TensorSpec]
    is_sharded: Sequence[bool]

    def rows(self, rank: int) -> list[range]:
        """Which rows of each tensor the rank brings. A tensor without dimensions counts as one row."""
        num_ranks = dist.get_world_size()
        return [
            rows_of(num_rows, rank, num_ranks) if sharded else range(0 if rank else num_rows)
            for num_rows, sharded in zip(self.num_rows, self.is_sharded, strict=True)
        ]

    @property
    def num_rows(self) -> list[int]:
        return [spec.shape[0] if spec.shape else 1 for spec in self.specs]

    def part(self, rank: int) -> list[TensorSpec]:
        """What the rank brings, as tensors of their own."""
        return [
            replace(spec, shape=(len(rows), *spec.shape[1:]))
            for spec, rows in zip(self.specs, self.rows(rank), strict=True)
        ]


class ShardGatherer:
    """Copies shards aside, and gathers them on rank 0 in a thread, over a gloo group that is for this alone.

    Tensors that are sharded over their rows and all ranks (FSDP2's way) are gathered beside training. Others, such as
    those of tensor parallelism, are made whole within `begin`, by torch and on the devices.
    """

    def __init__(self, specs: Sequence[TensorSpec], chunk_bytes: int, device: torch.device) -> None:
        """A collective. specs: of all tensors, whole, with the dtype that they are to have."""
        self._specs = specs
        self._ranges = ranges(specs, chunk_bytes)
        self._is_cuda = device.type == "cuda"
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._group = _group_of_all() if self._num_ranks > 1 else None
        # torch's thread count is a property of the thread: one, as the others are for training.
        self._thread = ThreadPoolExecutor(1, "arl-gather", initializer=torch.set_num_threads, initargs=(1,))
        self._failure: TransportError | None = None

    def begin(self, tensors: Sequence[torch.Tensor]) -> list[Future[torch.Tensor]]:
        """Copy this rank's part of each tensor aside; a collective.

        Returns, for each chunk, a future of all of its tensors, end to end as bytes. On ranks other than 0 there is
        nothing in them. With several ranks, once a gathering failed with TransportError all later ones do: what others
        still send of the one that failed would be taken for the next one's.
        """
        chunks, parts = [], []
        for start, stop in self._ranges:
            members = tensors[start:stop]
            chunk = _Chunk(specs=self._specs[start:stop], is_sharded=[_is_sharded(t) for t in members])
            chunks.append(chunk)
            parts.append(self._copy(chunk, members))
        copied = torch.cuda.Event() if self._is_cuda else None
        if copied is not None:
            copied.record()
        futures: list[Future[torch.Tensor]] = [Future() for _ in chunks]
        self._thread.submit(self._gather, chunks, parts, copied, futures)
        return futures

    def close(self) -> None:
        """Finish what was begun. Idempotent."""
        self._thread.shutdown()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _copy(self, chunk: _Chunk, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """This rank's rows, end to end as bytes, in memory of their own on the CPU."""
        part = chunk.part(self._rank)
        flat = self._empty(part)
        for spec, tensor, target in zip(part, tensors, views(part, flat), strict=True):
            mine = _local(tensor)
            if target.numel():
                target.copy_(mine.to(torch_dtype(spec)).view(spec.shape), non_blocking=True)
        return flat

    def _empty(self, specs: Sequence[TensorSpec]) -> torch.Tensor:
        return torch.empty(sum(map(byte_size, specs)), dtype=torch.uint8, pin_memory=self._is_cuda)

    # On the thread

    def _gather(
        self,
        chunks: Sequence[_Chunk],
        parts: list[torch.Tensor],
        copied: torch.cuda.Event | None,
        futures: Sequence[Future[torch.Tensor]],
    ) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            if copied is not None:
                copied.synchronize()
            for chunk, future in zip(chunks, futures, strict=True):
                future.set_result(self._whole(chunk, parts.pop(0)))
        except Exception as error:  # noqa: BLE001 (whoever asks the futures raises it)
            failure = self._failure or self._failed(error)
            for future in futures:
                if not future.done():
                    future.set_exception(failure)

    def _failed(self, error: Exception) -> TransportError:
        if self._rank:  # nobody asks this rank's futures
            logger.error("this rank's weights could not be brought to rank 0", exc_info=error)
        failure = TransportError(f"the weights could not be gathered from all ranks: {error}")
        failure.__cause__ = error
        self._failure = failure if self._num_ranks > 1 else None
        return failure

    def _whole(self, chunk: _Chunk, mine: torch.Tensor) -> torch.Tensor:
        """The chunk's tensors, whole, on rank 0; an empty tensor on the others."""
        if self._num_ranks == 1:
            return mine
        if self._rank:
            if mine.numel():
                dist.send(mine, group_dst=0, group=self._group)
            return mine[:0]
        flat = self._empty(chunk.specs)
        wholes = [
            whole.view(-1, *spec.shape[1:]) for spec, whole in zip(chunk.specs, views(chunk.specs, flat), strict=True)
        ]
        for rank, part in enumerate(self._parts(chunk, mine)):
            for whole, rows, piece in zip(wholes, chunk.rows(rank), views(chunk.part(rank), part), strict=True):
                whole[rows.start : rows.stop] = piece
        return flat

    def _parts(self, chunk: _Chunk, mine: torch.Tensor) -> list[torch.Tensor]:
        """What each rank brings, by rank."""
        others = [self._empty(chunk.part(rank)) for rank in range(1, self._num_ranks)]
        receiving = [
            dist.irecv(part, group_src=rank, group=self._group) for rank, part in enumerate(others, 1) if part.numel()
        ]
        for work in receiving:
            if work is not None:
                work.wait()
        return [mine, *others]


def _group_of_all() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    if not isinstance(group, dist.ProcessGroup):
        raise RuntimeError("this rank is not in a group of all ranks")
    return group


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether every rank has its share of the rows, and nothing else is split."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.size() != dist.get_world_size():
        return False
    (placement, *others) = tensor.placements
    return not others and type(placement) is Shard and placement.dim == 0


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a tensor; all of one that is not sharded by rows."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if _is_sharded(tensor) else whole_tensor(tensor)

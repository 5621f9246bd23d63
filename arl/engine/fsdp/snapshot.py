"""Weights copied aside between two steps, and gathered, written and sent beside the steps that follow.

    training's thread    every rank: copy its own shards to the CPU, in the dtype that servers hold
    arl-gather           rank 0: put whole tensors together, chunk by chunk, out of all ranks' shards
    the publisher's      rank 0: write them, or send each range of them as soon as its chunks are there

Neither changes the other: later steps do not reach the copy, and its collectives run in a group of their own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from arl.api.engine import TensorSpec, WeightGroup
from arl.api.errors import ConfigError, TransportError
from arl.engine.fsdp.export import ModelWriter
from arl.engine.fsdp.lora import AdapterCopy, Adapters, MergedWeights
from arl.engine.fsdp.parallel import whole_tensor
from arl.engine.weights.layout import byte_size, ranges, rows_of, torch_dtype, views
from arl.engine.weights.sender import WeightSender

_CHUNK_BYTES = 256 << 20
"""Gathered at a time: enough to be quick, and little enough that sending begins soon."""
_TIMEOUT_S = 600.0
"""How long a rank waits for another's shards."""
_NO_ADAPTERS = "there are no adapters to publish: the engine trains the whole model; set train.lora"

logger = logging.getLogger(__name__)


class RankAdapter:
    """One rank's copy of adapters: an AdapterSnapshot (weights/adapter.py). Rank 0 has and writes the tensors."""

    def __init__(self, version: int, adapter: AdapterCopy) -> None:
        self.version = version
        self._rank = dist.get_rank()
        self._adapter: AdapterCopy | None = adapter

    def write_adapter(self, directory: Path) -> int:
        if (adapter := self._adapter) is None:
            raise TransportError(f"the snapshot of version {self.version} was released")
        return 0 if self._rank else adapter.write(directory)

    def release(self) -> None:
        self._adapter = None


class RankSnapshot:
    """One rank's snapshot: a SendableSnapshot (weights/distributed.py).

    Rank 0's has the tensors; the others' only release their memory. With adapters its tensors are the merged ones, and
    it is an AdapterSnapshot too.
    """

    def __init__(
        self,
        version: int,
        writer: ModelWriter,
        sender: WeightSender,
        chunks: Sequence[Future[torch.Tensor]],
        adapter: RankAdapter | None,
    ) -> None:
        """chunks: of writer.own_specs, in order; each is all of its tensors' bytes once it was put together."""
        self.version = version
        self._rank = dist.get_rank()
        self._writer = writer
        self._sender = sender
        self._chunks = chunks
        self._adapter = adapter
        self._converting = threading.Lock()
        self._converted: dict[str, torch.Tensor] = {}

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return self._writer.specs

    @property
    def num_bytes(self) -> int:
        return sum(map(byte_size, self.specs))

    @property
    def backend(self) -> str:
        return self._sender.backend

    def write(self, directory: Path) -> int:
        """Write a model directory; rank 0 alone does, the others return 0. Raises TransportError."""
        return 0 if self._rank else self._writer.write(directory, self._own_tensors())

    def write_adapter(self, directory: Path) -> int:
        """Write the adapters alone, as peft does. Raises ConfigError without train.lora."""
        if self._adapter is None:
            raise ConfigError(_NO_ADAPTERS)
        return self._adapter.write_adapter(directory)

    def open_group(self, server: str, num_ranks: int, backend: str, address: str | None = None) -> WeightGroup:
        return self._sender.open(server, num_ranks, backend, address)

    def join(self, group: WeightGroup) -> None:
        self._sender.join(group)

    def send(self, group: str, start: int, stop: int) -> None:
        self._sender.send(group, self._bytes(start, stop))

    def leave(self, group: str) -> None:
        self._sender.leave(group)

    def release(self) -> None:
        self._chunks = ()
        self._converted = {}
        if self._adapter is not None:
            self._adapter.release()

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, by the model's own names; waits until they are gathered."""
        specs = self._writer.own_specs
        flats = [chunk.result() for chunk in self._held_chunks()]
        parts = zip(ranges(specs, _CHUNK_BYTES), flats, strict=True)
        tensors = [tensor for (start, stop), flat in parts for tensor in views(specs[start:stop], flat)]
        return {spec.name: tensor for spec, tensor in zip(specs, tensors, strict=True)}

    def _bytes(self, start: int, stop: int) -> torch.Tensor:
        """specs[start:stop] end to end: without copying, where they lie in one chunk."""
        if self._writer.is_converted:
            return torch.cat([self._served(spec.name) for spec in self.specs[start:stop]])
        chunks, pieces = self._held_chunks(), []
        for (first, last), chunk in zip(ranges(self.specs, _CHUNK_BYTES), chunks, strict=True):
            if start < last and first < stop:
                begin = sum(map(byte_size, self.specs[first : max(first, start)]))
                size = sum(map(byte_size, self.specs[max(first, start) : min(last, stop)]))
                pieces.append(chunk.result()[begin : begin + size])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _served(self, name: str) -> torch.Tensor:
        """The bytes of a converted tensor. The first call converts all of the model's tensors."""
        with self._converting:
            converted = self._converted  # `release` may replace it at any time
            if not converted:
                converted.update(self._writer.served(self._own_tensors()))
            return converted[name].contiguous().view(-1).view(torch.uint8)

    def _held_chunks(self) -> Sequence[Future[torch.Tensor]]:
        if self._rank or not (chunks := self._chunks):
            raise TransportError(f"the snapshot of version {self.version} was released, or is not rank 0's")
        return chunks


class SnapshotTaker:
    """Takes one rank's snapshots for its train engine. All ranks make the same calls."""

    def __init__(self, writer: ModelWriter, device: torch.device, adapters: Adapters | None) -> None:
        self._writer = writer
        self._adapters = adapters
        self._sender = WeightSender(device)
        self._gatherer = ShardGatherer(writer.own_specs, _CHUNK_BYTES, device)

    def take(self, version: int) -> RankSnapshot:
        """Copy this rank's shards aside; a collective. Gathering them happens beside the next step."""
        if self._adapters is None:
            weights, adapter = self._writer.model.state_dict(), None
        else:
            weights, adapter = self._adapters.merged(), self.take_adapter(version)
        return RankSnapshot(version, self._writer, self._sender, self._gatherer.begin(weights), adapter)

    def take_adapter(self, version: int) -> RankAdapter:
        """Copy the adapters aside, whole; a collective. Raises ConfigError without train.lora."""
        if self._adapters is None:
            raise ConfigError(_NO_ADAPTERS)
        return RankAdapter(version, self._adapters.copy())

    def close(self) -> None:
        """Finish gathering the snapshots that were taken, and close. Idempotent."""
        self._sender.close()
        self._gatherer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """Tensors that travel together."""

    specs: Sequence[TensorSpec]
    is_sharded: Sequence[bool]
    """Whether each rank has rows of a tensor; if not, rank 0 has all of it."""

    def rows(self, rank: int) -> list[range]:
        """The rows of each tensor that the rank has. A tensor without dimensions counts as one row."""
        num_ranks = dist.get_world_size()
        return [
            rows_of(num_rows, rank, num_ranks) if sharded else range(0 if rank else num_rows)
            for num_rows, sharded in zip(self.num_rows, self.is_sharded, strict=True)
        ]

    @property
    def num_rows(self) -> list[int]:
        return [spec.shape[0] if spec.shape else 1 for spec in self.specs]

    def part(self, rank: int) -> list[TensorSpec]:
        """The rank's rows, as tensors of their own."""
        return [
            replace(spec, shape=(len(rows), *spec.shape[1:]))
            for spec, rows in zip(self.specs, self.rows(rank), strict=True)
        ]


class ShardGatherer:
    """Copies shards aside, and gathers them on rank 0 in a thread of its own, over a gloo group of its own.

    Tensors that are sharded by rows over all ranks (FSDP2's way) are gathered beside training. Others, such as those of
    tensor parallelism, are made whole within `begin`, by torch and on the devices.
    """

    def __init__(self, specs: Sequence[TensorSpec], chunk_bytes: int, device: torch.device) -> None:
        """A collective. specs: of all tensors, whole, in the dtype that servers hold."""
        self._specs = specs
        self._ranges = ranges(specs, chunk_bytes)
        self._is_cuda = device.type == "cuda"
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._group = _group_of_all() if self._num_ranks > 1 else None
        # torch's thread count is a property of the thread: one, as the others are for training.
        self._thread = ThreadPoolExecutor(1, "arl-gather", initializer=torch.set_num_threads, initargs=(1,))
        self._failure: TransportError | None = None

    def begin(self, tensors: Mapping[str, torch.Tensor] | MergedWeights) -> list[Future[torch.Tensor]]:
        """Copy this rank's part of each tensor aside; a collective. tensors: by the names of the specs.

        Returns a future for each chunk: all of its tensors, end to end as bytes; empty on ranks other than 0. With
        several ranks, once a gathering fails with TransportError all later ones do: bytes that others still send for it
        would be taken for the next one's.
        """
        chunks, parts = [], []
        for start, stop in self._ranges:
            members = [tensors[spec.name].detach() for spec in self._specs[start:stop]]
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
        """Finish the gatherings that were begun. Idempotent."""
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
        except Exception as error:  # noqa: BLE001 (the futures raise it)
            failure = self._failure or self._failed(error)
            for future in futures:
                if not future.done():
                    future.set_exception(failure)

    def _failed(self, error: Exception) -> TransportError:
        if self._rank:  # nobody reads this rank's futures
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
        """Each rank's rows, by rank."""
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

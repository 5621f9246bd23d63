"""Weights are copied between two steps, and gathered, written and sent during the steps that follow.

    training's thread     each rank copies its shards to the CPU, in the dtype that servers hold
    arl-gather            rank 0 of several, or on a GPU, assembles whole tensors from all shards, chunk by chunk
    publishing threads    rank 0 writes them, or sends each range as soon as its chunks are there

Later steps do not change the copy. Its collectives have their own process group.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from arl.api.engine import TensorSpec
from arl.api.errors import ConfigError, TransportError
from arl.api.settings.engines import LoRAConfig
from arl.engine.fsdp.lora import Adapters, MergedWeights, RankAdapter
from arl.engine.fsdp.model import ModelWriter, load_model
from arl.engine.fsdp.parallel import ProcessGroupLease, whole_tensor
from arl.engine.fsdp.policy import local_shard
from arl.engine.fsdp.saving import load_weights, read_progress
from arl.engine.weights.distributed import byte_size, ranges, rows_of, torch_dtype, views
from arl.engine.weights.process_groups import WeightSender

_CHUNK_BYTES = 256 << 20
"""A chunk's size: large enough for full speed, small enough that sending begins soon."""
_TIMEOUT = timedelta(minutes=10)
"""The longest that a rank waits for another's shards."""

logger = logging.getLogger(__name__)


class RankSnapshot:
    """One rank's SendableSnapshot. Rank 0's holds the tensors, adapters merged; the others' only release memory."""

    def __init__(
        self, version: int, writer: ModelWriter, sender: WeightSender, chunks: Sequence[Future[torch.Tensor]]
    ) -> None:
        """chunks: the bytes of writer.own_specs, in order."""
        self.version = version
        self.specs: tuple[TensorSpec, ...] = writer.specs
        self.num_bytes = sum(map(byte_size, self.specs))
        # These are the sender's own: groups outlive the snapshot.
        self.backend, self.open_group, self.join, self.leave = sender.backend, sender.open, sender.join, sender.leave
        self.sender = sender
        self._rank = dist.get_rank()
        self._writer = writer
        self._chunks = chunks
        self._converting = threading.Lock()
        self._converted: dict[str, torch.Tensor] = {}

    def write(self, directory: Path) -> int:
        """Write a model directory on rank 0; others return 0. Raises TransportError."""
        return 0 if self._rank else self._writer.write(directory, self._own_tensors())

    def wait(self) -> None:
        """Wait until all tensors are gathered and converted to the servers' form. Raises TransportError."""
        if self._writer.is_converted:
            self._served(self.specs[0].name)
        for chunk in self._held_chunks():
            chunk.result()

    def send(self, group: str, start: int, stop: int) -> None:
        self.sender.send(group, self._bytes(start, stop))

    def release(self) -> None:
        self._chunks = ()
        self._converted = {}

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        """Wait until all tensors are gathered; returns them by the model's own names."""
        specs = self._writer.own_specs
        flats = [chunk.result() for chunk in self._held_chunks()]
        parts = zip(ranges(specs, _CHUNK_BYTES), flats, strict=True)
        tensors = [tensor for (start, stop), flat in parts for tensor in views(specs[start:stop], flat)]
        return {spec.name: tensor for spec, tensor in zip(specs, tensors, strict=True)}

    def _bytes(self, start: int, stop: int) -> torch.Tensor:
        """The bytes of specs[start:stop], end to end; not copied if they lie in one chunk."""
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
        """The bytes of a converted tensor. The first call converts all tensors."""
        with self._converting:
            converted = self._converted  # `release` may replace it at any time
            if not converted:
                converted.update(self._writer.served(self._own_tensors()))
            return converted[name].contiguous().view(-1).view(torch.uint8)

    def _held_chunks(self) -> Sequence[Future[torch.Tensor]]:
        if self._rank or not (chunks := self._chunks):
            raise TransportError(f"the snapshot of version {self.version} was released, or this is not rank 0")
        return chunks


class SnapshotTaker:
    """Takes one rank's snapshots for its train engine. All ranks make the same calls."""

    def __init__(self, writer: ModelWriter, device: torch.device, adapters: Adapters | None) -> None:
        self._writer = writer
        self._adapters = adapters
        self._sender = WeightSender(device)
        self._gatherer = ShardGatherer(writer.own_specs, _CHUNK_BYTES, device)

    def take(self, version: int) -> RankSnapshot:
        """Copy this rank's shards; a collective. They are gathered during the next step."""
        weights = self._writer.model.state_dict() if self._adapters is None else self._adapters.merged()
        return RankSnapshot(version, self._writer, self._sender, self._gatherer.begin(weights))

    def take_adapter(self, version: int) -> RankAdapter:
        """Copy the whole adapters; a collective. Raises ConfigError without train.lora."""
        if self._adapters is None:
            raise ConfigError("there are no adapters to publish: the engine trains the whole model; set train.lora")
        return self._adapters.copy(version)

    def close(self) -> None:
        """Finish gatherings under way. Idempotent."""
        self._sender.close()
        self._gatherer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    specs: Sequence[TensorSpec]
    is_sharded: Sequence[bool]
    """For each tensor: whether the ranks share its rows. If not, rank 0 has them all."""

    def rows(self, rank: int) -> list[range]:
        """The rank's rows of each tensor. A scalar is one row."""
        num_ranks, sizes = dist.get_world_size(), [spec.shape[0] if spec.shape else 1 for spec in self.specs]
        return [
            rows_of(size, rank, num_ranks) if sharded else range(0 if rank else size)
            for size, sharded in zip(sizes, self.is_sharded, strict=True)
        ]

    def part(self, rank: int) -> list[TensorSpec]:
        """The specs of the rank's rows."""
        return [
            replace(spec, shape=(len(rows), *spec.shape[1:]))
            for spec, rows in zip(self.specs, self.rows(rank), strict=True)
        ]


class ShardGatherer:
    """Copies shards and gathers them on rank 0, over its own gloo group and on its own thread.

    Tensors whose rows all ranks share, as in FSDP2, are gathered during training. torch gathers others, such as those
    of tensor parallelism, on the devices, within `begin`.
    """

    def __init__(self, specs: Sequence[TensorSpec], chunk_bytes: int, device: torch.device) -> None:
        """A collective. specs: of whole tensors, in the dtype that servers hold."""
        self._specs = specs
        self._ranges = ranges(specs, chunk_bytes)
        self._is_cuda = device.type == "cuda"
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._group: dist.ProcessGroup | None = None
        self._failed = threading.Event()
        self._meet()

    def begin(self, tensors: Mapping[str, torch.Tensor] | MergedWeights) -> list[Future[torch.Tensor]]:
        """Copy this rank's part of each tensor; a collective. tensors: by the names of the specs.

        Returns a future for each chunk: on rank 0 its tensors end to end as bytes, on others an empty tensor. It raises
        TransportError if a rank failed. The next gathering then gets a new group and thread, because a rank may still
        wait in the failed group, or take late parts of the old gathering for parts of the new one.
        """
        if self._num_ranks > 1:
            failed = torch.tensor(self._failed.is_set(), dtype=torch.uint8)  # on the CPU, so that no GPU waits for it
            dist.all_reduce(failed, dist.ReduceOp.MAX)
            if failed:
                self._thread.shutdown(wait=False)
                self._meet()
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
        work = (chunks, parts, copied, futures, self._group, self._failed)
        if self._num_ranks == 1 and copied is None:
            self._gather(*work)  # everything is there
        else:
            self._thread.submit(self._gather, *work)
        return futures

    def close(self) -> None:
        """Finish gatherings under way, and leave the group. Idempotent."""
        self._thread.shutdown()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _meet(self) -> None:
        """Form a group of all ranks and start its thread; a collective."""
        self._failed = threading.Event()
        if self._num_ranks > 1:
            self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=_TIMEOUT))
        # torch counts threads for each calling thread; the other cores belong to training.
        self._thread = ThreadPoolExecutor(1, "arl-gather", initializer=torch.set_num_threads, initargs=(1,))

    def _copy(self, chunk: _Chunk, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """This rank's rows, end to end as bytes on the CPU."""
        part = chunk.part(self._rank)
        flat = self._empty(part)
        for spec, tensor, target in zip(part, tensors, views(part, flat), strict=True):
            mine = local_shard(tensor) if _is_sharded(tensor) else whole_tensor(tensor)
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
        group: dist.ProcessGroup | None,
        failed: threading.Event,
    ) -> None:
        """group, failed: of the `_meet` that this gathering belongs to."""
        try:
            if failed.is_set() and self._num_ranks > 1:
                raise RuntimeError("an earlier gathering failed")
            if copied is not None:
                copied.synchronize()
            for chunk, future in zip(chunks, futures, strict=True):
                future.set_result(self._whole(chunk, parts.pop(0), group))
        except Exception as error:  # of any kind: rank 0 raises it where it waits for a chunk
            if self._rank:  # nobody reads the futures of this rank
                logger.error("cannot send this rank's weights to rank 0", exc_info=error)
            failure = TransportError(f"cannot gather the weights of all ranks: {error}")
            failure.__cause__ = error
            failed.set()
            for future in futures:
                if not future.done():
                    future.set_exception(failure)

    def _whole(self, chunk: _Chunk, mine: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """On rank 0 the chunk's whole tensors, on others an empty tensor."""
        if self._num_ranks == 1:
            return mine
        if self._rank:
            if mine.numel():
                dist.send(mine, group_dst=0, group=group)
            return mine[:0]
        parts = [mine, *(self._empty(chunk.part(rank)) for rank in range(1, self._num_ranks))]
        receiving = [
            dist.irecv(part, group_src=rank, group=group) for rank, part in enumerate(parts) if rank and part.numel()
        ]
        for work in receiving:
            if work is not None:
                work.wait()
        flat = self._empty(chunk.specs)
        wholes = [
            whole.view(-1, *spec.shape[1:]) for spec, whole in zip(chunk.specs, views(chunk.specs, flat), strict=True)
        ]
        for rank, part in enumerate(parts):
            for whole, rows, piece in zip(wholes, chunk.rows(rank), views(chunk.part(rank), part), strict=True):
                whole[rows.start : rows.stop] = piece
        return flat


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether the ranks share its rows, and it is split in no other way."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.size() != dist.get_world_size():
        return False
    (placement, *others) = tensor.placements
    return not others and type(placement) is Shard and placement.dim == 0


def export_weights(checkpoint: Path, model: str, directory: Path, *, adapter: bool) -> int:
    """Write a Hugging Face directory, whole or not at all; returns its bytes. It needs no engine, optimizer or GPU: it
    holds the model once in float32, and once as files have it.

    checkpoint: of a policy, written by any number of ranks. model: what the run began from. adapter: write the adapters
    alone, in peft's format; else they are merged into the model. Raises ConfigError if there are none, CheckpointError,
    ModelError, TransportError if the directory cannot be written.
    """
    progress = read_progress(checkpoint)
    if adapter and progress.lora is None:
        raise ConfigError(f"{checkpoint} has no adapters: the run trained the whole model; export it without --adapter")
    device = torch.device("cpu")
    lease = ProcessGroupLease(device.type)
    try:
        loaded, adapters = load_model(model), None
        writer = ModelWriter(loaded)
        if (origin := progress.lora) is not None:  # adapters in the same places; their values are read afterwards
            config = LoRAConfig(rank=origin.rank, alpha=origin.alpha, target_modules=tuple(origin.target_modules))
            adapters = Adapters(writer, model, config, "float32", seed=0)
        policy = loaded.token_model()
        for name, parameter in policy.named_parameters():
            if name in progress.frozen:
                parameter.requires_grad_(False)
        load_weights(checkpoint, policy, adapters)
        taker = SnapshotTaker(writer, device, adapters)
        try:
            snapshot = taker.take_adapter(progress.version) if adapter else taker.take(progress.version)
            return snapshot.write(directory)
        finally:
            taker.close()
    finally:
        lease.release()

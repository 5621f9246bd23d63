"""Weights copied aside between two steps, and put together, written and sent beside the ones that follow.

snapshot(), on the training thread:  each rank copies its own shards to the CPU, in the dtype that servers hold
beside training, a thread per rank:  rank 0 puts whole tensors together, chunk by chunk
whoever publishes, on rank 0:        writes them, or sends each range of them as soon as its chunks are there
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist

from arl.api.engine import TensorSpec, WeightGroup
from arl.api.errors import ConfigError, TransportError
from arl.engine.fsdp.export import ModelWriter
from arl.engine.fsdp.lora import AdapterCopy, Adapters
from arl.engine.fsdp.shards import ShardGatherer
from arl.engine.weights.layout import byte_size, ranges, views
from arl.engine.weights.sender import WeightSender

_CHUNK_BYTES = 256 << 20
"""What is put together at a time: enough to be quick, and little enough that sending begins soon."""
_NO_ADAPTERS = "there are no adapters to publish: the engine trains the whole model; set train.lora"


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

    Rank 0's has the tensors; the others' are there to be let go of.

    With adapters, its tensors are the merged ones, and it is an AdapterSnapshot too.
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
        """All tensors, by the model's own names; waits until they are there."""
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
        """The bytes of a tensor that has to be made from those of the model, all at once when the first is wanted."""
        with self._converting:
            converted = self._converted  # which `release` may replace at any time
            if not converted:
                converted.update(self._writer.served(self._own_tensors()))
            return converted[name].contiguous().view(-1).view(torch.uint8)

    def _held_chunks(self) -> Sequence[Future[torch.Tensor]]:
        if self._rank or not (chunks := self._chunks):
            raise TransportError(f"the snapshot of version {self.version} was released, or is not rank 0's")
        return chunks


class SnapshotTaker:
    """Takes one rank's snapshots of a model; all ranks make and use theirs alike. Belongs to the train engine."""

    def __init__(self, writer: ModelWriter, device: torch.device, adapters: Adapters | None) -> None:
        self._writer = writer
        self._adapters = adapters
        self._sender = WeightSender(device)
        self._gatherer = ShardGatherer(writer.own_specs, _CHUNK_BYTES, device)

    def take(self, version: int) -> RankSnapshot:
        """Copy this rank's shards aside: a collective. The rest happens beside what comes next."""
        names = [spec.name for spec in self._writer.own_specs]
        if self._adapters is None:
            state = self._writer.model.state_dict()
            weights, adapter = [state[name].detach() for name in names], None
        else:
            weights, adapter = self._adapters.merged(names), self.take_adapter(version)
        return RankSnapshot(version, self._writer, self._sender, self._gatherer.begin(weights), adapter)

    def take_adapter(self, version: int) -> RankAdapter:
        """Copy the adapters aside, whole: a collective. Raises ConfigError where there are none."""
        if self._adapters is None:
            raise ConfigError(_NO_ADAPTERS)
        return RankAdapter(version, self._adapters.copy())

    def close(self) -> None:
        """Idempotent. Snapshots that are still being put together are finished first."""
        self._sender.close()
        self._gatherer.close()

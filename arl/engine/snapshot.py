"""Weights copied aside: taken between two steps, read beside the ones that follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from arl.api.engine import Snapshot, TensorSpec, WeightGroup
from arl.engine.export import ModelWriter


@runtime_checkable
class SendableSnapshot(Snapshot, Protocol):
    """A snapshot whose tensors can also be sent, through process groups that are shared with inference servers.

    With several ranks it is rank 0's: every rank takes a snapshot, and rank 0's alone is written and sent from. All
    arguments and results are plain values, and every call may come from any thread: several groups send at once, each
    of them one range at a time. Groups outlive the snapshot that opened them, and are known by name to later ones.
    """

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor, in the order in which it becomes ready."""
        ...

    @property
    def num_bytes(self) -> int:
        """Of all tensors, as servers hold them."""
        ...

    @property
    def backend(self) -> str:
        """The backend that suits where the trainer computes: nccl or gloo."""
        ...

    def open_group(self, server: str, num_ranks: int, backend: str, address: str | None = None) -> WeightGroup:
        """A group for the server of this base URL and so many ranks, listening at a free port.

        address: where the server reaches this process; None: the address from which this process reaches the server.
        Its name is in use nowhere else, not even by an earlier run. Raises TransportError.
        """
        ...

    def join(self, group: WeightGroup) -> None:
        """Wait until all of the server's ranks have joined. Raises TransportError if they do not in time."""
        ...

    def send(self, group: str, start: int, stop: int) -> None:
        """Broadcast specs[start:stop], as soon as they are there; returns when they were sent.

        Raises TransportError: the group cannot be used any more, and has to be left.
        """
        ...

    def leave(self, group: str) -> None:
        """Let go of a group, also while something is being sent or joined, which then fails. Idempotent."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class RankSnapshot:
    """One rank's part of a snapshot; see arl.api.engine.Snapshot. Rank 0 holds the tensors, whole."""

    version: int
    writer: ModelWriter
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def write(self, directory: Path) -> int:
        """Write a model directory; rank 0 alone does, the others return 0."""
        return self.writer.write(directory, self.tensors) if self.tensors else 0

    def release(self) -> None:
        self.tensors.clear()


def take_snapshot(model: PreTrainedModel, writer: ModelWriter, *, version: int) -> RankSnapshot:
    """Copy the weights of `model` aside; a collective when it is sharded over several ranks."""
    names = set(writer.names)
    whole = {name: _whole(value) for name, value in model.state_dict().items() if name in names}
    return RankSnapshot(version=version, writer=writer, tensors=whole if dist.get_rank() == 0 else {})


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of a sharded tensor, on the CPU; a collective when there are several ranks."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to("cpu", copy=True)

"""Weights copied aside: taken between two steps, read beside the ones that follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from arl.engine.export import ModelWriter


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

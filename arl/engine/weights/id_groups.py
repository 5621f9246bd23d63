"""NCCL groups whose ranks meet by an id instead of at a store, as vLLM's do (`/init_weight_transfer_engine`).

The trainer makes the id, and a server gets it over HTTP. Then all ranks enter ncclCommInitRank at the same time, and
sum one number before anything else: vLLM does so, and a rank that does not would leave the others waiting.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import torch
from torch.cuda import nccl

BACKEND = "nccl_by_id"
"""The backend of a WeightGroup of this kind."""


class IdGroup:
    """The trainer's end, rank 0. Nothing can end a call that waits for a rank which is gone: use a thread for each."""

    def __init__(self, device: torch.device, world_size: int) -> None:
        self._device = device
        self._world_size = world_size
        self._id: bytes = nccl.unique_id()
        self._communicator: Any = None

    @property
    def unique_id(self) -> str:
        """In base64."""
        return b64encode(self._id).decode()

    def meet(self) -> None:
        """Returns when all ranks have come."""
        with torch.cuda.device(self._device):
            self._communicator = nccl.init_rank(self._world_size, self._id, 0)
            number = torch.zeros(1, device=self._device)
            nccl.all_reduce([number], comms=[self._communicator])
            torch.cuda.synchronize(self._device)

    def broadcast(self, data: torch.Tensor) -> torch.Event:
        """Send `data` (uint8) on a stream of its own; returns an event that the GPU records once it is sent."""
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
            on_gpu = data.to(self._device, non_blocking=True)
            nccl.broadcast([on_gpu], 0, comms=[self._communicator])
            stream = torch.cuda.current_stream()
            on_gpu.record_stream(stream)
            return stream.record_event()

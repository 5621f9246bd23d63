"""The process group that FSDP2 needs, also when one process trains alone."""

from __future__ import annotations

from typing import ClassVar

import torch.distributed as dist


class ProcessGroupLease:
    """Holds torch's default process group for an engine: the one that exists, or one of this process alone.

    A group that was there is left as it was found. One made here is shared by the engines of the process, and
    destroyed with the last of them. It meets through memory: no port is opened, nothing can collide.
    """

    _holders: ClassVar[int] = 0

    def __init__(self, device_type: str) -> None:
        cls = type(self)
        self._owned = cls._holders > 0 or not dist.is_initialized()
        if self._owned and cls._holders == 0:
            backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] (documented, but not in __all__)
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        if self._owned:
            cls._holders += 1

    def release(self) -> None:
        """Let go; idempotent."""
        if not self._owned:
            return
        self._owned = False
        cls = type(self)
        cls._holders -= 1
        if cls._holders == 0:
            dist.destroy_process_group()

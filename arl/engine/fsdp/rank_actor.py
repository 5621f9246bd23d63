"""One rank of a RayTrainEngine: an FSDPTrainEngine in its own process, which a driver calls through Ray.

training    one thread, as collectives need it
beside      snapshots and savings
leaving     calls that end others
watching    where the training thread is
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] (documented, but not in __all__)

from arl.algorithm.flat_sequences import FlatSequences
from arl.api.events import PlacedPart
from arl.api.settings.engines import TrainConfig
from arl.api.train_engine import Head, ModelLimits, Output, TensorPrint, TokenLoss
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.runtime.processes.rpc import Kept, Messages, place_of, reported

THREADS = {"training": 1, "beside": 64, "leaving": 4, "watching": 1}
"""Ray's concurrency groups and their threads."""


class RankActor:
    """One rank: an FSDPTrainEngine in a process of its own. The driver names snapshots and savings by keys."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store: TCPStore | None = None
        self._kept = Kept()
        self.messages = Messages()

    @reported
    def open_store(self, address: str) -> int:
        """Open the store through which the ranks meet, listening at `address` alone; returns its port."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.create_server((address, 0), family=family)
        port = sock.getsockname()[1]
        # Handed over open, so that nobody else takes the port.
        self._store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach())
        return port

    @reported
    def build(self, store: tuple[str, int], model: str, config: TrainConfig, seed: int, head: Head) -> ModelLimits:
        """Join the process group and build the engine on the thread that will train; returns its limits."""
        self._training_thread = threading.get_ident()
        address, port = store
        meeting = self._store or TCPStore(address, port, is_master=False)
        with _gloo_at(address):
            cuda = torch.device(config.device).type == "cuda"
            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            dist.init_process_group(backend, store=meeting, rank=self._rank, world_size=self._world_size)
            self._engine = FSDPTrainEngine(model, config, seed, head)
        return self._engine.limits

    @reported
    def forward(self, share: FlatSequences, output: Output) -> np.ndarray:
        """The output for the share's sequences, end to end."""
        outputs = self._engine.forward(share, output)
        return torch.cat(outputs).numpy() if outputs else np.zeros(0, np.float32)

    @reported
    def update_reference(self, share: float) -> None:
        self._engine.update_reference(share)

    @reported
    def train_batch(
        self, shares: Sequence[FlatSequences], loss: TokenLoss
    ) -> tuple[dict[str, float], list[dict[str, np.ndarray]]]:
        """shares: this rank's part of each minibatch. Returns the metrics, and what the loss kept."""
        metrics = self._engine.train_batch(shares, loss)
        return metrics, [{name: column.numpy() for name, column in kept.items()} for kept in self._engine.kept]

    @reported
    def offload(self) -> None:
        self._engine.offload()

    @reported
    def onload(self) -> None:
        self._engine.onload()

    @reported
    def fingerprint(self) -> dict[str, TensorPrint]:
        return self._engine.fingerprint()

    @reported
    def load(self, directory: Path) -> int:
        """Returns the version."""
        self._engine.load(directory)
        return self._engine.version

    @reported
    def keep(self, key: str, name: str, *args: Any) -> None:
        """Call the engine's `name` (snapshot, snapshot_adapter or save) and keep what it returns."""
        self._kept.put(key, getattr(self._engine, name)(*args))

    @reported
    def ask(self, key: str, name: str, args: tuple[Any, ...]) -> Any:
        return self._kept.ask(key, name, args)

    @reported
    def forget(self, key: str) -> None:
        self._kept.forget(key)

    @reported
    def answer(self, token: Path, mark: Path) -> str:
        """Make the file `mark`, if this rank sees `token` and may write there; returns this node's address."""
        with contextlib.suppress(OSError):
            if token.exists():
                mark.touch()
        return ray.util.get_node_ip_address()

    @reported
    def place(self) -> tuple[PlacedPart, str]:
        """Where this rank runs, and the name of its GPU, the same for all processes; empty without one."""
        gpus = ", ".join(map(str, ray.get_gpu_ids()))
        device = f"GPU {gpus}" if gpus else "cpu"
        properties = torch.cuda.get_device_properties(torch.cuda.current_device()) if gpus else None
        address = ray.util.get_node_ip_address()
        part = PlacedPart(part="trainer", host=socket.gethostname(), address=address, pid=os.getpid(), device=device)
        return part, str(getattr(properties, "uuid", ""))

    @reported
    def whereabouts(self) -> tuple[int, str]:
        """The number of microbatches computed so far, and where the training thread is."""
        return self._engine.num_computed, place_of(self._training_thread)

    @reported
    def close(self) -> None:
        self._engine.close()
        dist.destroy_process_group()


@contextlib.contextmanager
def _gloo_at(address: str) -> Iterator[None]:
    """Gloo groups made in this block listen at loopback if ranks meet there; later groups may reach other machines."""
    is_local = address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in os.environ
    if is_local:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    try:
        yield
    finally:
        if is_local:
            del os.environ["GLOO_SOCKET_IFNAME"]

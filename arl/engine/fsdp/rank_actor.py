"""One rank of a RayTrainEngine: an FSDPTrainEngine in its own process, which a driver calls through Ray.

training    one thread, as collectives need it
beside      snapshots and savings
leaving     calls that end others
watching    where the training thread is
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] (documented, but not in __all__)

from arl.api.engine import Head, ModelLimits, Output, TokenLoss
from arl.api.engine_config import TrainConfig
from arl.engine.fsdp.lora import RankAdapter
from arl.engine.fsdp.minibatch import PackedSequences
from arl.engine.fsdp.saving import RankSaving
from arl.engine.fsdp.snapshot import RankSnapshot
from arl.engine.fsdp.train_engine import FSDPTrainEngine

THREADS = {"training": 1, "beside": 64, "leaving": 4, "watching": 1}
"""Ray's concurrency groups and their threads."""
_MAX_FRAMES = 6

P = ParamSpec("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    logger: str
    level: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """How a call on a rank ended: with a value or an error."""

    value: Any = None
    error: Exception | None = None
    traceback: str = ""
    messages: tuple[Message, ...] = ()
    """What the rank logged since its last call."""
    is_dead: bool = False


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: deque[Message] = deque(maxlen=100)

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(Message(logger=record.name, level=record.levelno, text=record.getMessage()))

    def take(self) -> tuple[Message, ...]:
        return tuple(self._messages.popleft() for _ in range(len(self._messages)))


def reported(method: Callable[Concatenate[RankActor, P], Any]) -> Callable[Concatenate[RankActor, P], CallOutcome]:
    """Make a method of the actor return a CallOutcome instead of raising."""

    @functools.wraps(method)
    def call(self: RankActor, *args: P.args, **kwargs: P.kwargs) -> CallOutcome:
        try:
            return CallOutcome(value=method(self, *args, **kwargs), messages=self.messages.take())
        except Exception as error:  # noqa: BLE001 (the driver raises it)
            text = "".join(traceback.format_exception(error))
            return CallOutcome(error=_portable(error), traceback=text, messages=self.messages.take())

    return call


class RankActor:
    """One rank: an FSDPTrainEngine in a process of its own. The driver names snapshots and savings by keys."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store: TCPStore | None = None
        self._kept: dict[str, RankSnapshot | RankAdapter | RankSaving] = {}
        self.messages = _Messages()
        logging.getLogger("arl").addHandler(self.messages)

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
    def forward(self, share: PackedSequences, output: Output) -> np.ndarray:
        """The output for the share's sequences, end to end."""
        outputs = self._engine.forward(share.unpack(), output)
        return torch.cat(outputs).numpy() if outputs else np.zeros(0, np.float32)

    @reported
    def update_reference(self, share: float) -> None:
        self._engine.update_reference(share)

    @reported
    def train_batch(self, shares: Sequence[PackedSequences], loss: TokenLoss) -> dict[str, float]:
        """shares: this rank's part of each minibatch."""
        return self._engine.train_batch([share.unpack() for share in shares], loss)

    @reported
    def load(self, directory: Path) -> int:
        """Returns the version."""
        self._engine.load(directory)
        return self._engine.version

    @reported
    def keep(self, key: str, name: str, *args: Any) -> None:
        """Call the engine's `name` (snapshot, snapshot_adapter or save) and keep what it returns."""
        self._kept[key] = getattr(self._engine, name)(*args)

    @reported
    def ask(self, key: str, name: str, args: tuple[Any, ...]) -> Any:
        """The attribute `name` of a kept snapshot or saving; a method is called with `args`."""
        answer = getattr(self._kept[key], name)
        return answer(*args) if callable(answer) else answer

    @reported
    def forget(self, key: str) -> None:
        """Release a snapshot, or forget a saving. Idempotent."""
        kept = self._kept.pop(key, None)
        if isinstance(kept, RankSnapshot | RankAdapter):
            kept.release()

    @reported
    def answer(self, token: Path, mark: Path) -> str:
        """Make the file `mark`, if this rank sees `token` and may write there; returns this node's address."""
        with contextlib.suppress(OSError):
            if token.exists():
                mark.touch()
        return ray.util.get_node_ip_address()

    @reported
    def whereabouts(self) -> tuple[int, str]:
        """The number of microbatches computed so far, and where the training thread is."""
        frame = sys._current_frames().get(self._training_thread)
        stack = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in traceback.extract_stack(frame)]
        ours = next((i for i, f in enumerate(stack[::-1]) if f.startswith("train_engine.py")), 0)
        return self._engine.num_computed, " < ".join(stack[::-1][: ours + 1][-_MAX_FRAMES:])

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


def _portable(error: Exception) -> Exception:
    """The error if it pickles, else a RuntimeError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 (an exception's own pickling may raise anything)
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error

"""One rank of a RayTrainEngine: an FSDPTrainEngine in a process of its own.

Calls for training come on one thread, one after another, as collectives need it; what concerns snapshots and
checkpoints that were copied aside comes on others, beside them.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] (documented, but not in __all__)

from arl.api.config import TrainConfig
from arl.api.engine import Head, ModelLimits, Output, TokenLoss
from arl.engine.fsdp.minibatch import PackedSequences
from arl.engine.fsdp.saving import RankSaving
from arl.engine.fsdp.snapshot import RankAdapter, RankSnapshot
from arl.engine.fsdp.train_engine import FSDPTrainEngine

THREADS = {"training": 1, "beside": 64, "leaving": 4}
"""Ray's concurrency groups, with their threads. leaving: calls that end others must not queue behind those."""

P = ParamSpec("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A warning or an error that a rank logged."""

    logger: str
    level: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a call on a rank ended: with a value, or an error and its traceback; and what was logged until then.

    is_dead: the error is not one that the rank raised, but that it is gone.
    """

    value: Any = None
    error: Exception | None = None
    traceback: str = ""
    messages: tuple[Message, ...] = ()
    is_dead: bool = False


class _Messages(logging.Handler):
    """Keeps what is logged until it is taken, the last hundred at most."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: deque[Message] = deque(maxlen=100)

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(Message(logger=record.name, level=record.levelno, text=record.getMessage()))

    def take(self) -> tuple[Message, ...]:
        return tuple(self._messages.popleft() for _ in range(len(self._messages)))


def reported(method: Callable[Concatenate[RankActor, P], Any]) -> Callable[Concatenate[RankActor, P], Outcome]:
    """A method of the actor that never raises: whatever happens comes back as its Outcome."""

    @functools.wraps(method)
    def call(self: RankActor, *args: P.args, **kwargs: P.kwargs) -> Outcome:
        try:
            return Outcome(value=method(self, *args, **kwargs), messages=self.messages.take())
        except Exception as error:  # noqa: BLE001 (the driver raises it)
            text = "".join(traceback.format_exception(error))
            return Outcome(error=_portable(error), traceback=text, messages=self.messages.take())

    return call


class RankActor:
    """The actor. Keys name snapshots and savings; the driver makes them up, the same for every rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store: TCPStore | None = None
        self._kept: dict[str, RankSnapshot | RankAdapter | RankSaving] = {}
        self.messages = _Messages()
        logging.getLogger("arl").addHandler(self.messages)

    @reported
    def open_store(self, address: str) -> int:
        """Open the store through which the ranks meet, on this rank's machine alone; returns its port."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        port = listener.getsockname()[1]
        # Handed over open: a free port that is only looked up may be taken by the time it is used.
        self._store = TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return port

    @reported
    def build(self, store: tuple[str, int], model: str, config: TrainConfig, seed: int, head: Head) -> ModelLimits:
        """Join the process group and build the engine, on the thread that will train; returns its limits."""
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
    def snapshot(self, key: str) -> None:
        self._kept[key] = self._engine.snapshot()

    @reported
    def snapshot_adapter(self, key: str) -> None:
        self._kept[key] = self._engine.snapshot_adapter()

    @reported
    def save(self, key: str, directory: Path) -> None:
        self._kept[key] = self._engine.save(directory)

    @reported
    def ask(self, key: str, name: str, args: tuple[Any, ...]) -> Any:
        """What a kept snapshot or saving answers: its attribute `name`, or what that returns for `args`."""
        answer = getattr(self._kept[key], name)
        return answer(*args) if callable(answer) else answer

    @reported
    def forget(self, key: str) -> None:
        """Release a snapshot, or let go of a saving. Idempotent."""
        kept = self._kept.pop(key, None)
        if isinstance(kept, RankSnapshot | RankAdapter):
            kept.release()

    @reported
    def close(self) -> None:
        self._engine.close()
        dist.destroy_process_group()


@contextmanager
def _gloo_at(address: str) -> Iterator[None]:
    """Let gloo's groups that are made meanwhile listen at loopback, where that is where the ranks meet.

    Those that are made later may be of servers on other machines.
    """
    is_local = address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in os.environ
    if is_local:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    try:
        yield
    finally:
        if is_local:
            del os.environ["GLOO_SOCKET_IFNAME"]


def _portable(error: Exception) -> Exception:
    """The error itself where it survives being sent to another process, else one that says as much."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 (an exception's own pickling may raise anything)
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error

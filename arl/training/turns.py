"""Turns: servers and trainer on the same GPUs, one after the other (engine.colocated).

    servers generate --batch taken--> release_memory --> onload --> train --> snapshot --> offload --> update_weights
           ^                          servers sleep      the trainer is on the device                  servers wake |
           +---------------------------------------------------------------------------------------------------------+

Each arrow waits for what stands before it, so the devices never hold both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from arl.api.engine import ColocatedServers, InferenceEngine
from arl.api.errors import ConfigError
from arl.api.events import Events, TrainerMoved
from arl.offload import TrainThread


class MovableLearner(Protocol):
    """The learner, as far as turns know it. Calls block."""

    def offload(self) -> None: ...

    def onload(self) -> None: ...


@dataclass(kw_only=True, eq=False)
class Turns:
    """Gives the devices to the trainer, and has it leave them. The next update of the servers' weights wakes these.

    Without is_colocated the trainer has devices of its own, and both calls do nothing.
    """

    is_colocated: bool
    servers: InferenceEngine
    learner: MovableLearner
    thread: TrainThread
    events: Events
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """What the last turn cost, as metrics."""
    is_trainers: bool = False
    """The devices are the trainer's, and the servers sleep."""

    def __post_init__(self) -> None:
        if self.is_colocated and not isinstance(self.servers, ColocatedServers):
            raise ConfigError("engine.colocated is set, but this inference engine cannot let go of its memory")

    async def to_trainer(self) -> None:
        """Let the servers sleep, and bring the trainer onto the devices. A cancelled call can be repeated."""
        if self.is_trainers or not isinstance(self.servers, ColocatedServers) or not self.is_colocated:
            return
        began = time.monotonic()
        await self.servers.release_memory()
        self.metrics["turns/release_s"] = time.monotonic() - began
        await self._move(self.learner.onload, is_on_device=True)

    async def leave(self) -> None:
        """Bring the trainer into the CPU's memory."""
        if self.is_colocated:
            await self._move(self.learner.offload, is_on_device=False)

    async def _move(self, move: Callable[[], None], *, is_on_device: bool) -> None:
        began = time.monotonic()
        await self.thread(move)
        self.is_trainers, seconds = is_on_device, time.monotonic() - began
        self.metrics["turns/onload_s" if is_on_device else "turns/offload_s"] = seconds
        self.events.emit(TrainerMoved(is_on_device=is_on_device, seconds=seconds))

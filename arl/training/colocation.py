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
from arl.runtime.threads import TrainThread


class MovableLearner(Protocol):
    """The learner, as far as turns know it. Calls block."""

    def offload(self) -> None: ...

    def onload(self) -> None: ...


@dataclass(kw_only=True, eq=False)
class DeviceTurns:
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
    _is_on_device: bool = False
    """The trainer has certainly arrived, and not begun to leave."""

    def __post_init__(self) -> None:
        if self.is_colocated and not isinstance(self.servers, ColocatedServers):
            raise ConfigError("engine.colocated is set, but this inference engine cannot let go of its memory")

    @property
    def are_servers_asleep(self) -> bool:
        """They wake with the next update alone."""
        return self.is_colocated and isinstance(self.servers, ColocatedServers) and self.servers.is_asleep

    @property
    def is_trainer_away(self) -> bool:
        return self.is_colocated and not self._is_on_device

    async def to_trainer(self) -> None:
        """Let the servers sleep, and bring the trainer onto the devices. A cancelled call can be repeated."""
        if not self.is_trainer_away or not isinstance(self.servers, ColocatedServers):
            return
        began = time.monotonic()
        await self.servers.release_memory()
        self.metrics["turns/release_s"] = time.monotonic() - began
        self.metrics["turns/onload_s"] = await self._move(self.learner.onload, is_on_device=True)
        self._is_on_device = True

    async def leave(self) -> None:
        """Bring the trainer into the CPU's memory."""
        if self.is_colocated:
            self._is_on_device = False
            self.metrics["turns/offload_s"] = await self._move(self.learner.offload, is_on_device=False)

    async def _move(self, move: Callable[[], None], *, is_on_device: bool) -> float:
        """Returns how long it took."""
        began = time.monotonic()
        await self.thread(move)
        seconds = time.monotonic() - began
        self.events.emit(TrainerMoved(is_on_device=is_on_device, seconds=seconds))
        return seconds

"""The weights that an evaluation runs on: training's, as they move or held still, or those of servers of its own.

| evaluations run on | at the step                          | beside training                   | at the end       |
|--------------------|--------------------------------------|-----------------------------------|------------------|
| moving weights     |                                      | wait for the newest delivery      |                  |
| held weights       | wait for the delivery; hold the next |                                   | release the next |
| their own servers  | snapshot the weights                 | deliver them to these servers     |                  |
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from arl.api.engine import InferenceEngine, Snapshot, WeightProbe, WeightTransport, WeightUpdate
from arl.api.errors import ProcessLostError, TransportError
from arl.api.evaluation_config import EvaluationConfig
from arl.offload import TrainThread
from arl.training.delivery import Delivery
from arl.training.recovery import RecoveringLearner
from arl.training.weight_probe import CheckedEngine, probe_due

log = logging.getLogger(__name__)


@runtime_checkable
class WrittenUpdate(Protocol):
    """A WeightUpdate whose files any reader may copy once servers hold it."""

    @property
    def directory(self) -> Path:
        """A Hugging Face model directory."""
        ...


class Pin(Protocol):
    """One version's weights, for one evaluation."""

    async def ready(self) -> None:
        """Return when servers hold them. Raises ProcessLostError, TransportError, ServerError."""
        ...

    def write_model(self, directory: Path) -> None:
        """Write the model into a new directory. Blocks. Raises ProcessLostError, TransportError, OSError."""
        ...

    def release(self) -> None:
        """The evaluation has ended. Idempotent."""
        ...


class Pins(Protocol):
    async def pin(self) -> Pin:
        """Of the trainer's newest version. The caller sees to it that nothing is trained meanwhile."""
        ...


@dataclass(frozen=True, kw_only=True)
class AwakePins:
    """Pins on servers that take turns with the trainer (engine.colocated): a cancelled step may leave them asleep."""

    pins: Pins
    wake: Callable[[], Awaitable[None]]

    async def pin(self) -> Pin:
        await self.wake()
        return await self.pins.pin()


@dataclass(frozen=True, kw_only=True)
class MovingWeights:
    """Training's servers, whatever they hold while an evaluation runs."""

    delivery: Delivery

    async def pin(self) -> Pin:
        return self

    async def ready(self) -> None:
        await self.delivery.reached(self.delivery.newest)  # a cancelled step may have no snapshot

    def write_model(self, directory: Path) -> None:
        raise TransportError(f"{directory}: weights that move are no single model")

    def release(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class StillWeights:
    """Training's servers, which get no newer weights while an evaluation runs."""

    delivery: Delivery
    learner: RecoveringLearner
    thread: TrainThread
    keeps_models: bool
    """Whether models will be written."""

    async def pin(self) -> Pin:
        await self.delivery.reached(self.delivery.newest)
        await self.delivery.finished()
        self.delivery.hold()
        try:
            return _Held(self.delivery, await self._snapshot() if self.keeps_models else None)
        except BaseException:
            self.delivery.release()
            raise

    async def _snapshot(self) -> Snapshot:
        while True:
            with suppress(ProcessLostError):
                return await self.thread(self.learner.engine.snapshot)


@dataclass(eq=False)
class _Held:
    delivery: Delivery
    snapshot: Snapshot | None

    async def ready(self) -> None:
        pass

    def write_model(self, directory: Path) -> None:
        if self.snapshot is None:
            raise TransportError(f"{directory}: no snapshot was taken for it")
        self.snapshot.write(directory)

    def release(self) -> None:
        self.delivery.release()
        if self.snapshot is not None:
            self.snapshot.release()


@dataclass(frozen=True, kw_only=True)
class EvaluationServers:
    """Servers for evaluations alone, and how weights reach them."""

    engine: InferenceEngine
    transport: WeightTransport


@dataclass(frozen=True, kw_only=True)
class OwnServers:
    """Servers that hold the version of one evaluation after another."""

    servers: EvaluationServers
    learner: RecoveringLearner
    thread: TrainThread

    async def pin(self) -> Pin:
        return _OnOwnServers(self.servers, *await self.thread(self._snapshot))

    def _snapshot(self) -> tuple[WeightUpdate, WeightProbe | None]:
        source = self.learner.engine
        while True:
            with suppress(ProcessLostError):
                return self.servers.transport.snapshot(source), probe_due(source, self.servers.engine)


@dataclass(eq=False)
class _OnOwnServers:
    servers: EvaluationServers
    update: WeightUpdate
    probe: WeightProbe | None

    async def ready(self) -> None:
        await self.servers.transport.deliver(self.update, self.servers.engine)
        if self.probe and isinstance(self.servers.engine, CheckedEngine):
            await self.servers.engine.check_weights(self.probe)

    def write_model(self, directory: Path) -> None:
        if not isinstance(self.update, WrittenUpdate):
            raise TransportError(f"{directory}: {type(self.update).__name__} has no files to copy")
        shutil.copytree(self.update.directory, directory)

    def release(self) -> None:
        """Its files stay for servers that come back, until the next version is delivered."""


def pins_of(
    config: EvaluationConfig,
    delivery: Delivery,
    servers: EvaluationServers | None,
    learner: RecoveringLearner,
    thread: TrainThread,
) -> Pins:
    """How evaluations get their weights. servers: those of their own, if they have any."""
    if servers is not None:
        return OwnServers(servers=servers, learner=learner, thread=thread)
    if config.hold_weights:
        keeps_models = config.keep_best is not None
        return StillWeights(delivery=delivery, learner=learner, thread=thread, keeps_models=keeps_models)
    return MovingWeights(delivery=delivery)

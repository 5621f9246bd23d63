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
from arl.api.errors import ProcessLostError, ServerError, TransportError
from arl.api.evaluation_config import EvaluationConfig
from arl.offload import TrainThread
from arl.training.delivery import Delivery
from arl.training.run_learner import RunLearner
from arl.training.weight_probe import CheckedEngine, probe_due

log = logging.getLogger(__name__)


@runtime_checkable
class WrittenUpdate(Protocol):
    """A WeightUpdate whose files any reader may copy once servers hold it."""

    @property
    def directory(self) -> Path:
        """A Hugging Face model directory."""
        ...


class UndeliveredError(TransportError):
    """Servers for evaluations did not get the weights. Training can go on."""


class Pin(Protocol):
    """One version's weights, for one evaluation."""

    async def ready(self) -> None:
        """Return when servers hold them. Raises ProcessLostError, and UndeliveredError if servers do not get them."""
        ...

    def let_go(self) -> None:
        """The episodes have ended: servers may get other weights. Idempotent."""
        ...

    def write_model(self, directory: Path) -> None:
        """Write the model into a new directory. Blocks. Raises ProcessLostError, TransportError, OSError."""
        ...

    def release(self) -> None:
        """Let go, and free the memory. Idempotent."""
        ...


class Pins(Protocol):
    async def pin(self) -> Pin:
        """Of the trainer's newest version. The caller sees to it that nothing is trained meanwhile."""
        ...


@dataclass(frozen=True, kw_only=True)
class CaughtUpPins:
    """Pins on training's servers that first get what a cancelled step had trained, or wake from its turn."""

    pins: Pins
    catch_up: Callable[[], Awaitable[None]]

    async def pin(self) -> Pin:
        await self.catch_up()
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

    def let_go(self) -> None:
        pass

    def release(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class StillWeights:
    """Training's servers, which get no newer weights while an evaluation runs."""

    delivery: Delivery
    learner: RunLearner
    thread: TrainThread
    keeps_models: bool
    """Whether models will be written."""

    async def pin(self) -> Pin:
        await self.delivery.reached(self.delivery.newest)
        await self.delivery.finished()
        self.delivery.hold()
        try:
            model = await self.thread(_snapshot, self.learner) if self.keeps_models else None
            if model is not None and model.version != self.delivery.newest:
                raise RuntimeError(f"servers hold version {self.delivery.newest}, and the trainer {model.version}")
        except BaseException:
            self.delivery.release()
            raise
        return _Held(self.delivery, model)


def _snapshot(learner: RunLearner) -> Snapshot:
    while True:
        with suppress(ProcessLostError):
            return learner.engine.snapshot()


@dataclass(eq=False)
class _Held:
    delivery: Delivery
    model: Snapshot | None

    async def ready(self) -> None:
        pass

    def let_go(self) -> None:
        self.delivery.release()

    def write_model(self, directory: Path) -> None:
        if self.model is None:
            raise TransportError(f"{directory}: no snapshot was taken for it")
        self.model.write(directory)

    def release(self) -> None:
        self.let_go()
        if self.model is not None:
            self.model.release()


@dataclass(frozen=True, kw_only=True)
class EvaluationServers:
    """Servers for evaluations alone, and how weights reach them."""

    engine: InferenceEngine
    transport: WeightTransport
    gets_adapters: bool = False
    """Its updates are adapters, so a model is written from a snapshot of its own."""


@dataclass(frozen=True, kw_only=True)
class OwnServers:
    """Servers that hold the version of one evaluation after another."""

    servers: EvaluationServers
    learner: RunLearner
    thread: TrainThread
    keeps_models: bool

    async def pin(self) -> Pin:
        return _OnOwnServers(self.servers, *await self.thread(self._take))

    def _take(self) -> tuple[WeightUpdate, WeightProbe | None, Snapshot | None]:
        source = self.learner.engine
        while True:
            with suppress(ProcessLostError):
                update, probe = self.servers.transport.snapshot(source), probe_due(source, self.servers.engine)
                break
        return update, probe, _snapshot(self.learner) if self.keeps_models and self.servers.gets_adapters else None


@dataclass(eq=False)
class _OnOwnServers:
    servers: EvaluationServers
    update: WeightUpdate
    probe: WeightProbe | None
    model: Snapshot | None

    async def ready(self) -> None:
        try:
            await self.servers.transport.deliver(self.update, self.servers.engine)
        except ProcessLostError:
            raise
        except (ServerError, TransportError) as error:
            if isinstance(error, TransportError):  # else its files stay for servers that come back
                self.servers.transport.discard(self.update)
            raise UndeliveredError(
                f"servers for evaluations did not get version {self.update.version}: {error}"
            ) from error
        if self.probe and isinstance(self.servers.engine, CheckedEngine):
            await self.servers.engine.check_weights(self.probe)

    def let_go(self) -> None:
        """Its files stay for servers that come back, until the next version is delivered."""

    def write_model(self, directory: Path) -> None:
        if self.model is not None:
            self.model.write(directory)
        elif isinstance(self.update, WrittenUpdate):
            shutil.copytree(self.update.directory, directory)
        else:
            raise TransportError(f"{directory}: {type(self.update).__name__} has no files to copy")

    def release(self) -> None:
        if self.model is not None:
            self.model.release()


def pins_of(
    config: EvaluationConfig,
    delivery: Delivery,
    servers: EvaluationServers | None,
    learner: RunLearner,
    thread: TrainThread,
) -> Pins:
    """How evaluations get their weights. servers: those of their own, if they have any."""
    keeps_models = config.keep_best is not None
    if servers is not None:
        return OwnServers(servers=servers, learner=learner, thread=thread, keeps_models=keeps_models)
    if config.hold_weights:
        return StillWeights(delivery=delivery, learner=learner, thread=thread, keeps_models=keeps_models)
    return MovingWeights(delivery=delivery)

"""Delivery brings each snapshot of the weights to the servers, beside training; DeviceTurns shares devices with them.

With engine.colocated, servers and trainer use the same GPUs, one after the other:

    servers generate --batch taken--> release_memory --> onload --> train --> snapshot --> offload --> update_weights
           ^                          servers sleep      the trainer is on the device                  servers wake |
           +---------------------------------------------------------------------------------------------------------+

Each arrow waits for what stands before it, so the devices never hold both.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Protocol, runtime_checkable

from arl.api.engine import ColocatedServers, InferenceEngine, PublishStats, WeightProbe, WeightTransport, WeightUpdate
from arl.api.errors import ConfigError, ProcessLostError, TransportError
from arl.api.events import NOWHERE, Events, Published, SnapshotTaken, TrainerMoved
from arl.api.train_engine import WeightSource
from arl.rollout.buffer import ReplayBuffer
from arl.runtime.threads import TrainThread
from arl.training.learner_process import RunLearner


@dataclass(kw_only=True, eq=False)
class DeviceTurns:
    """Gives the devices to the trainer, and has it leave them. The next update of the servers' weights wakes these.

    Without is_colocated the trainer has devices of its own, and both calls do nothing.
    """

    is_colocated: bool
    servers: InferenceEngine
    learner: RunLearner
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


@runtime_checkable
class ProbedWeights(Protocol):
    """A WeightSource that gives probes."""

    def probe(self) -> WeightProbe | None:
        """Of the current weights; None if they cannot be probed. Blocks."""
        ...


@runtime_checkable
class CheckedEngine(Protocol):
    """An inference engine that compares its servers with probes."""

    def wants_probe(self, version: int) -> bool:
        """Whether a server is to be compared once it holds this version."""
        ...

    async def check_weights(self, probe: WeightProbe) -> None:
        """Raises ServerError for a server that computes with other weights than the probe's."""
        ...


_PAUSES_S = (1.0, 10.0)
"""How long to wait after each failed delivery in a row before trying another. One more failure ends the run."""

logger = logging.getLogger(__name__)


@runtime_checkable
class RenewableWeights(Protocol):
    """A WeightUpdate that the trainer's process holds for servers that come back later."""

    lost: asyncio.Event
    """Set when a server could not get it, because that process is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    update: WeightUpdate
    probe: WeightProbe | None
    """What the servers that take it are compared with, if any is due."""
    taken: float
    """When the snapshot was complete."""
    snapshot_s: float
    """How long training waited for it."""


@dataclass(kw_only=True, eq=False)
class Delivery:
    """One delivery is under way at a time. Of the snapshots that come meanwhile, only the newest is delivered.

    If a snapshot cannot be gathered or written, no server is touched: servers keep their weights, and another snapshot
    follows. If it is lost with the trainer's process, the process that recovers gives another.
    """

    transport: WeightTransport
    inference_engine: InferenceEngine
    buffer: ReplayBuffer
    thread: TrainThread
    tasks: asyncio.TaskGroup
    """Where deliveries run; what they raise ends the run."""
    turns: DeviceTurns | None = None
    """Who has the devices: the trainer leaves them after a snapshot, before servers get it."""
    events: Events = NOWHERE
    published: PublishStats | None = None
    """The newest weights that every serving server holds, and what it cost to bring them there."""

    newest: int = -1
    """The version of the newest snapshot."""

    def __post_init__(self) -> None:
        self._waiting: _Snapshot | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._under_way: asyncio.Task[None] | None = None
        self._publication = asyncio.Condition()
        self._may_deliver = asyncio.Event()
        self._may_deliver.set()

    async def begin(self, engine: WeightSource) -> None:
        """Snapshot the weights, and deliver them in the background."""
        await self._take(engine)
        if self._under_way is None or self._under_way.done():
            self._under_way = self.tasks.create_task(self._deliver(engine))

    async def _take(self, engine: WeightSource) -> None:
        began = time.monotonic()
        update, probe = await self.thread(self._snapshot, engine)
        if self._waiting:
            self.transport.discard(self._waiting.update)
        now = time.monotonic()
        self._waiting = _Snapshot(update=update, probe=probe, taken=now, snapshot_s=now - began)
        self.newest = update.version
        self.events.emit(SnapshotTaken(version=update.version, seconds=now - began))
        if self.turns is not None:
            await self.turns.leave()

    def _snapshot(self, engine: WeightSource) -> tuple[WeightUpdate, WeightProbe | None]:
        """Raises TrainingError, which ends this, once the engine has been lost too often."""
        while True:
            with suppress(ProcessLostError):  # between the snapshot and what the transport asks of it
                return self.transport.snapshot(engine), self._probe(engine)

    def _probe(self, engine: WeightSource) -> WeightProbe | None:
        """A probe of the current weights, if servers are to be compared with it once they hold them."""
        servers = self.inference_engine
        if self.turns is not None and self.turns.is_trainer_away:  # a snapshot that follows a failed one
            return None
        if not (isinstance(servers, CheckedEngine) and isinstance(engine, ProbedWeights)):
            return None
        return engine.probe() if servers.wants_probe(engine.version) else None

    async def reached(self, version: int) -> None:
        """Wait until the servers hold `version` or a newer one. A delivery's end wakes this wait."""
        async with self._publication:
            await self._publication.wait_for(lambda: self.published is not None and self.published.version >= version)

    async def finished(self) -> None:
        """Wait until no snapshot is left to deliver."""
        if self._under_way:
            await asyncio.shield(self._under_way)  # a cancelled waiter must not cancel the delivery

    def hold(self) -> None:
        """Servers keep what they have, and the newest snapshot waits, until `release`. Not while one is delivered."""
        self._may_deliver.clear()

    def release(self) -> None:
        self._may_deliver.set()

    async def unheld(self) -> None:
        """Wait while servers are to keep what they have. `release` wakes this wait."""
        await self._may_deliver.wait()

    def end(self) -> None:
        """No snapshot follows any more."""
        if self._renewing:
            self._renewing.cancel()

    async def _renew(self, held: RenewableWeights, engine: WeightSource) -> None:
        """Deliver once more what servers hold, or one that comes back would wait for the next step, or for ever."""
        await held.lost.wait()
        await self.begin(engine)

    async def _deliver(self, engine: WeightSource) -> None:
        num_failures = 0
        while self._waiting:
            await self._may_deliver.wait()
            self.end()
            snapshot, self._waiting = self._waiting, None
            try:
                cost = await self.transport.deliver(snapshot.update, self.inference_engine)
                if snapshot.probe and isinstance(self.inference_engine, CheckedEngine):
                    await self.inference_engine.check_weights(snapshot.probe)
            except ProcessLostError:
                self.transport.discard(snapshot.update)
                version = snapshot.update.version
                logger.warning("version %d was lost with the trainer's process before it was published", version)
                if not self._waiting:
                    await self._take(engine)
                continue
            except TransportError as error:
                self.transport.discard(snapshot.update)
                num_failures += 1
                await self._follow(engine, snapshot.update.version, num_failures, error)
                continue
            num_failures = 0
            await self.buffer.published(snapshot.update.version)
            self.published = PublishStats(
                version=snapshot.update.version,
                snapshot_s=snapshot.snapshot_s,
                transfer_s=time.monotonic() - snapshot.taken,
                pause_s=cost.pause_s,
                num_bytes=snapshot.update.num_bytes,
                resume_s=cost.resume_s,
            )
            self.events.emit(Published(**asdict(self.published)))
            async with self._publication:
                self._publication.notify_all()
            if isinstance(snapshot.update, RenewableWeights):
                self._renewing = self.tasks.create_task(self._renew(snapshot.update, engine))

    async def _follow(self, engine: WeightSource, version: int, num_failures: int, error: TransportError) -> None:
        """Have a newer snapshot follow the failed one: the next step's, or one taken now. Or raise the error."""
        if num_failures > len(_PAUSES_S):
            raise TransportError(
                f"the weights could not be published {num_failures} times in a row: {error}"
            ) from error
        logger.error("version %d was not published; servers keep the weights that they have: %s", version, error)
        await asyncio.sleep(_PAUSES_S[num_failures - 1])
        if not self._waiting:  # perhaps no step can follow before a newer version is published
            await self._take(engine)

"""The weights that an evaluation runs on: as they change, or held.

| evaluations run on | at the step                          | during training              | at the end       |
|--------------------|--------------------------------------|------------------------------|------------------|
| moving weights     |                                      | wait for the newest delivery |                  |
| held weights       | wait for the delivery; hold the next |                              | release the next |
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from arl.api.errors import ProcessLostError, TransportError
from arl.api.train_engine import Snapshot
from arl.runtime.threads import TrainThread
from arl.training.learner_process import RunLearner
from arl.training.weight_sync import Delivery


class Pin(Protocol):
    """One version's weights, for one evaluation."""

    async def ready(self) -> None:
        """Return when servers hold them."""
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


@dataclass(frozen=True)
class MovingWeights:
    """Whatever the servers hold while an evaluation runs."""

    delivery: Delivery

    async def ready(self) -> None:
        await self.delivery.reached(self.delivery.newest)  # a cancelled step may have no snapshot

    def write_model(self, directory: Path) -> None:
        raise TransportError(f"{directory}: weights that move are no single model")

    def let_go(self) -> None:
        pass

    def release(self) -> None:
        pass


@dataclass(eq=False)
class _HeldWeights:
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


async def hold_weights(delivery: Delivery, learner: RunLearner, thread: TrainThread, *, keeps_model: bool) -> Pin:
    """Have servers keep the newest version until the pin is released. The caller sees to it that nothing is trained
    meanwhile. keeps_model: whether the pin can write the model.
    """

    def snapshot() -> Snapshot:
        while True:
            with suppress(ProcessLostError):
                return learner.engine.snapshot()

    await delivery.reached(delivery.newest)
    await delivery.finished()
    delivery.hold()
    try:
        model = await thread(snapshot) if keeps_model else None
        if model is not None and model.version != delivery.newest:
            raise RuntimeError(f"servers hold version {delivery.newest}, and the trainer {model.version}")
    except BaseException:
        delivery.release()
        raise
    return _HeldWeights(delivery, model)

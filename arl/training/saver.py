"""Saver: writes checkpoints beside training, one at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from arl.api.config import CheckpointConfig
from arl.api.errors import CheckpointError, ProcessLostError
from arl.api.events import NOWHERE, CheckpointWritten, Events
from arl.offload import TrainThread, offload
from arl.training.checkpoint import Checkpoints, RunState
from arl.training.run_learner import RunLearner

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Saver:
    """Saves the trainer's versions. Which ones: see CheckpointConfig."""

    config: CheckpointConfig
    checkpoints: Checkpoints
    learner: RunLearner
    thread: TrainThread
    events: Events = NOWHERE

    def __post_init__(self) -> None:
        self._writing: asyncio.Future[None] | None = None
        self._begun_at = time.monotonic()
        self._was_lost = False

    def is_due(self, version: int) -> bool:
        """Whether the version that was just trained is to be saved."""
        if self.config.every and version % self.config.every == 0:
            return True
        if self._writing is not None and not self._writing.done():
            return False
        every_s = self.config.every_s
        is_late = every_s is not None and time.monotonic() - self._begun_at >= every_s
        return is_late or self._was_lost or self.learner.is_full

    async def finished(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._writing:
            await asyncio.wait([self._writing])
            # It was raised where it was awaited, unless the run was ending.
            if (error := self._writing.exception()) and not is_lost(self._writing):
                log.error("the previous checkpoint failed: %s", error)

    async def begin(self, version: int, state: Callable[[], RunState]) -> asyncio.Future[None] | None:
        """Begin to write a checkpoint, once none is being written; None if there is nothing to write.

        When this returns, the state has been copied. The caller awaits `written` on the result.
        """
        if version in (0, self.checkpoints.newest_version()):
            return None
        began = self._begun_at = time.monotonic()
        self._was_lost = False
        begun = self.thread.submit(self.checkpoints.begin, version, self.learner.save, state())
        try:
            saving = await self.thread.finish(begun)
        except asyncio.CancelledError:
            if begun.exception() is None:  # finish writing it, or the next one would collide with it
                self._writing = offload(begun.result().wait)
            raise
        self._writing = offload(saving.wait)
        self._writing.add_done_callback(partial(self._report, version, began))
        return self._writing

    def _report(self, version: int, began: float, saving: asyncio.Future[None]) -> None:
        self._was_lost = is_lost(saving)
        if self._was_lost:
            log.warning("the checkpoint of version %d was lost with the trainer's process; another follows", version)
        error = None if saving.cancelled() else saving.exception()
        seconds, why = time.monotonic() - began, "" if error is None else f"{type(error).__name__}: {error}"
        self.events.emit(CheckpointWritten(version=version, seconds=seconds, error=why))


async def written(saving: asyncio.Future[None]) -> bool:
    """Wait until the saving is on the disk. A cancelled wait goes on until then, so that no error is lost.

    Returns False if it was lost with the trainer's process.
    """
    try:
        await asyncio.wait([saving])
    except asyncio.CancelledError:
        await asyncio.wait([saving])
        if not is_lost(saving):
            saving.result()
        raise
    if is_lost(saving):
        return False
    saving.result()
    return True


def is_lost(saving: asyncio.Future[None]) -> bool:
    """Whether it failed because the trainer's process or a rank was lost; another one can save the same."""
    error = None if saving.cancelled() else saving.exception()
    return isinstance(error, CheckpointError) and isinstance(error.__cause__, ProcessLostError)

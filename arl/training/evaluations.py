"""Evaluations beside training: which is due, on which weights it runs, and whether its model is the best so far."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from arl.api.errors import ArlError
from arl.api.evaluation_config import EvaluationConfig
from arl.api.types import Evaluation
from arl.offload import TrainThread, finished, offload
from arl.training.best_model import BestModel
from arl.training.evaluator import Evaluator
from arl.training.pinned_weights import Pin
from arl.training.run_files import RunLog

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Evaluations:
    """One runs at a time. Those that come due during a long one become one, of the version that is newest then, with
    the suites of all of them."""

    config: EvaluationConfig
    evaluator: Evaluator
    pin: Callable[[], Awaitable[Pin]]
    """Pins the trainer's newest version. Called while nothing is trained."""
    best: BestModel | None
    """None keeps none."""
    log: RunLog
    thread: TrainThread
    tasks: asyncio.TaskGroup
    """Where those run that come due; what they raise ends the run."""
    training: asyncio.Lock
    """Held while a batch is trained: weights are pinned between two of them."""

    def __post_init__(self) -> None:
        self.done = self.log.evaluations()
        """All evaluations in this run directory, by version."""
        self._one = asyncio.Lock()
        """Held from an evaluation's pin to its release."""
        self._num_waiting = 0
        """How many evaluations wait for that."""
        self._under_way: asyncio.Task[None] | None = None
        self._due: list[int] = []
        """The versions for which one has yet to begin. A step that is cancelled as it pins leaves them to the next."""

    async def begin(self, version: int) -> None:
        """Evaluate `version`, which was just trained, if it is due. The caller holds `training`."""
        if self.config.every and version % self.config.every == 0:
            self._due.append(version)
        if not self._due:
            return
        if self._one.locked() or self._num_waiting:  # they may need `training`, so this must not wait for them
            self._begin_beside()
            return
        await self._one.acquire()
        try:
            pin = await self.pin()
        except BaseException:
            self._one.release()
            raise
        self._under_way = self.tasks.create_task(self._evaluate_while_due(pin))

    def _begin_beside(self) -> None:
        if self._under_way is None or self._under_way.done():
            self._under_way = self.tasks.create_task(self._evaluate_while_due())

    async def finished(self) -> None:
        """Wait until none that came due is left. Its error ends the run."""
        if self._due:
            self._begin_beside()
        if self._under_way:
            await asyncio.wait([self._under_way])  # a cancelled waiter must not cancel it

    async def evaluate(self, *, is_first: bool) -> Evaluation:
        """Play all held-out examples on the newest weights.

        is_first: nothing was trained yet. Raises FailureBudgetError then if all episodes fail.
        """
        await self._turn()  # before `training`, which must not wait for an evaluation
        return await self._evaluate(await self._pinned(), None, is_first=is_first)

    async def _evaluate_while_due(self, pin: Pin | None = None) -> None:
        """pin: taken already, with `_one`."""
        while self._due:
            if pin is None:
                await self._turn()
                pin = await self._pinned()
            due, self._due = self._due, []
            await self._evaluate(pin, due, is_first=False)
            pin = None

    async def _turn(self) -> None:
        """Acquire `_one`."""
        self._num_waiting += 1
        try:
            await self._one.acquire()
        finally:
            self._num_waiting -= 1

    async def _pinned(self) -> Pin:
        """Pin the newest version. The caller has acquired `_one`, which this releases if it fails."""
        try:
            async with self.training:
                return await self.pin()
        except BaseException:
            self._one.release()
            raise

    async def _evaluate(self, pin: Pin, due: Sequence[int] | None, *, is_first: bool) -> Evaluation:
        """Releases the pin, and `_one`. due: the versions whose suites are played. None: all."""
        try:
            await pin.ready()
            with self.log.display.work(
                "evaluating", self.evaluator.num_episodes(due), "episodes", leave=False
            ) as advance:
                evaluation, episodes = await self.evaluator.evaluate(advance, is_first=is_first, due=due)
            pin.let_go()
            await self.thread(self.log.evaluation, evaluation, episodes)
            self.done[evaluation.version] = evaluation
            if self.best is not None:
                await self._keep_if_best(self.best, evaluation, pin, due)
        finally:
            pin.release()
            self._one.release()
        return evaluation

    async def _keep_if_best(self, best: BestModel, evaluation: Evaluation, pin: Pin, due: Sequence[int] | None) -> None:
        """Raises ConfigError if the metric is unknown. What cannot be written is logged: the best one before stays."""
        unplayed = [suite.name for suite in self.evaluator.suites if not suite.is_due(due)]
        value = best.value_of(evaluation, unplayed)
        if value is None or not best.is_better(value):
            return
        try:
            await finished(offload(best.keep, evaluation.version, value, pin.write_model))
        except (OSError, ArlError) as error:
            log.error("version %d is the best so far and could not be kept (%s); %s", evaluation.version, error, best)
        else:
            self.log.display.say(str(best))

"""Evaluations beside training: which is due, on which weights it runs, and whether its model is the best so far."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from arl.api.errors import ArlError, ConfigError, ProcessLostError, TransportError
from arl.api.settings.run import EvaluationConfig
from arl.api.train_engine import Snapshot
from arl.api.types import Evaluation
from arl.runtime.threads import TrainThread, finished, offload
from arl.training.evaluator import Evaluator
from arl.training.learner_process import RunLearner
from arl.training.metrics_log import RunLog
from arl.training.run_dir import BEST
from arl.training.weight_sync import Delivery


@dataclass(eq=False)
class Pin:
    """The weights of one evaluation: as they change, or held.

    | evaluations run on | at the step                          | during training              | at the end       |
    |--------------------|--------------------------------------|------------------------------|------------------|
    | moving weights     |                                      | wait for the newest delivery |                  |
    | held weights       | wait for the delivery; hold the next |                              | release the next |
    """

    delivery: Delivery
    is_held: bool = False
    model: Snapshot | None = None
    """Of held weights that may be kept as the best model."""

    async def ready(self) -> None:
        """Return when servers hold them."""
        if not self.is_held:
            await self.delivery.reached(self.delivery.newest)  # a cancelled step may have no snapshot

    def let_go(self) -> None:
        """The episodes have ended: servers may get other weights. Idempotent."""
        if self.is_held:
            self.delivery.release()

    def write_model(self, directory: Path) -> None:
        """Write the model into a new directory. Blocks. Raises ProcessLostError, TransportError, OSError."""
        if self.model is None:
            raise TransportError(f"{directory}: no snapshot was taken for it")
        self.model.write(directory)

    def release(self) -> None:
        """Let go, and free the memory. Idempotent."""
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
    return Pin(delivery, is_held=True, model=model)


_NOTE = "best.json"
_OF_WORKFLOWS = ("episode/", "reward/")
_DIRECTORIES, _ASIDE = "best-version-", ".writing"


class BestModel:
    """Calls block; one thread at a time."""

    def __init__(self, run_dir: Path, metric: str) -> None:
        """Raises ConfigError if something else lies at run_dir/best."""
        self._link = run_dir / BEST
        self._metric = metric
        if self._link.exists() and not self._link.is_symlink():
            raise ConfigError(
                f"evaluation.keep_best would keep a model at {self._link}, but something else lies there; move it away"
            )
        self._kept = self._read()
        """Its version, and the value of its metric."""

    def value_of(self, evaluation: Evaluation, unplayed: Sequence[str] = ()) -> float | None:
        """The metric in an evaluation; None if it is of a suite that was not played.

        Also None, with a warning, if it is one that the workflow reports, which it need not do each time. Raises
        ConfigError for any other that the evaluation does not have.
        """
        found = dict(_values(evaluation))
        if self._metric in found or any(self._metric.startswith(f"{name}/") for name in unplayed):
            return found.get(self._metric)
        lacks = (
            f"evaluation.keep_best is {self._metric!r}, which the evaluation of version {evaluation.version} does not "
            f"have; it has: {', '.join(sorted(found))}"
        )
        of = next((name for name in evaluation.by_name or {} if self._metric.startswith(f"{name}/")), None)
        if not self._metric.removeprefix(f"{of}/" if of else "").startswith(_OF_WORKFLOWS):
            raise ConfigError(lacks)
        log.warning("%s", lacks)
        return None

    def is_better(self, value: float) -> bool:
        return not math.isnan(value) and (self._kept is None or value > self._kept[1])

    def keep(self, version: int, value: float, write: Callable[[Path], None]) -> None:
        """Have the model written, and put it in the place of the one before. Raises OSError and what `write` raises."""
        directory = self._link.with_name(f"{_DIRECTORIES}{version}")
        aside = directory.with_name(directory.name + _ASIDE)
        shutil.rmtree(aside, ignore_errors=True)
        try:
            write(aside)
            note = {"version": version, "metric": self._metric, "value": value}
            (aside / _NOTE).write_text(json.dumps(note) + "\n")
            if self._link.is_symlink() and directory.name == os.readlink(self._link):  # again, after a resume
                directory = directory.with_name(directory.name + "-again")
            shutil.rmtree(directory, ignore_errors=True)
            aside.rename(directory)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        link = self._link.with_name(BEST + _ASIDE)
        link.unlink(missing_ok=True)
        link.symlink_to(directory.name)
        os.replace(link, self._link)
        self._kept = version, value
        for path in self._link.parent.glob(f"{_DIRECTORIES}*"):  # the one before, and what a kill has left
            if path.name != directory.name:
                shutil.rmtree(path, ignore_errors=True)

    def __str__(self) -> str:
        if self._kept is None:
            return f"there is no {self._link} yet"
        version, value = self._kept
        return f"{self._link} is version {version}, {self._metric} {value:.4g}"

    def _read(self) -> tuple[int, float] | None:
        with suppress(FileNotFoundError):
            try:
                known = json.loads((self._link / _NOTE).read_text())
                if known["metric"] == self._metric:
                    return int(known["version"]), float(known["value"])
                log.warning(
                    "%s was kept by %s, and evaluation.keep_best is %s: the next evaluation's model takes its place",
                    self._link,
                    known["metric"],
                    self._metric,
                )
            except (ValueError, KeyError, TypeError) as error:
                log.warning("%s cannot be read (%s): the next evaluation's model takes its place", self._link, error)
        return None


def _values(evaluation: Evaluation) -> Iterator[tuple[str, float]]:
    """All numbers of an evaluation by name; a named dataset's as NAME/..."""
    yield "reward", evaluation.reward
    yield from evaluation.metrics.items()
    for name, part in (evaluation.by_name or {}).items():
        for what, value in _values(part):
            yield f"{name}/{what}", value


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
        """Releases the pin, and `_one`. due: the versions whose suites are played. None: all.

        Raises ConfigError if the metric of the best model is unknown.
        """
        try:
            await pin.ready()
            with self.log.display.work(
                "evaluating", self.evaluator.num_episodes(due), "episodes", leave=False
            ) as advance:
                evaluation, episodes = await self.evaluator.evaluate(advance, is_first=is_first, due=due)
            pin.let_go()
            await self.thread(self.log.evaluation, evaluation, episodes)
            self.done[evaluation.version] = evaluation
            if (best := self.best) is not None:
                unplayed = [suite.name for suite in self.evaluator.suites if not suite.is_due(due)]
                version, value = evaluation.version, best.value_of(evaluation, unplayed)
                if value is not None and best.is_better(value):
                    try:
                        await finished(offload(best.keep, version, value, pin.write_model))
                    except (OSError, ArlError) as error:  # the best one before stays
                        log.error("version %d is the best so far and could not be kept (%s); %s", version, error, best)
                    else:
                        self.log.display.say(str(best))
        finally:
            pin.release()
            self._one.release()
        return evaluation

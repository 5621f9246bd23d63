"""A learner that outlives its process and its ranks: what is lost with them is computed again.

    Trainer --thread arl-train--> RecoveringLearner --> RemoteLearner, and after a loss the next one
                                     keeps every batch trained since the newest complete checkpoint

When a call fails because a process was lost, another one is started, loads the newest checkpoint (or the model), trains
the kept batches again, and the call is repeated. Why nobody else need notice: version v means "trained on batches
0..v-1", and the weights of v are a function of the model, the settings and these batches. Preparing and training draw
what is random from the seed and the version, or from the state in the checkpoint. So versions, ledger, buffer and
servers keep what they have; the weights are the ones that were lost to the bit where the computation is deterministic
and the number of ranks the same, else to float rounding. What the batches train again reports is dropped: it was
recorded the first time.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from arl.api.engine import WeightProbe
from arl.api.errors import ArlError, CheckpointError, ProcessLostError, TrainingError
from arl.api.events import NOWHERE, Events, Placed, TrainerRecovered, short
from arl.api.settings.engines import TrainConfig
from arl.api.train_engine import ModelLimits
from arl.api.types import Group
from arl.runtime.processes.rpc import KeptSaving, KeptSnapshot
from arl.training.batch_codec import FlatBatch
from arl.training.learner_process import RemoteBatch, RemoteLearner
from arl.training.recording import Recorder
from arl.training.run_dir import checkpoint_of, saved_versions
from arl.training.token_log import ReportedBatch
from arl.training.weight_sync import ProbedWeights

_MAX_KEPT_BYTES = 4 * 10**9
"""A checkpoint becomes due when more is kept."""
_PAUSE_S = 2.0
"""How long to wait after the second loss in a row, twice as long after the third: memory or a node may come back."""

ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)


class RecoveringLearner:
    """Stands for a Learner in another process, whichever that is by now. Calls block. Make them all from one thread.

    A loss is a ProcessLostError. After train.max_recoveries losses in a row without a newly trained batch, this call
    and all later ones raise TrainingError: the first loss, and what was tried. Other errors pass.
    """

    def __init__(
        self,
        start: Callable[[], RemoteLearner],
        checkpoints: Path,
        config: TrainConfig,
        events: Events = NOWHERE,
        recorder: Recorder | None = None,
        within: str = "engine",
    ) -> None:
        """start: starts a learner at the model's own weights. checkpoints: the directory of all of them. recorder:
        keeps each step. within: where in a checkpoint this learner's files lie.
        """
        self._start = start
        self._checkpoints, self._within = checkpoints, within
        self._max_recoveries, self._num_ranks = config.max_recoveries, config.num_ranks
        self._looked_at = 0
        """It looks for room for the ranks that are missing after a newer checkpoint than this."""
        self._events = events
        self._recorder = recorder
        self._learner = start()
        self.version: int = self._learner.version
        self._limits: ModelLimits | None = None
        self.num_recoveries = 0
        self.pulse = 0
        """Counts what recoveries have done; any thread may read it."""
        self._place = ""
        """What a recovery does at the moment."""
        self._kept: dict[int, FlatBatch] = {}
        """The batches, by the version on which each was trained."""
        self._batch: FlatBatch | None = None
        """Prepared and not yet trained, so that the next process prepares it, too."""
        self._prepared = RemoteBatch(advantages=[])
        self._is_offloaded = False
        self._losses: list[str] = []
        """Since the last newly trained batch."""
        self._is_over = False

    def placed(self) -> Placed:
        """Where its ranks are."""
        return self.call(lambda learner: learner.placed())

    def prepare(self, groups: Sequence[Group], replayed: Sequence[Group] = ()) -> RemoteBatch:
        batch, self._batch = FlatBatch.of(groups, replayed), None
        self._prepared = self.call(lambda learner: learner.prepare_flat(batch))
        self._batch = batch
        return self._prepared

    def train(self, batch: RemoteBatch) -> ReportedBatch:
        """Train `batch`, the one that was prepared last."""
        self._grow()
        before, trained = self.version, None
        try:
            trained = self.call(lambda learner: learner.train(self._prepared))
            return trained
        finally:
            if not self._is_over:
                self.version = self._learner.version
            if self.version > before:
                self._keep(before, trained)

    def offload(self) -> None:
        """Leave the device, as does another learner after a recovery; see TrainEngine."""
        self._is_offloaded = True
        self.call(lambda learner: learner.offload())

    def onload(self) -> None:
        self._is_offloaded = False
        self.call(lambda learner: learner.onload())

    def save(self, directory: Path) -> KeptSaving:
        def act(learner: RemoteLearner) -> KeptSaving:
            for left in (directory, *directory.parent.glob(f".{directory.name}.*")):  # by a process that was lost
                shutil.rmtree(left, ignore_errors=True)
            return learner.save(directory)

        return self.call(act)

    def load(self, directory: Path) -> None:
        """Raises CheckpointError, which names the mismatch."""
        self.call(lambda learner: learner.load(directory))
        self._kept.clear()
        self.version = self._learner.version

    @property
    def num_ranks(self) -> int:
        return self._learner.num_ranks

    @property
    def is_full(self) -> bool:
        """Whether so much is kept that a checkpoint is due."""
        return sum(batch.num_bytes for batch in self._kept.values()) > _MAX_KEPT_BYTES

    # The policy's weights, as transports see them. A snapshot is lost with its process; its calls raise
    # ProcessLostError then.

    @property
    def engine(self) -> RecoveringLearner:
        return self

    @property
    def limits(self) -> ModelLimits:
        if self._limits is None:
            self._limits = self.call(lambda learner: learner.engine.limits)
        return self._limits

    def snapshot(self) -> KeptSnapshot:
        return self.call(lambda learner: learner.engine.snapshot())

    def snapshot_adapter(self) -> KeptSnapshot:
        """Raises ConfigError without train.lora."""
        return self.call(lambda learner: learner.engine.snapshot_adapter())

    def probe(self) -> WeightProbe | None:
        def act(learner: RemoteLearner) -> WeightProbe | None:
            return learner.engine.probe() if isinstance(learner.engine, ProbedWeights) else None

        return self.call(act)

    def unseen(self, directory: Path) -> str | None:
        """See arl.runtime.processes.rpc.Holder."""
        return self.call(lambda learner: learner.engine.unseen(directory))

    def whereabouts(self) -> str:
        """Where the trainer's process is. Any thread may ask."""
        return self._place or self._learner.whereabouts()

    def close(self) -> None:
        self._learner.close()

    def call(self, act: Callable[[RemoteLearner], ResultT]) -> ResultT:
        """The result of `act` on the learner; if the learner is lost meanwhile, on the next one."""
        while not self._is_over:
            try:
                return act(self._learner)
            except ProcessLostError as error:
                self._losses.append(str(error))
                self._begin_anew(error)
        raise TrainingError(self._what_happened())

    def _keep(self, version: int, trained: ReportedBatch | None) -> None:
        """Keep the batch just trained, and none that the newest complete checkpoint holds."""
        self._losses.clear()
        if self._batch is not None and self._recorder is not None:
            self._recorder.keep(version, self._batch, trained, self.num_ranks)
        if self._batch is not None and self._max_recoveries:
            newest = max(saved_versions(self._checkpoints), default=0)
            self._kept = {v: kept for v, kept in self._kept.items() if v >= newest} | {version: self._batch}
        self._batch = None

    def _grow(self) -> None:
        """Begin anew with all ranks where fewer train, and the cluster has room again: after a new checkpoint."""
        newest = max(saved_versions(self._checkpoints), default=0) if self.num_ranks < self._num_ranks else 0
        if newest > self._looked_at and self._max_recoveries:
            self._looked_at = newest
            if self.call(lambda learner: learner.has_room()):
                self._begin_anew(ProcessLostError(f"the cluster has room for {self._num_ranks} ranks again"))

    def _begin_anew(self, lost: ProcessLostError) -> None:
        """Have another learner at `version`. Raises TrainingError if that fails too often."""
        began, reason = time.monotonic(), str(lost)
        why = reason
        while len(self._losses) <= self._max_recoveries:
            logger.warning("training goes on in another process, as %s", why)
            time.sleep(_PAUSE_S * max(len(self._losses) - 1, 0))
            try:
                first = self._replace(reason)
            except Exception as error:  # noqa: BLE001 (whatever it was, this learner is not at `version`)
                why = str(error) or type(error).__name__
                self._losses.append(why)
                if isinstance(error, ArlError) and not isinstance(error, TrainingError):
                    break  # another one would fail alike
            else:
                self._report(first, time.monotonic() - began, reason)
                return
            finally:
                self._place = ""
        self._is_over = True
        raise TrainingError(self._what_happened()) from lost

    def _replace(self, reason: str) -> int:
        """Start another learner and bring it to `version`. Returns the version from which it trained."""
        self._at("ending what is left of the trainer's process")
        self._learner.end(reason)
        self._at("starting another trainer's process")
        self._learner = learner = self._start()
        self._at("loading the newest checkpoint")
        first = self._looked_at = self._load_newest(learner)
        for version in range(first, self.version):
            self._at(f"training batch {version - first + 1} of {self.version - first} again")
            if version not in self._kept:
                raise CheckpointError(f"{checkpoint_of(self._checkpoints, version + 1)} has been removed")
            learner.train(learner.prepare_flat(self._kept[version]))
        if self._batch is not None:
            self._at("preparing the batch again")
            self._prepared = learner.prepare_flat(self._batch)
        if self._is_offloaded:
            learner.offload()
        return first

    def _load_newest(self, learner: RemoteLearner) -> int:
        """Returns its version; 0 without a checkpoint."""
        while saved := [version for version in saved_versions(self._checkpoints) if version <= self.version]:
            newest = max(saved)
            try:
                learner.load(checkpoint_of(self._checkpoints, newest) / self._within)
            except CheckpointError:
                if newest in saved_versions(self._checkpoints):
                    raise
                continue  # a newer one was completed meanwhile, and this one removed
            return newest
        return 0

    def _at(self, place: str) -> None:
        self._place = f"the trainer recovers from a loss: {place}"
        self.pulse += 1

    def _report(self, first: int, seconds: float, reason: str) -> None:
        self.num_recoveries += 1
        num_batches = self.version - first
        logger.warning(
            "the trainer holds version %d again after %.1f s, with %d batch(es) trained again from version %d",
            self.version, seconds, num_batches, first,
        )  # fmt: skip
        self._events.emit(
            TrainerRecovered(
                version=self.version,
                from_version=first,
                num_batches=num_batches,
                num_ranks=self.num_ranks,
                seconds=seconds,
                reason=short(reason.partition("\n")[0]),
            )
        )

    def _what_happened(self) -> str:
        first, *later = self._losses
        if not later:
            return first
        tried = "\n".join(f"- {text}" for text in later)
        return f"{first}\nOther processes were tried (train.max_recoveries is {self._max_recoveries}), and:\n{tried}"

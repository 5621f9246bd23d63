"""The learner in a process of its own, so that episodes and training do not wait for one interpreter.

Trainer --thread arl-train--> RemoteLearner --ObjectProcess--> LearnerHost --> Learner, train engines
                               batches as flat arrays          snapshots and savings stay there, under keys
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from arl.api.engine import WeightProbe
from arl.api.errors import ArlError
from arl.api.events import Placed
from arl.api.train_engine import ModelLimits, Saving, TrainEngine, TrainSequence, WeightSource, digest_of
from arl.api.types import Group, new_id
from arl.runtime.processes.actor import ObjectProcess
from arl.runtime.processes.rpc import Kept, KeptSaving, KeptSnapshot
from arl.training.batch_codec import FlatBatch
from arl.training.token_log import Pack, ReportedBatch, StepWeights, reported

if TYPE_CHECKING:
    from arl.training.learner import Learner, PreparedBatch


_PROBE_TOKENS = 64
_ENDING_S = 10.0
"""How long a process that is given up may take to end its ranks and their Ray."""


class LearnerHost:
    """The learner's side: what a RemoteLearner calls. `prepare`, `train`, `keep`, `save` and `load` come in turn."""

    def __init__(
        self,
        learner: Learner,
        pack: Pack,
        placed: Placed,
        num_ranks: int = 1,
        has_room: Callable[[], bool] = lambda: False,
        *,
        is_recorded: bool = False,
        is_exact: bool = False,
    ) -> None:
        """pack: packs tokens for the event log. has_room: whether there is room for the ranks that are missing.
        is_recorded: take the weights' fingerprints with each step. is_exact: the policy computes in float32.
        """
        self._placed = placed
        self._learner = learner
        self._pack = pack
        self._num_ranks = num_ranks
        self.has_room = has_room
        self._kept = Kept()
        self._batch: tuple[PreparedBatch, Sequence[Group]] | None = None
        self._cpu_began = 0.0
        self._before = ""
        """The digest of the weights on which the batch was prepared, if steps are recorded."""
        self._is_recorded = is_recorded
        self._is_exact = is_exact
        self._digest = ""
        """The digest of the weights, if it is known."""
        self.ask, self.forget = self._kept.ask, self._kept.forget

    def version(self) -> int:
        return self._learner.version

    def num_ranks(self) -> int:
        return self._num_ranks

    def limits(self) -> ModelLimits:
        return self._learner.engine.limits

    def probe(self) -> WeightProbe:
        return probe_of(self._learner.engine, is_exact=self._is_exact)

    def placed(self) -> Placed:
        return self._placed

    def prepare(self, flat: FlatBatch) -> list[float | None]:
        """Returns PreparedBatch.advantages."""
        self._cpu_began = time.process_time()
        self._before = (self._digest or digest_of(self._learner.fingerprint())) if self._is_recorded else ""
        groups, replayed = flat.groups()
        batch = self._learner.prepare(groups, replayed)
        self._batch = batch, groups
        return batch.advantages

    def train(self) -> tuple[ReportedBatch, int]:
        """Train the batch that was prepared last; returns its numbers and the new version."""
        if self._batch is None:
            raise RuntimeError("no batch is prepared")
        (batch, groups), self._batch = self._batch, None
        done = reported(self._learner.train(batch), groups, self._pack)
        weights = None
        if self._is_recorded:
            weights = StepWeights(before=self._before, after=self._learner.fingerprint())
            self._digest = digest_of(weights.after)
        return replace(done, weights=weights, cpu_s=time.process_time() - self._cpu_began), self._learner.version

    def keep(self, key: str, method: str) -> int:
        """Take a snapshot and keep it; returns its version."""
        snapshot = getattr(self._learner.engine, method)()
        self._kept.put(key, snapshot)
        return snapshot.version

    def offload(self) -> None:
        self._learner.offload()

    def onload(self) -> None:
        self._learner.onload()

    def save(self, key: str, directory: Path) -> None:
        self._kept.put(key, self._learner.save(directory))

    def load(self, directory: Path) -> None:
        self._digest = ""
        self._learner.load(directory)

    def unseen(self, directory: Path) -> str | None:
        """A sentence if a rank on another machine does not see this machine's directory; None if it does."""
        unseen = getattr(self._learner.engine, "unseen", None)
        return unseen(directory) if unseen else None

    def close(self) -> None:
        self._learner.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteBatch:
    """A batch that the learner's process has prepared."""

    advantages: list[float | None]
    """PreparedBatch's."""


def probe_of(engine: TrainEngine, *, is_exact: bool) -> WeightProbe:
    """is_exact: whether the trainer computes in float32. Tokens are random ones, the same in every run of a model."""
    import torch  # importing arl's controller must not load it

    limits = engine.limits
    length = min(_PROBE_TOKENS, (limits.context_length or 2 * _PROBE_TOKENS) // 2)  # servers need room for an answer
    token_ids = np.random.default_rng(0).integers(limits.vocab_size, size=length)
    if limits.image_ids:  # of an image that is not there, which trainer and servers refuse
        of_images = np.isin(token_ids, [*limits.image_ids])
        token_ids[of_images] = next(number for number in range(limits.vocab_size) if number not in limits.image_ids)
    mask = torch.arange(length) > 0
    (row,) = engine.forward([TrainSequence(token_ids=torch.from_numpy(token_ids), loss_mask=mask)])
    logprobs = row[1:].double().numpy()
    return WeightProbe(
        version=engine.version, token_ids=tuple(token_ids.tolist()), logprobs=logprobs, is_exact=is_exact
    )


class RemoteLearner:
    """Stands for a Learner in another process, and for its policy's weights. Calls block; make them from one thread."""

    def __init__(self, host: Callable[[], LearnerHost], log: Path, num_threads: int) -> None:
        """host: builds the learner there, and pickles. log: gets the process's output. num_threads: of its
        computations. Raises what `host` raises.
        """
        # Torch reads its thread counts when it is imported, so they have to be set from outside.
        threads = {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
        self._process = ObjectProcess("the trainer's process", host, log, threads)
        self.whereabouts = self._process.whereabouts
        self.tell = self._process.tell
        self.version: int = self._process.call("version")
        self.num_ranks: int = self._process.call("num_ranks")

    @property
    def engine(self) -> RemoteLearner:
        """The policy's weights, as transports see them."""
        return self

    def placed(self) -> Placed:
        """Where its ranks are."""
        return self._process.call("placed")

    def prepare(self, groups: Sequence[Group], replayed: Sequence[Group] = ()) -> RemoteBatch:
        return self.prepare_flat(FlatBatch.of(groups, replayed))

    def prepare_flat(self, batch: FlatBatch) -> RemoteBatch:
        return RemoteBatch(advantages=self._process.call("prepare", batch))

    def train(self, batch: RemoteBatch) -> ReportedBatch:
        """Train `batch`, the one that was prepared last."""
        try:
            trained, self.version = self._process.call("train")
        except BaseException:
            with suppress(ArlError):  # the process has ended, so the version stays what it was
                self.version = self._process.call("version")
            raise
        return trained

    def offload(self) -> None:
        """Leave the device; see TrainEngine."""
        self._process.call("offload")

    def onload(self) -> None:
        self._process.call("onload")

    def save(self, directory: Path) -> KeptSaving:
        self._process.call("save", key := new_id(), Path(directory).absolute())
        return KeptSaving(self, key)

    def load(self, directory: Path) -> None:
        """Raises CheckpointError, which names the mismatch."""
        self._process.call("load", Path(directory).absolute())
        self.version = self._process.call("version")

    @cached_property
    def limits(self) -> ModelLimits:
        return self._process.call("limits")

    def probe(self) -> WeightProbe:
        return self._process.call("probe")

    def snapshot(self, method: str = "snapshot") -> KeptSnapshot:
        version: int = self._process.call("keep", key := new_id(), method)
        return KeptSnapshot(self, key, version)

    def snapshot_adapter(self) -> KeptSnapshot:
        """Raises ConfigError without train.lora."""
        return self.snapshot("snapshot_adapter")

    def unseen(self, directory: Path) -> str | None:
        return self._process.beside("unseen", directory)

    def ask(self, key: str, name: str, *args: Any, is_leaving: bool = False) -> Any:
        """See arl.runtime.processes.rpc.Holder. All calls beside training have threads of their own there."""
        return self._process.beside("ask", key, name, args)

    def has_room(self) -> bool:
        """Whether the cluster has room for the ranks that are missing."""
        return self._process.call("has_room")

    def end(self, reason: str) -> None:
        """End the process, of which something is lost. Calls that wait for it raise ProcessLostError with `reason`."""
        self._process.close(reason, _ENDING_S)

    def close(self) -> None:
        self._process.close()


class RunWeights(WeightSource, Protocol):
    """The weights being trained, which outlive the processes that hold them."""

    @property
    def limits(self) -> ModelLimits: ...


class RunLearner(Protocol):
    """Trains one batch after another, in other processes, and survives their loss. Calls block, on one thread."""

    @property
    def version(self) -> int: ...

    @property
    def engine(self) -> RunWeights: ...

    @property
    def num_recoveries(self) -> int: ...

    @property
    def pulse(self) -> int:
        """Counts what recoveries have done; any thread may read it."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether a checkpoint is due, because so many batches are kept since the last one."""
        ...

    def prepare(self, groups: Sequence[Group], replayed: Sequence[Group] = ()) -> Any:
        """Returns the batch that is ready for training, with PreparedBatch.advantages."""
        ...

    def train(self, batch: Any) -> ReportedBatch:
        """Train `batch`, the one that was prepared last."""
        ...

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def save(self, directory: Path) -> Saving: ...

    def load(self, directory: Path) -> None:
        """Raises CheckpointError, which names the mismatch."""
        ...

    def whereabouts(self) -> str:
        """Where its processes are. Any thread may ask."""
        ...

    def close(self) -> None: ...

"""The train engine over many ranks: each an FSDPTrainEngine in a Ray actor, with its share of every minibatch.

    train_batch(minibatches) --divide--> a share for each data-parallel rank --Ray's object store--> rank 0, 1, ...
                                                                                                        |
    metrics, once <-- the same on every rank <-- sums of loss, gradients, counts <--gloo or NCCL--------+

Loss weights hold the minibatch's denominators, so shares exchange nothing but the sum of the gradients.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from arl.algorithm.flat_sequences import FlatSequences
from arl.api.errors import ConfigError, ProcessLostError, TrainingError
from arl.api.events import PlacedPart
from arl.api.settings.engines import TrainConfig
from arl.api.train_engine import Head, ModelLimits, Output, TensorPrint, TokenLoss, TrainSequence
from arl.api.types import new_id
from arl.data.image_processor import ImageProcessor
from arl.engine.fsdp.minibatch import divide, kept_columns
from arl.engine.fsdp.ray_cluster import Placement, RayLease, bundle_of, has_room
from arl.engine.fsdp.vision import check_images, image_processor
from arl.runtime.processes.rpc import KeptSnapshot

if TYPE_CHECKING:
    from arl.engine.fsdp.ranks import Ranks

_ENGINES = 2
"""A Ray that arl starts declares CPUs for two engines: a policy's, and that of a critic or a reward model."""
_ROOM_TIMEOUT_S = 5.0
"""How long Ray may take to say that there is room."""
START_TIMEOUT_S = 900.0
"""Longest time until all ranks have a place on the cluster, and then, for each, until it holds the model."""
_REPLACE_TIMEOUT_S = 60.0
"""With train.min_ranks: longest wait for room for train.num_ranks before fewer are taken."""
RANK_TIMEOUT_S = 1800.0
"""Ranks are replaced as hung when none has finished a call, or a microbatch, for this long."""

logger = logging.getLogger(__name__)


class RayTrainEngine:
    """Trains over config.num_ranks processes; see arl.api.engine.TrainEngine for the contract.

    Each config.tensor_parallel neighbouring ranks compute one share of the data together. All nodes must see the
    directories that are read and written. If a rank fails or dies, ProcessLostError names it and the cause, and the
    engine is closed.
    """

    def __init__(self, model: str | Path, config: TrainConfig, seed: int = 0, head: Head = "policy") -> None:
        """As FSDPTrainEngine's. Raises TrainingError, too, if the cluster has no room within START_TIMEOUT_S, or
        building takes longer than that for each rank.
        """
        self._config = config
        self._model = model
        self._num_shares = config.num_ranks // config.tensor_parallel
        self._version = 0
        self.kept: list[dict[str, torch.Tensor]] = []
        with ExitStack() as stack:
            deadline = time.monotonic() + START_TIMEOUT_S
            self._ranks, self._lease, address = _start_ranks(config, stack, deadline)
            # Ranks of one machine load the model one after another.
            deadline = time.monotonic() + START_TIMEOUT_S * config.num_ranks
            (port,) = self._ranks.train("open_store", [(address,)], deadline=deadline)
            directory = str(Path(model).absolute()) if Path(model).is_dir() else str(model)
            build = ((address, port), directory, config, seed, head)
            self._limits: ModelLimits = self._ranks.train_alike("build", *build, deadline=deadline)[0]
            self._stack = stack.pop_all()

    @property
    def version(self) -> int:
        return self._version

    @property
    def limits(self) -> ModelLimits:
        return self._limits

    def forward(self, sequences: Sequence[TrainSequence], output: Output = "logprobs") -> list[torch.Tensor]:
        flat = FlatSequences.of(sequences)
        shares = self._divide(flat)
        sent = self._sent([[flat.take(share)] for share in shares])
        answers = self._ranks.train("forward", [(share, output) for share in sent])[:: self._config.tensor_parallel]
        outputs = [torch.zeros(length) for length in flat.lengths]
        for share, answer in zip(shares, answers, strict=True):
            lengths = [flat.lengths[index] for index in share]
            for index, values in zip(share, torch.from_numpy(answer.copy()).split(lengths), strict=True):
                outputs[index] = values
        return outputs

    def update_reference(self, share: float = 1.0) -> None:
        self._ranks.train_alike("update_reference", share)

    def train_batch(self, minibatches: Sequence[Sequence[TrainSequence]], loss: TokenLoss) -> dict[str, float]:
        """Metrics are FSDPTrainEngine's, of all ranks. Raises TypeError for a loss that does not pickle."""
        loss_ref = self._ranks.put(loss)
        flats = [*map(FlatSequences.of, minibatches)]
        divided = [self._divide(flat) for flat in flats]
        packed = [
            [flat.take(shares[number]) for flat, shares in zip(flats, divided, strict=True)]
            for number in range(self._num_shares)
        ]
        answers = self._ranks.train("train_batch", [(share, loss_ref) for share in self._sent(packed)])
        metrics = answers[0][0]
        for rank, (others, _) in enumerate(answers):
            for name, value in metrics.items():
                are_nan = math.isnan(value) and math.isnan(others[name])
                if not (are_nan or math.isclose(value, others[name], rel_tol=1e-5)):
                    reason = f"rank {rank} reports {name} {others[name]}, rank 0 {value}: their weights differ"
                    self._ranks.end(reason)
                    raise ProcessLostError(f"{reason}. The train engine is closed")
        kept = [[_tensors(columns) for columns in own] for _, own in answers[:: self._config.tensor_parallel]]
        self.kept = [
            kept_columns(len(flat.token_ids), [(flat.places(s), kept[k][number]) for k, s in enumerate(shares)])
            for number, (flat, shares) in enumerate(zip(flats, divided, strict=True))
        ]
        self._version += 1
        return metrics

    def offload(self) -> None:
        self._ranks.train_alike("offload")

    def onload(self) -> None:
        self._ranks.train_alike("onload")

    def fingerprint(self) -> dict[str, TensorPrint]:
        return self._ranks.train_alike("fingerprint")[0]

    def snapshot(self) -> KeptSnapshot:
        return KeptSnapshot(self._ranks, self._kept("snapshot"), self._version)

    def snapshot_adapter(self) -> KeptSnapshot:
        """Raises ConfigError without train.lora."""
        return KeptSnapshot(self._ranks, self._kept("snapshot_adapter"), self._version)

    def export(self, directory: Path) -> int:
        snapshot = self.snapshot()
        try:
            return snapshot.write(directory)
        finally:
            snapshot.release()

    def save(self, directory: Path) -> RanksSaving:
        return RanksSaving(self._ranks, self._kept("save", Path(directory).absolute()))

    def load(self, directory: Path) -> None:
        """Continue from a directory that any number of ranks wrote. Raises CheckpointError."""
        self._version = self._ranks.train_alike("load", Path(directory).absolute())[0]

    def unseen(self, directory: Path) -> str | None:
        """A sentence if rank 0, which writes snapshots, does not share this process's directory; None if it does."""
        return self._ranks.unseen(directory)

    def check_shares(self, run_dir: Path) -> None:
        """Raises ConfigError if a rank does not share this process's run directory."""
        if sentence := self._ranks.unseen(Path(run_dir).absolute(), range(len(self._ranks))):
            raise ConfigError(f"{sentence}; ranks write checkpoints there: set run_dir to storage that all nodes share")

    def places(self) -> list[tuple[PlacedPart, str]]:
        """Where each rank runs, and the name of its GPU; empty on a CPU."""
        return self._ranks.train_alike("place")

    def close(self) -> None:
        """End the ranks and the Ray that was started for them. Idempotent; later calls raise EngineClosedError."""
        self._stack.close()

    def _kept(self, method: str, *args: Any) -> str:
        """Call `method` on all ranks; returns the key under which they keep the results."""
        key = new_id()
        self._ranks.train_alike("keep", key, method, *args)
        return key

    def _divide(self, sequences: Sequence[TrainSequence]) -> list[list[int]]:
        flat = FlatSequences.of(sequences)
        check_images(flat, self._model, self._processor)  # if a rank refused its share, the others would wait
        return divide(flat, self._num_shares, share_prefixes=self._config.share_prefixes)

    @cached_property
    def _processor(self) -> ImageProcessor | None:
        return image_processor(self._model)

    def _sent(self, shares: Sequence[Sequence[FlatSequences]]) -> list[Any]:
        """References to each rank's share. Ranks that split their layers get the same one. Raises TrainingError if Ray
        cannot hold all of it."""
        needed, room = sum(part.num_bytes for share in shares for part in share), self._lease.room()
        if room is not None and needed > room:
            raise TrainingError(
                f"ranks are sent {needed >> 20} MiB at once, and Ray's object store has room for {room >> 20} MiB: "
                "make room in /dev/shm or the directory of temporary files (TMPDIR), or set rollout.batch_size lower"
            )
        refs = [self._ranks.put(share) for share in shares]
        return [refs[rank // self._config.tensor_parallel] for rank in range(self._config.num_ranks)]


def _tensors(columns: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Copies, because arrays in Ray's shared memory are read-only."""
    return {name: torch.from_numpy(column.copy()) for name, column in columns.items()}


class RanksSaving:
    """The Saving (arl.api.engine) of a checkpoint that all ranks are writing."""

    def __init__(self, ranks: Ranks, key: str) -> None:
        self._ranks = ranks
        self._key = key
        weakref.finalize(self, ranks.tell, "forget", key).atexit = False

    def wait(self) -> None:
        """Raises CheckpointError, and ProcessLostError if a rank died meanwhile."""
        self._ranks.beside(range(len(self._ranks)), "ask", self._key, "wait", ())


def check_gpus(config: TrainConfig, roles: Sequence[str] = ("policy",)) -> None:
    """Raises ConfigError if the ranks of the engines of these roles need more GPUs than this machine has."""
    there = torch.cuda.device_count()
    if _is_cuda(config) and config.ray_address is None and there < len(roles) * config.num_ranks:
        others = "".join(f", and as many for the {role.replace('_', ' ')}" for role in roles[1:])
        beside = f" for the policy{others}" if others else ""
        raise ConfigError(
            f"train.num_ranks is {config.num_ranks}{beside}, and this machine has {there} GPU(s); set it lower, or "
            "train.ray_address to a cluster that has more"
        )


class RankRoom:
    """How many ranks the cluster has room for. It holds Ray until it is closed."""

    def __init__(self, config: TrainConfig, *, num_engines: int) -> None:
        """num_engines: a policy's, and perhaps another model's, of as many ranks each. Raises RayLease's errors."""
        self._config = config
        self._num_engines = num_engines
        self._lease = _lease(config)

    def wait(self, counts: Sequence[int]) -> int:
        """The first of `counts` that has room; waits longer for the very first. Raises TrainingError if none has."""
        began = time.monotonic()
        if self.has(counts[0], _REPLACE_TIMEOUT_S):
            return counts[0]
        while True:
            if (count := next(filter(self.has, counts), None)) is not None:
                rest = f"of {counts[0]}, until the cluster has room for all (train.min_ranks)"
                logger.warning("training goes on with %d rank(s) %s", count, rest)
                return count
            if time.monotonic() >= began + START_TIMEOUT_S:
                raise TrainingError(
                    f"the Ray cluster had no room for {counts[-1]} rank(s), the fewest of train.min_ranks, within "
                    f"{START_TIMEOUT_S:g} s; make room, or set train.min_ranks lower"
                )

    def has(self, count: int, timeout_s: float = _ROOM_TIMEOUT_S) -> bool:
        """Whether there is room for so many more ranks of each engine, or will be in time."""
        bundle = bundle_of(self._config.num_threads, int(_is_cuda(self._config)))
        return has_room([bundle] * (count * self._num_engines), timeout_s)

    def close(self) -> None:
        self._lease.release()


def _lease(config: TrainConfig) -> RayLease:
    num_cpus, num_gpus = _ENGINES * config.num_ranks * config.num_threads, torch.cuda.device_count()
    return RayLease(config.ray_address, num_cpus=num_cpus, num_gpus=num_gpus if _is_cuda(config) else 0)


def _is_cuda(config: TrainConfig) -> bool:
    return torch.device(config.device).type == "cuda"


def _start_ranks(config: TrainConfig, stack: ExitStack, deadline: float) -> tuple[Ranks, RayLease, str]:
    """Start the actors; returns them, their Ray and rank 0's address. `stack` ends everything that was started."""
    check_gpus(config)
    num_gpus = 1 if _is_cuda(config) else 0
    count, num_threads = config.num_ranks, config.num_threads
    lease = _lease(config)
    stack.callback(lease.release)
    placement = Placement(count, num_cpus=num_threads, num_gpus=num_gpus, deadline=deadline)
    stack.callback(placement.release)
    # After the lease, which imports Ray in the way that suits it.
    from arl.engine.fsdp.ranks import Ranks

    ranks = Ranks(count, placement, num_threads=num_threads, num_gpus=num_gpus, timeout_s=RANK_TIMEOUT_S)
    stack.callback(ranks.close)
    return ranks, lease, placement.address

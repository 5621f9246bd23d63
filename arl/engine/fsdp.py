"""The train engine on FSDP2: sharded float32 master weights, packed microbatches, global denominators.

One optimizer step:

    minibatch --pack--> microbatches --policy--> logprobs --TokenLoss--> sum(weight * loss) --backward--> clip, AdamW
                             one after another, gradients summed                                    once

Because loss weights hold the minibatch's denominators, gradients are summed over microbatches and over ranks, never
averaged, and so the step does not depend on how the minibatch was split.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from arl.algorithm.packing import pack
from arl.algorithm.prefix_tree import prefix_order
from arl.api.config import TrainConfig
from arl.api.engine import TokenLoss
from arl.api.errors import EngineClosedError
from arl.api.types import TrainSequence
from arl.engine.checkpoint import CheckpointWriter, RankSaving, load_checkpoint
from arl.engine.export import ModelWriter
from arl.engine.microbatch import Microbatch, build_microbatch, empty_microbatch
from arl.engine.model import Policy, load_model
from arl.engine.optimizer import build_optimizer, clip_gradients, learning_rate
from arl.engine.parallel import loading_turn, rank_device, rank_mesh, shard
from arl.engine.process_group import ProcessGroupLease
from arl.engine.snapshot import RankSnapshot, SnapshotTaker
from arl.engine.tally import MinibatchTally, mean_of_minibatches

logger = logging.getLogger(__name__)


class FSDPTrainEngine:
    """Trains a Hugging Face causal language model; see arl.api.engine.TrainEngine for the contract.

    With several ranks, every rank makes the same calls, each with its share of the sequences (a share may be empty)
    and the same `loss`; metrics are of all ranks together. torch.distributed must be initialised before; a process
    alone needs nothing.
    """

    def __init__(self, model: str | Path, config: TrainConfig, seed: int = 0) -> None:
        """model: a model directory or a name on the hub. seed: of torch's generator. Raises ModelError, ConfigError."""
        torch.set_num_threads(config.num_threads)
        torch.manual_seed(seed)
        self._config = config
        self._version = 0
        self._num_updates = 0
        self._device = rank_device(config.device)
        self._lease = ProcessGroupLease(self._device.type)
        self._closed = False
        try:
            mesh = rank_mesh(self._device, config.tensor_parallel)
            self._group = mesh.get_group("dp")
            with loading_turn():
                loaded = load_model(model)
                writer = ModelWriter(loaded)
                self._policy = Policy(loaded.model, config.logprob_chunk_size)
                shard(self._policy, mesh, config)
            self._optimizer = build_optimizer(self._policy, config.optimizer)
            self._checkpoints = CheckpointWriter()
            self._snapshots = SnapshotTaker(writer, self._device)
        except BaseException:
            self._lease.release()
            raise

    @property
    def version(self) -> int:
        return self._version

    @torch.no_grad()
    def forward(self, sequences: Sequence[TrainSequence]) -> list[torch.Tensor]:
        """Logprobs under the current weights, float32[T] on the CPU for each sequence; 0.0 where loss_mask is 0."""
        self._enter()
        logprobs = [torch.zeros(len(sequence)) for sequence in sequences]
        try:
            batches = self._microbatches(sequences)
            current = [self._policy(batch)[0] for _, batch in batches]
        finally:
            self._release_weights()
        for (members, batch), values in zip(batches, current, strict=True):
            for index, row in zip(members, batch.unpack(values.cpu()), strict=False):
                logprobs[index] = row
        return logprobs

    def train_batch(self, minibatches: Sequence[Sequence[TrainSequence]], loss: TokenLoss) -> dict[str, float]:
        """One optimizer step for each minibatch, then version += 1.

        Metrics: loss, grad_norm (before clipping), lr, nonfinite_grads (steps skipped because of one), tokens,
        trained_tokens, forwarded_tokens (shared prefixes once, and nothing that no trained token comes after),
        forwarded_share (of tokens), microbatches, packing_efficiency (share of the microbatches' budget that held
        forwarded tokens), and what `loss` reports. Means are over each minibatch's trained tokens, then over
        minibatches; maxima, and the counts' sums, are over all of them. A minibatch without a trained token takes no
        optimizer step.
        """
        self._enter()
        metrics = mean_of_minibatches([self._step(minibatch, loss) for minibatch in minibatches])
        self._version += 1
        return metrics

    def snapshot(self) -> RankSnapshot:
        """Copy the weights aside, as servers hold them; all ranks must call. Later steps do not change the copy."""
        self._enter()
        return self._snapshots.take(self._version)

    def export(self, directory: Path) -> int:
        """Write a Hugging Face model directory in the dtype it was loaded from; returns the bytes written.

        It appears complete or not at all. Rank 0 writes, all ranks must call.
        """
        snapshot = self.snapshot()
        try:
            return snapshot.write(directory)
        finally:
            snapshot.release()

    def save(self, directory: Path) -> RankSaving:
        """Copy aside everything that `load` needs to continue bit for bit, and begin to write it."""
        self._enter()
        return self._checkpoints.begin(
            directory, self._policy, self._optimizer, version=self._version, num_updates=self._num_updates
        )

    def load(self, directory: Path) -> None:
        """Continue from `save`'s directory. Raises CheckpointError naming what does not fit."""
        self._enter()
        progress = load_checkpoint(directory, self._policy, self._optimizer)
        self._version, self._num_updates = progress.version, progress.num_updates

    def close(self) -> None:
        """Let go of the process group. Idempotent; later calls raise EngineClosedError."""
        if not self._closed:
            self._closed = True
            self._checkpoints.close()
            self._snapshots.close()
            self._lease.release()

    def _step(self, sequences: Sequence[TrainSequence], loss: TokenLoss) -> MinibatchTally:
        tally = MinibatchTally(budget=self._config.max_tokens_per_microbatch)
        try:
            for _, batch in self._microbatches(sequences):
                current, entropy = self._policy(batch)
                losses = loss(current, entropy, batch.tokens)
                weighted = (losses.loss * batch.tokens.loss_weights).sum()
                weighted.backward()
                tally.add(batch, weighted.detach(), losses)
            tally.reduce(self._device, self._group)
            self._update(tally)
        except BaseException:
            self._release_weights()
            raise
        finally:
            # Also when the loss raised: the next step must not begin with the gradients of this one.
            self._optimizer.zero_grad()
        return tally

    def _update(self, tally: MinibatchTally) -> None:
        """Clip and take the optimizer step; skip it when gradients are not finite or nothing was trained."""
        if not tally.trained_tokens:
            return
        config = self._config.optimizer
        tally.lr = learning_rate(config, self._num_updates)
        tally.grad_norm = clip_gradients(self._policy.parameters(), config.max_grad_norm, self._device)
        if not math.isfinite(tally.grad_norm):
            tally.nonfinite_grads = 1
            logger.error(
                "the gradient norm is %s in version %d (loss %s): this optimizer step is skipped",
                tally.grad_norm,
                self._version,
                tally.loss,
            )
        else:
            for group in self._optimizer.param_groups:
                group["lr"] = tally.lr
            self._optimizer.step()
            self._num_updates += 1

    def _microbatches(self, sequences: Sequence[TrainSequence]) -> list[tuple[list[int], Microbatch]]:
        """(indices into `sequences`, their microbatch), as many on every rank; untrained sequences are left out."""
        share = self._config.share_prefixes
        trained = [i for i, sequence in enumerate(sequences) if sequence.loss_mask.any()]
        order = prefix_order([sequences[i] for i in trained], share_prefixes=share)
        bins = pack(order, self._config.max_tokens_per_microbatch)
        members = [[trained[i] for i in indices] for indices in bins]
        batches = [
            (indices, build_microbatch([sequences[i] for i in indices], self._device, share_prefixes=share))
            for indices in members
        ]
        count = torch.tensor(len(batches), device=self._device)
        dist.all_reduce(count, dist.ReduceOp.MAX, group=self._group)
        batches += [([], empty_microbatch(self._device))] * (int(count) - len(batches))
        return batches

    def _enter(self) -> None:
        if self._closed:
            raise EngineClosedError("the train engine was closed")
        # torch's thread count and its current GPU are properties of the calling thread.
        torch.set_num_threads(self._config.num_threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _release_weights(self) -> None:
        """Drop gathered weights, which a forward without backward leaves behind, and one that raised, anywhere.

        Asking for the state does it, for each layer in whatever state it is; reshard() leaves out interrupted ones.
        """
        self._policy.state_dict()

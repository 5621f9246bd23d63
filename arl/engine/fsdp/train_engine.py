"""The train engine on FSDP2: sharded float32 master weights, packed microbatches, global denominators.

One optimizer step:

    minibatch --pack--> microbatches --model--> logprobs, values --TokenLoss--> sum(weight * loss) --backward--> AdamW
                             one after another, gradients summed                                       clipped, once

Loss weights hold the minibatch's denominators. So gradients are summed over microbatches and ranks, never averaged, and
a step does not depend on how the minibatch was split.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from arl.algorithm.packing import pack
from arl.algorithm.prefix_tree import prefix_order
from arl.api.config import TrainConfig
from arl.api.engine import Head, ModelLimits, Output, TokenLoss
from arl.api.errors import ConfigError, EngineClosedError
from arl.api.types import TrainSequence
from arl.engine.fsdp.export import ModelWriter
from arl.engine.fsdp.lora import Adapters
from arl.engine.fsdp.minibatch import (
    Microbatch,
    MinibatchTally,
    build_microbatch,
    empty_microbatch,
    mean_of_minibatches,
)
from arl.engine.fsdp.model import Critic, Policy, load_model, model_limits, new_value_head
from arl.engine.fsdp.optimizer import Reference, build_optimizer, clip_gradients, learning_rate
from arl.engine.fsdp.parallel import ProcessGroupLease, loading_turn, rank_device, rank_mesh, shard
from arl.engine.fsdp.saving import CheckpointWriter, RankSaving, load_checkpoint
from arl.engine.fsdp.snapshot import RankAdapter, RankSnapshot, SnapshotTaker

_OUTPUTS: dict[Head, tuple[Output, ...]] = {
    "policy": ("logprobs", "reference_logprobs"),
    "value": ("values",),
    "policy_and_value": ("logprobs", "reference_logprobs", "values"),
}

logger = logging.getLogger(__name__)


class FSDPTrainEngine:
    """Trains a Hugging Face model; see arl.api.engine.TrainEngine for the contract.

    head policy: a causal language model. head value: a critic or a reward model, that is, a sequence-classification
    model of one label; if `model` is a causal language model, the head is new and zero. head policy_and_value: a policy
    with a value head beside its own. `save` keeps that head; `export` and `snapshot` leave it out, as servers get the
    language model.

    With several ranks, every rank makes the same calls, each with its share of the sequences (it may be empty) and the
    same `loss`; metrics are of all ranks together. torch.distributed must be initialised before. A single process needs
    nothing.
    """

    def __init__(self, model: str | Path, config: TrainConfig, seed: int = 0, head: Head = "policy") -> None:
        """model: a model directory or a name on the hub. seed: of torch's generator. Raises ModelError, ConfigError."""
        if head not in _OUTPUTS:
            raise ConfigError(f"head is {head!r}; a train engine has one of {', '.join(_OUTPUTS)}")
        torch.set_num_threads(config.num_threads)
        torch.manual_seed(seed)
        self._config = config
        self._head: Head = head
        self._version = 0
        self._num_updates = 0
        self._device = rank_device(config.device)
        self._lease = ProcessGroupLease(self._device.type)
        self._closed = False
        try:
            mesh = rank_mesh(self._device, config.tensor_parallel)
            self._group = mesh.get_group("dp")
            with loading_turn():
                loaded = load_model(model, head)
                self._limits = model_limits(loaded.stored_config)
                writer = ModelWriter(loaded)
                adapters = Adapters(loaded, model, config.lora, config.dtype, seed) if config.lora else None
                value_head = new_value_head(loaded.model) if head == "policy_and_value" else None
                self._policy = (
                    Critic(loaded.model)
                    if head == "value"
                    else Policy(loaded.model, config.logprob_chunk_size, value_head)
                )
                shard(self._policy, mesh, config)
            self._reference = Reference(self._policy)
            self._optimizer = build_optimizer(self._policy, config.optimizer)
            self._adapters = adapters
            self._checkpoints = CheckpointWriter(adapters)
            self._snapshots = SnapshotTaker(writer, self._device, adapters)
        except BaseException:
            self._lease.release()
            raise

    @property
    def version(self) -> int:
        return self._version

    @property
    def limits(self) -> ModelLimits:
        return self._limits

    @torch.no_grad()
    def forward(self, sequences: Sequence[TrainSequence], output: Output = "logprobs") -> list[torch.Tensor]:
        """The output, float32[T] on the CPU for each sequence; 0.0 where loss_mask is 0."""
        self._enter()
        self._check_has(output)
        outputs = [torch.zeros(len(sequence)) for sequence in sequences]
        with self._reference.in_place() if output == "reference_logprobs" else nullcontext():
            try:
                batches = self._microbatches(sequences)
                rows = [self._of_tokens(batch, output) for _, batch in batches]
            finally:
                self._release_weights()
        for (members, batch), values in zip(batches, rows, strict=True):
            for index, row in zip(members, batch.unpack(values.cpu()), strict=False):
                outputs[index] = row
        return outputs

    def update_reference(self, share: float = 1.0) -> None:
        """Move the reference towards the current weights. With adapters it consists of adapters alone."""
        self._enter()
        if self._head == "value":
            raise ConfigError("a train engine of head=value has no policy, and so no reference policy")
        self._reference.update(share)

    def train_batch(self, minibatches: Sequence[Sequence[TrainSequence]], loss: TokenLoss) -> dict[str, float]:
        """One optimizer step for each minibatch, then version += 1.

        Metrics: loss, grad_norm (before clipping), lr, nonfinite_grads (steps skipped because of one), tokens,
        trained_tokens, forwarded_tokens (shared prefixes count once, tokens after the last trained one not at all),
        forwarded_share (of tokens), microbatches, packing_efficiency (share of the microbatches' budget that held
        forwarded tokens), and the metrics of `loss`. Means are over each minibatch's trained tokens, then over
        minibatches; maxima and counts are over all minibatches. A minibatch without a trained token takes no optimizer
        step.
        """
        self._enter()
        metrics = mean_of_minibatches([self._step(minibatch, loss) for minibatch in minibatches])
        self._version += 1
        return metrics

    def snapshot(self) -> RankSnapshot:
        """Copy the weights aside, in the dtype that servers hold; a collective. Later steps do not change the copy."""
        self._enter()
        return self._snapshots.take(self._version)

    def snapshot_adapter(self) -> RankAdapter:
        """Copy the adapters alone aside; a collective. Raises ConfigError without train.lora."""
        self._enter()
        return self._snapshots.take_adapter(self._version)

    def export(self, directory: Path) -> int:
        """Write a Hugging Face model directory in the dtype it was loaded from; returns the bytes written.

        A collective; rank 0 writes. The directory appears complete or not at all.
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
            directory,
            self._policy,
            self._optimizer,
            self._reference,
            version=self._version,
            num_updates=self._num_updates,
        )

    def load(self, directory: Path) -> None:
        """Continue from `save`'s directory, with its reference policy.

        Raises CheckpointError naming what does not fit, such as a checkpoint without this engine's reference.
        """
        self._enter()
        progress = load_checkpoint(directory, self._policy, self._optimizer, self._adapters, self._reference)
        self._version, self._num_updates = progress.version, progress.num_updates

    def close(self) -> None:
        """Finish checkpoints and snapshots, and leave the process group. Idempotent; later calls raise
        EngineClosedError.
        """
        if not self._closed:
            self._closed = True
            self._checkpoints.close()
            self._snapshots.close()
            self._lease.release()

    def _check_has(self, output: Output) -> None:
        if output not in _OUTPUTS[self._head]:
            has, needed = ", ".join(_OUTPUTS[self._head]), "value" if output == "values" else "policy"
            raise ConfigError(
                f"{output} are asked of a train engine of head={self._head}, which has {has}; build one of "
                f"head={needed} or policy_and_value"
            )
        if output == "reference_logprobs" and not self._reference.is_held:
            raise ConfigError(
                "reference_logprobs are asked of a train engine without a reference: update_reference first"
            )

    def _of_tokens(self, batch: Microbatch, output: Output) -> torch.Tensor:
        if output == "values":
            return self._policy(batch, with_logprobs=False).values
        return self._policy(batch).logprobs

    def _step(self, sequences: Sequence[TrainSequence], loss: TokenLoss) -> MinibatchTally:
        tally = MinibatchTally(budget=self._config.max_tokens_per_microbatch)
        try:
            for _, batch in self._microbatches(sequences):
                losses = loss(self._policy(batch), batch.tokens)
                weighted = (losses.loss * batch.tokens.loss_weights).sum()
                weighted.backward()
                tally.add(batch, weighted.detach(), losses)
            tally.reduce(self._device, self._group)
            self._update(tally)
        except BaseException:
            self._release_weights()
            raise
        finally:
            # Also after an error: the next step must not begin with the gradients of this one.
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
        """(indices into `sequences`, their microbatch), equally many on every rank; untrained sequences are in none."""
        share = self._config.share_prefixes
        trained = [i for i, sequence in enumerate(sequences) if sequence.loss_mask.any()]
        order = prefix_order([sequences[i] for i in trained], share_prefixes=share)
        bins = pack(order, self._config.max_tokens_per_microbatch, [sequences[i].unit for i in trained])
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
        """Drop the gathered weights that a forward pass without a backward pass leaves behind, or an interrupted one.

        state_dict() does so for every layer; reshard() leaves out interrupted ones.
        """
        self._policy.state_dict()

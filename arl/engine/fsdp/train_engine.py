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
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from arl.algorithm.flat_sequences import FlatSequences
from arl.api.errors import ConfigError, EngineClosedError, ModelError, TrainingError
from arl.api.settings.engines import OptimizerConfig, TrainConfig
from arl.api.train_engine import Head, ModelLimits, Output, TensorPrint, TokenLoss, TokenOutputs, TrainSequence
from arl.engine.fsdp.fingerprint import fingerprints
from arl.engine.fsdp.lora import Adapters, RankAdapter
from arl.engine.fsdp.minibatch import (
    KeptValues,
    Microbatch,
    MinibatchTally,
    empty_microbatch,
    mean_of_minibatches,
    microbatches,
    reduce_over,
)
from arl.engine.fsdp.model import ModelWriter, load_model
from arl.engine.fsdp.offloading import Residence
from arl.engine.fsdp.parallel import ProcessGroupLease, loading_turn, rank_device, rank_mesh, shard
from arl.engine.fsdp.policy import (
    Critic,
    Policy,
    Reference,
    local_shard,
    trained_parameters,
    transformer_layers,
)
from arl.engine.fsdp.saving import CheckpointWriter, RankSaving, load_checkpoint
from arl.engine.fsdp.snapshot import RankSnapshot, SnapshotTaker
from arl.engine.fsdp.vision import NoImages, check_images, freeze_tower
from arl.engine.model_files import model_limits
from arl.engine.routers import find_routers

_OUTPUTS: dict[Head, tuple[Output, ...]] = {
    "policy": ("logprobs", "reference_logprobs"),
    "value": ("values",),
}

logger = logging.getLogger(__name__)


class FSDPTrainEngine:
    """Trains a Hugging Face model; see arl.api.engine.TrainEngine for the contract.

    head policy: a causal language model. head value: a critic or a reward model, which is a sequence-classification
    model of one label; a causal language model gets a new head of zeros.

    With several ranks, initialise torch.distributed first. Every rank makes the same calls with the same `loss`, each
    with its share of the sequences, which may be empty. Metrics are those of all ranks together.
    """

    def __init__(self, model: str | Path, config: TrainConfig, seed: int = 0, head: Head = "policy") -> None:
        """model: a directory or a name on the hub. seed: of torch's generator. Raises ModelError, ConfigError."""
        if head not in _OUTPUTS:
            raise ConfigError(f"head is {head!r}; a train engine has one of {', '.join(_OUTPUTS)}")
        torch.set_num_threads(config.num_threads)
        torch.manual_seed(seed)
        self._config = config
        self._model = model
        self._head: Head = head
        self._version = 0
        self._num_updates = 0
        self.num_computed = 0
        """Microbatches computed so far. While it grows, training goes on."""
        self.kept: list[dict[str, torch.Tensor]] = []
        self._device = rank_device(config.device)
        self._lease = ProcessGroupLease(self._device.type)
        self._closed = False
        try:
            mesh = rank_mesh(self._device, config.tensor_parallel)
            self._group = mesh.get_group("dp")
            with loading_turn():
                loaded = load_model(model, head)
                self._limits = model_limits(loaded.stored_config)
                self._processor = loaded.processor
                writer = ModelWriter(loaded)
                self._cannot_replay = _prepare_replay(loaded.model, model, head)
                if config.freeze_vision_tower:
                    freeze_tower(loaded.model, model)
                adapters = Adapters(loaded, model, config.lora, config.dtype, seed) if config.lora else None
                self._policy = Critic(loaded.model) if head == "value" else Policy(loaded.model)
                shard(self._policy, mesh, config)
            self._trained = trained_parameters(self._policy)
            self._reference = Reference(self._policy)
            self._optimizer = build_optimizer(self._policy, config.optimizer)
            self._residence = Residence(
                self._policy, self._optimizer, self._reference, self._device, is_offloaded=config.cpu_offload
            )
            self._adapters = adapters
            self._checkpoints = CheckpointWriter(adapters)
            self._snapshots = SnapshotTaker(writer, self._device, adapters)
        except BaseException:  # also if interrupted: nobody else can release it
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
        """Routes are the policy's: the reference policy, a fixed function of the text, and a critic use their own."""
        self._enter_device()
        self._check_has(output)
        flat = FlatSequences.of(sequences)
        if output != "logprobs":
            flat = replace(flat, routes=None)
        outputs = [torch.zeros(length) for length in flat.lengths]
        with self._reference.in_place() if output == "reference_logprobs" else nullcontext():
            try:
                batches = self._microbatches(flat)
                found = [self._compute(batch) for _, batch in batches]
            finally:
                self._release_weights()
        for (members, batch), tokens in zip(batches, found, strict=True):
            values = tokens.values if output == "values" else tokens.logprobs
            for index, row in zip(members, batch.unpack(values.cpu()), strict=False):
                outputs[index] = row
        return outputs

    def update_reference(self, share: float = 1.0) -> None:
        """With adapters the reference consists of adapters alone."""
        self._enter_device()
        if self._head == "value":
            raise ConfigError("a train engine of head=value has no policy, and so no reference policy")
        self._reference.update(share)

    def train_batch(self, minibatches: Sequence[Sequence[TrainSequence]], loss: TokenLoss) -> dict[str, float]:
        """One optimizer step for each minibatch that has trained tokens, then version += 1.

        Metrics: loss, grad_norm (before clipping), lr, nonfinite_grads (steps skipped because of one), tokens,
        trained_tokens, forwarded_tokens (shared prefixes count once, tokens after the last trained one not at all),
        forwarded_share (of tokens), microbatches, packing_efficiency (share of the microbatches' budget that held
        forwarded tokens), and the metrics of `loss`. Means are over each minibatch's trained tokens, then over
        minibatches; maxima and counts are over all minibatches.
        """
        self._enter_device()
        self.kept = []
        metrics = mean_of_minibatches([self._step(minibatch, loss) for minibatch in minibatches])
        self._version += 1
        return metrics

    def offload(self) -> None:
        self._enter()
        self._release_weights()
        self._residence.leave()

    def onload(self) -> None:
        self._enter()
        self._residence.come_back()

    def fingerprint(self) -> dict[str, TensorPrint]:
        """The fingerprints of the trained parameters, by their names in checkpoints; a collective."""
        self._enter_device()
        trained = {name.removeprefix("model."): p for name, p in self._trained.items()}
        return fingerprints(trained, self._device)

    def snapshot(self) -> RankSnapshot:
        """Copy the weights aside, in the dtype that servers hold; a collective."""
        self._enter()
        return self._snapshots.take(self._version)

    def snapshot_adapter(self) -> RankAdapter:
        """Copy the adapters alone aside; a collective. Raises ConfigError without train.lora."""
        self._enter()
        return self._snapshots.take_adapter(self._version)

    def export(self, directory: Path) -> int:
        """Write a model directory in the dtype of the loaded one; returns its bytes. A collective; rank 0 writes."""
        snapshot = self.snapshot()
        try:
            return snapshot.write(directory)
        finally:
            snapshot.release()

    def save(self, directory: Path) -> RankSaving:
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
        """Continue from `save`'s directory, with its reference. Raises CheckpointError, which names the mismatch."""
        self._enter()
        progress = load_checkpoint(directory, self._policy, self._optimizer, self._adapters, self._reference)
        self._version, self._num_updates = progress.version, progress.num_updates

    def close(self) -> None:
        """Finish checkpoints and snapshots. Idempotent; later calls raise EngineClosedError."""
        if not self._closed:
            self._closed = True
            self._checkpoints.close()
            self._snapshots.close()
            self._lease.release()

    def _check_has(self, output: Output) -> None:
        if output not in _OUTPUTS[self._head]:
            has, needed = ", ".join(_OUTPUTS[self._head]), "value" if output == "values" else "policy"
            raise ConfigError(
                f"a train engine of head={self._head} has {has}, and no {output}; build one of head={needed}"
            )
        if output == "reference_logprobs" and not self._reference.is_held:
            raise ConfigError("there is no reference yet for reference_logprobs; call update_reference first")

    def _step(self, sequences: Sequence[TrainSequence], loss: TokenLoss) -> MinibatchTally:
        flat = FlatSequences.of(sequences)
        if self._head == "value":
            flat = replace(flat, routes=None)
        tally, kept = MinibatchTally(budget=self._config.max_tokens_per_microbatch), KeptValues(flat)
        try:
            for members, batch in self._microbatches(flat):
                losses = loss(self._compute(batch), batch.tokens)
                weighted = (losses.loss * batch.tokens.loss_weights).sum()
                weighted.backward()
                tally.add(batch, weighted.detach(), losses)
                kept.add(members, batch, losses)
            tally.reduce(self._device, self._group)
            self._update(tally)
            self.kept.append(kept.columns())
        except BaseException:  # also if interrupted: a caller may go on with this engine
            self._release_weights()
            raise
        finally:
            # Also after an error: the next step must not begin with the gradients of this one.
            self._optimizer.zero_grad()
        return tally

    def _update(self, tally: MinibatchTally) -> None:
        """Clip and step, unless gradients are not finite or nothing was trained."""
        if not tally.trained_tokens:
            return
        config = self._config.optimizer
        tally.lr = learning_rate(config, self._num_updates)
        tally.grad_norm = clip_gradients(self._trained.values(), config.max_grad_norm, self._device)
        step = (
            f"optimizer step {self._num_updates} (version {self._version}, lr {tally.lr:g}, gradient norm "
            f"{tally.grad_norm:g})"
        )
        if not math.isfinite(tally.grad_norm):
            self._check_weights(f"before {step}")
            tally.nonfinite_grads = 1
            what = "skipped an optimizer step: the gradient norm is %s in version %d (loss %s)"
            logger.error(what, tally.grad_norm, self._version, tally.loss)
        else:
            for group in self._optimizer.param_groups:
                group["lr"] = tally.lr
            self._optimizer.step()
            self._num_updates += 1
            self._check_weights(f"after {step}")

    def _check_weights(self, when: str) -> None:
        """Raise TrainingError with the first trained parameter that is not finite on some rank; a collective."""
        flags = torch.zeros(len(self._trained))
        shards = {i: shard for i, p in enumerate(self._trained.values()) if (shard := local_shard(p.detach())).numel()}
        if shards:
            norms = torch._foreach_norm(list(shards.values()), math.inf)  # pyright: ignore[reportPrivateImportUsage]
            flags[list(shards)] = torch.stack(norms).isfinite().logical_not().float().cpu()
        flags = flags.to(self._device)
        reduce_over(flags, op=dist.ReduceOp.MAX)
        if flags.any():
            name = list(self._trained)[int(flags.argmax())].removeprefix("model.")
            raise TrainingError(
                f"{when}, {name} is not finite, so training cannot go on; continue from an earlier "
                "checkpoint with a lower train.optimizer.lr"
            )

    def _microbatches(self, sequences: Sequence[TrainSequence]) -> list[tuple[list[int], Microbatch]]:
        """(indices into `sequences`, their microbatch), equally many on every rank, without untrained sequences."""
        if FlatSequences.of(sequences).arrays:
            raise ModelError("sequences have arrays, which a language model does not take; leave them out")
        config = self._config
        if self._cannot_replay and FlatSequences.of(sequences).routes is not None:
            raise ModelError(f"sequences have routes, but {self._cannot_replay}")
        check_images(FlatSequences.of(sequences), self._model, self._processor)
        batches = microbatches(
            sequences,
            config.max_tokens_per_microbatch,
            self._device,
            share_prefixes=config.share_prefixes,
            processor=self._processor,
        )
        count = torch.tensor(len(batches), device=self._device)
        reduce_over(count, self._group, dist.ReduceOp.MAX)
        while len(batches) < int(count):
            batches.append(([], empty_microbatch(self._device)))
        return batches if self._processor is None else self._seeing_alike(batches)

    def _seeing_alike(self, batches: Sequence[tuple[list[int], Microbatch]]) -> list[tuple[list[int], Microbatch]]:
        """Let a microbatch run the vision tower if any rank's does."""
        sees = torch.tensor([batch.images is not None for _, batch in batches], dtype=torch.uint8, device=self._device)
        reduce_over(sees, self._group, dist.ReduceOp.MAX)
        return [
            (members, replace(batch, images=NoImages()) if tower_runs and batch.images is None else batch)
            for (members, batch), tower_runs in zip(batches, sees.tolist(), strict=True)
        ]

    def _compute(self, batch: Microbatch) -> TokenOutputs:
        outputs = self._policy(batch)
        self.num_computed += 1
        return outputs

    def _enter(self) -> None:
        if self._closed:
            raise EngineClosedError("the train engine was closed")
        # torch's thread count and its current GPU are properties of the calling thread.
        torch.set_num_threads(self._config.num_threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _enter_device(self) -> None:
        self._enter()
        if self._residence.is_away:
            raise TrainingError("the train engine is offloaded, so it computes nothing; call onload first")

    def _release_weights(self) -> None:
        """Drop gathered weights that an interrupted pass, or a forward pass without a backward pass, leaves behind.

        state_dict() does so for every layer; reshard() omits interrupted ones.
        """
        if isinstance(self._policy, FSDPModule):
            self._policy.state_dict()


def _prepare_replay(model: PreTrainedModel, name: str | Path, head: Head) -> str | None:
    """Let the policy's layers take routes. Returns why they cannot, if so; a critic's are never asked to."""
    if head == "value":
        return None
    try:
        if (routers := find_routers(model, str(name))) is None:
            return f"{name} is no mixture of experts"
    except ModelError as error:  # only a run that replays needs to know
        return str(error)
    routers.replay_in(transformer_layers(model))
    return None


# The optimizer


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """The rate of optimizer step `step` (from 0): linear warm-up to lr, then constant, linear or cosine decay.

    Warm-up: lr * (step + 1) / warmup_steps. From total_steps on: min_lr_ratio * lr.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant" or config.total_steps is None:
        return config.lr
    decay_steps = max(config.total_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / decay_steps, 1.0)
    left = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019), weight decay on matrices alone. Its state exists, for checkpoints to fill."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, device: torch.device) -> float:
    """Scale gradients in place to at most the global L2 norm `max_norm`; returns the norm before, over all ranks.

    A collective: each rank passes its parts of the same parameters, and a part that several ranks hold counts once. A
    norm that is not finite changes nothing. device: where the ranks' group reduces; gradients may be elsewhere.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    shards = [local_shard(gradient) for gradient in gradients]
    norms = torch._foreach_norm(shards)  # pyright: ignore[reportPrivateImportUsage] (torch's own clipping calls it)
    squares = torch.stack(norms).to(device, torch.float64).square()
    copies = torch.tensor([_num_copies(gradient) for gradient in gradients], dtype=torch.float64, device=device)
    total = (squares / copies).sum()
    reduce_over(total)
    norm = math.sqrt(total.item())
    if math.isfinite(norm) and norm > max_norm:
        torch._foreach_mul_(shards, max_norm / norm)  # pyright: ignore[reportPrivateImportUsage]
    return norm


def _num_copies(tensor: torch.Tensor) -> int:
    """How many ranks hold each element."""
    if not isinstance(tensor, DTensor):
        return dist.get_world_size()
    sizes = tensor.device_mesh.shape
    num_parts = math.prod(n for n, place in zip(sizes, tensor.placements, strict=True) if not place.is_replicate())
    return dist.get_world_size() // num_parts

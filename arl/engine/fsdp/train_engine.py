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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from arl.algorithm.flat_sequences import FlatSequences
from arl.algorithm.trained_tokens import LossReport
from arl.api.errors import ConfigError, EngineClosedError, ModelError, TrainingError
from arl.api.settings.engines import OptimizerConfig, TrainConfig
from arl.api.train_engine import Head, ModelLimits, Output, TensorPrint, TokenLoss, TokenOutputs, TrainSequence
from arl.engine.fsdp.lora import Adapters, RankAdapter
from arl.engine.fsdp.minibatch import (
    Microbatch,
    batch_metrics,
    empty_microbatch,
    kept_columns,
    microbatches,
    reduce_over,
)
from arl.engine.fsdp.model import ModelWriter, load_model
from arl.engine.fsdp.parallel import ProcessGroupLease, loading_turn, rank_device, rank_mesh, shard
from arl.engine.fsdp.policy import Reference, local_shard, trained_parameters
from arl.engine.fsdp.saving import EngineCheckpoints, RankSaving, fingerprints
from arl.engine.fsdp.snapshot import RankSnapshot, SnapshotTaker
from arl.engine.fsdp.vision import NoImages, check_images
from arl.engine.model_files import model_limits
from arl.engine.routers import find_routers
from arl.engine.trial import beside_decoder, transformer_layers

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
                self._cannot_replay: str | None = None
                """Why sequences may have no routes. A critic's never have."""
                if head == "policy":
                    try:
                        if (routers := find_routers(loaded.model, str(model))) is not None:
                            routers.replay_in(transformer_layers(loaded.model))
                        else:
                            self._cannot_replay = f"{model} is no mixture of experts"
                    except ModelError as error:  # only a run that replays needs to know
                        self._cannot_replay = str(error)
                if config.freeze_vision_tower:
                    if not (parts := beside_decoder(loaded.model)):
                        what = f"train.freeze_vision_tower is set, but {model} has no vision tower; leave it out"
                        raise ConfigError(what)
                    for part in parts.values():
                        part.requires_grad_(False)
                adapters = Adapters(writer, model, config.lora, config.dtype, seed) if config.lora else None
                self._policy = loaded.token_model()
                shard(self._policy, mesh, config)
            self._trained = trained_parameters(self._policy)
            self._reference = Reference(self._policy)
            self._optimizer = build_optimizer(self._policy, config.optimizer)
            self._is_away = False
            self._checkpoints = EngineCheckpoints(self._policy, self._optimizer, self._reference, adapters)
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
        ops = {True: dist.ReduceOp.MAX, False: dist.ReduceOp.SUM}
        report = LossReport(lambda values, is_max: reduce_over(values, self._group, ops[is_max]))
        for minibatch in minibatches:
            self._step(minibatch, loss, report)
        self._version += 1
        return batch_metrics(report, self._config.max_tokens_per_microbatch)

    def offload(self) -> None:
        """In the CPU's memory, tensors look as with train.cpu_offload: they can be copied, and checkpoints read into
        them."""
        self._enter()
        self._release_weights()
        if not self._is_away and self._lives_on_cpu:
            logger.info("nothing moves between turns: what is trained is in the CPU's memory")
        elif not self._is_away:
            self._move(lambda tensor: tensor.to("cpu"))
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self._is_away = True

    def onload(self) -> None:
        self._enter()
        if self._is_away and not self._lives_on_cpu:
            self._move(lambda tensor: tensor.to(self._device))
        self._is_away = False

    def fingerprint(self) -> dict[str, TensorPrint]:
        """A collective. The names are those in checkpoints."""
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
        return self._checkpoints.begin(directory, self._version, self._num_updates)

    def load(self, directory: Path) -> None:
        """Continue from `save`'s directory, with its reference. Raises CheckpointError, which names the mismatch."""
        self._enter()
        progress = self._checkpoints.load(directory)
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
        if output == "reference_logprobs" and not self._reference.values:
            raise ConfigError("there is no reference yet for reference_logprobs; call update_reference first")

    def _step(self, sequences: Sequence[TrainSequence], loss: TokenLoss, report: LossReport) -> None:
        flat = FlatSequences.of(sequences)
        if self._head == "value":
            flat = replace(flat, routes=None)
        kept: list[tuple[torch.Tensor, Mapping[str, torch.Tensor]]] = []
        try:
            for members, batch in self._microbatches(flat):
                losses = loss(self._compute(batch), batch.tokens)
                (losses.loss * batch.tokens.loss_weights).sum().backward()
                sizes = (len(batch.trained), batch.input_ids.shape[1]) if members else (0, 0)
                report.add(losses, batch.tokens, microbatches=1, tokens=sizes[0], forwarded_tokens=sizes[1])
                if members:
                    kept.append((flat.places(members)[batch.trained], losses.kept))
            if metrics := report.end_minibatch():
                self._update(report, metrics)
            self.kept.append(kept_columns(len(flat.token_ids), kept))
        except BaseException:  # also if interrupted: a caller may go on with this engine
            self._release_weights()
            raise
        finally:
            # Also after an error: the next step must not begin with the gradients of this one.
            self._optimizer.zero_grad()

    def _update(self, report: LossReport, metrics: dict[str, float]) -> None:
        """Clip and step, unless gradients are not finite. metrics: the minibatch's."""
        config = self._config.optimizer
        metrics["lr"] = lr = learning_rate(config, self._num_updates)
        norm = clip_gradients(self._trained.values(), config.max_grad_norm, self._device)
        step = f"optimizer step {self._num_updates} (version {self._version}, lr {lr:g}, gradient norm {norm:g})"
        if not math.isfinite(norm):
            self._check_weights(f"before {step}")
            report.counts["nonfinite_grads"] += 1
            what = "skipped an optimizer step: the gradient norm is %s in version %d (loss %s)"
            logger.error(what, norm, self._version, metrics["loss"])
            return
        metrics["grad_norm"] = norm
        for group in self._optimizer.param_groups:
            group["lr"] = lr
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

    def _microbatches(self, flat: FlatSequences) -> list[tuple[list[int], Microbatch]]:
        """(indices into the sequences, their microbatch), equally many on every rank, without untrained sequences.

        A microbatch without images runs the vision tower all the same if another rank's has some.
        """
        if flat.arrays:
            raise ModelError("sequences have arrays, which a language model does not take; leave them out")
        config = self._config
        if self._cannot_replay and flat.routes is not None:
            raise ModelError(f"sequences have routes, but {self._cannot_replay}")
        check_images(flat, self._model, self._processor)
        batches = microbatches(
            flat,
            config.max_tokens_per_microbatch,
            self._device,
            share_prefixes=config.share_prefixes,
            processor=self._processor,
        )
        count = torch.tensor(len(batches), device=self._device)
        reduce_over(count, self._group, dist.ReduceOp.MAX)
        while len(batches) < int(count):
            batches.append(([], empty_microbatch(self._device)))
        if self._processor is None:
            return batches
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
        if self._is_away:
            raise TrainingError("the train engine is offloaded, so it computes nothing; call onload first")

    @property
    def _lives_on_cpu(self) -> bool:
        """With cpu_offload FSDP keeps everything in the CPU's memory, and brings each layer itself."""
        return self._config.cpu_offload or self._device.type == "cpu"

    def _move(self, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Move what is trained. to: a copy of a tensor elsewhere. Parameters stay the objects that they are."""
        self._policy._apply(to)  # as Module.to does; FSDP follows
        for state in self._optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):  # the count of steps is where torch keeps it
                state[name] = to(state[name])
        self._reference.values = {name: to(value) for name, value in self._reference.values.items()}

    def _release_weights(self) -> None:
        """Drop gathered weights that an interrupted pass, or a forward pass without a backward pass, leaves behind.

        state_dict() does so for every layer; reshard() omits interrupted ones.
        """
        if isinstance(self._policy, FSDPModule):
            self._policy.state_dict()


class WatchedEngine(FSDPTrainEngine):
    """One that shows what a step does. It has one rank, and needs the memory of two more copies of the weights."""

    gradients: Mapping[str, torch.Tensor]
    """Parameter name -> the sum of the gradients of the last train_batch's minibatches, before clipping."""
    updates: Mapping[str, torch.Tensor]
    """How the last train_batch changed the parameters."""

    def train_batch(self, minibatches: Sequence[Sequence[TrainSequence]], loss: TokenLoss) -> dict[str, float]:
        before = {name: shard.clone() for name, shard in self._shards().items()}
        self.gradients = {name: torch.zeros_like(shard) for name, shard in before.items()}
        metrics = super().train_batch(minibatches, loss)
        self.updates = {name: shard - before[name] for name, shard in self._shards().items()}
        return metrics

    @torch.no_grad()
    def take_state(self, other: WatchedEngine) -> None:
        """Go on from the other's weights, optimizer, reference and version. Both train the same parameters."""
        for name, parameter in self._trained.items():
            theirs = other._trained[name]
            local_shard(parameter.detach()).copy_(local_shard(theirs.detach()))
            for key, value in self._optimizer.state[parameter].items():
                local_shard(value).copy_(local_shard(other._optimizer.state[theirs][key]))
        for name, value in self._reference.values.items():
            if name in other._reference.values:
                local_shard(value).copy_(local_shard(other._reference.values[name]))
        self._version, self._num_updates = other._version, other._num_updates

    def _update(self, report: LossReport, metrics: dict[str, float]) -> None:
        for name, parameter in self._trained.items():
            if parameter.grad is not None:
                self.gradients[name].add_(local_shard(parameter.grad))
        super()._update(report, metrics)

    def _shards(self) -> dict[str, torch.Tensor]:
        return {name: local_shard(p.detach()) for name, p in self._trained.items()}


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
    copies: list[int] = []  # how many ranks hold each element
    for gradient in gradients:
        num_parts = 1
        if isinstance(gradient, DTensor):
            sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
            num_parts = math.prod(size for size, placement in sizes if not placement.is_replicate())
        copies.append(dist.get_world_size() // num_parts)
    total = (squares / squares.new_tensor(copies)).sum()
    reduce_over(total)
    norm = math.sqrt(total.item())
    if math.isfinite(norm) and norm > max_norm:
        torch._foreach_mul_(shards, max_norm / norm)  # pyright: ignore[reportPrivateImportUsage]
    return norm

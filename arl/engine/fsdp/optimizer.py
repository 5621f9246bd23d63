"""Everything that holds or moves the sharded parameters: AdamW, its schedule, clipping, and the reference policy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from arl.api.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """The rate of optimizer step number `step` (from 0): linear warm-up to lr, then constant, linear or cosine decay.

    The first warm-up step already moves: lr * (step + 1) / warmup_steps. From total_steps on: min_lr_ratio * lr.
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
    """AdamW (Loshchilov & Hutter 2019) with weight decay on matrices alone.

    Its state exists from the start, so that a checkpoint can be read into it.
    """
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


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, sharing its storage; an unsharded tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, device: torch.device) -> float:
    """Scale gradients in place to at most the global L2 norm `max_norm`; returns the norm before, over all ranks.

    A collective: each rank passes its parts of the same parameters, and a part that several ranks hold counts once. A
    norm that is not finite leaves the gradients as they are. device: where the ranks' group reduces; the gradients
    themselves may be elsewhere.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    shards = [local_shard(gradient) for gradient in gradients]
    norms = torch._foreach_norm(shards)  # pyright: ignore[reportPrivateImportUsage] (torch's own clipping calls it)
    squares = torch.stack(norms).to(device, torch.float64).square()
    copies = torch.tensor([_num_copies(gradient) for gradient in gradients], dtype=torch.float64, device=device)
    total = (squares / copies).sum()
    dist.all_reduce(total)
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


class Reference:
    """The reference policy: a second set of values of a module's trained parameters, sharded alike. Empty at first."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values: dict[str, torch.Tensor] = {}

    @property
    def is_held(self) -> bool:
        return bool(self._values)

    @property
    def values(self) -> Mapping[str, torch.Tensor]:
        """By the parameters' names, sharded as they are. Checkpoints are read into them."""
        return self._values

    @torch.no_grad()
    def update(self, share: float) -> None:
        """reference += share * (current - reference), in place. The first call copies, whatever the share."""
        if not 0 < share <= 1:
            raise ValueError(f"the reference moves by a share of {share}; it must be above 0 and at most 1")
        trained = self._trained()
        if not self._values:
            self._values = {name: p.detach().clone() for name, p in trained.items()}
            return
        for name, value in self._values.items():
            local_shard(value).lerp_(local_shard(trained[name].detach()), share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the module the reference's values, and afterwards its own again, to the bit.

        No gathered weights may be left before it or at its end: they would be those of the other policy.
        """
        trained = self._trained()
        exchanged: list[str] = []
        # Allocated before all else: putting the module's own values back must not fail for lack of memory.
        scratch = self._scratch()
        try:
            for name in self._values:
                self._exchange(name, trained[name], scratch)
                exchanged.append(name)
            yield
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # offloaded weights may still be copied out of the memory written below
            for name in exchanged:
                self._exchange(name, trained[name], scratch)

    @torch.no_grad()
    def _exchange(self, name: str, parameter: nn.Parameter, scratch: torch.Tensor) -> None:
        """In place, as sharding reads the parameters' own memory."""
        current, other = local_shard(parameter.detach()), local_shard(self._values[name])
        kept = scratch[: current.numel()].view_as(current)
        kept.copy_(current)
        current.copy_(other)
        other.copy_(kept)

    def _scratch(self) -> torch.Tensor:
        """Room for the largest of this rank's shards."""
        shards = [local_shard(value) for value in self._values.values()]
        largest = max(shards, key=torch.Tensor.numel, default=torch.empty(0))
        return torch.empty_like(largest).flatten()

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._module.named_parameters() if p.requires_grad}

"""AdamW over sharded parameters, its learning-rate schedule, and clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

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
    """AdamW (Loshchilov & Hutter 2019) with weight decay on matrices alone. Its state is there from the start."""
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
    """This rank's part of a sharded tensor, sharing its storage; an unsharded one as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, device: torch.device) -> float:
    """Scale gradients in place to at most the global L2 norm `max_norm`; returns the norm before, over all ranks.

    All ranks call, each with its parts of the same parameters; where several hold the same part, it counts once. A norm
    that is not finite is returned and leaves the gradients as they are. device: what the ranks' group reduces on; the
    gradients themselves may be elsewhere.
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

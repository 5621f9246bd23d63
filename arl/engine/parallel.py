"""How the policy is laid over ranks: the device of each, the mesh, and which module is sharded how."""

from __future__ import annotations

import os

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from arl.api.config import TrainConfig
from arl.api.errors import ConfigError
from arl.engine.model import Policy, transformer_layers


def rank_device(device: str) -> torch.device:
    kind = torch.device(device).type
    if kind == "cpu":
        return torch.device(kind)
    if kind != "cuda" or not torch.cuda.is_available():
        raise ConfigError(f"train.device is {device}, which this torch cannot compute on; cpu, or cuda where it has it")
    named, rank = torch.device(device).index, os.environ.get("LOCAL_RANK")
    if named is not None and rank is not None and named != int(rank):
        raise ConfigError(
            f"train.device is {device}, but this process is local rank {rank}; say cuda, without a number"
        )
    index = named if named is not None else int(rank or 0)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def shard(policy: Policy, mesh: DeviceMesh, config: TrainConfig) -> None:
    """Shard each transformer layer, and the rest at the root, over the mesh; gradients are summed over ranks."""
    compute = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    # Alone, a gathered layer is a copy of its shard: keeping it until the backward pass saves a second copy.
    keep = mesh.size() == 1
    for module in (*transformer_layers(policy.model), policy):
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=not keep)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # FSDP2 averages by default, for losses that are means of each rank's tokens. Ours are shares of one sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

"""How the model is laid over ranks: each rank's device and process group, the mesh, and the layers' wrapping.

    layer --split over "tp"--> --compiled--> --checkpointed--> --sharded over "dp"

The order matters. A checkpoint recomputes the compiled layer within it, and sharding gathers the weights around all of
it, once for a recomputation and its backward pass. No parameter changes its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from arl.api.errors import ConfigError, ModelError
from arl.api.settings.engines import TrainConfig
from arl.engine.fsdp.attention import PACKED_ATTENTION, packed_attention
from arl.engine.fsdp.policy import TokenModel
from arl.engine.fsdp.ray_cluster import Lease
from arl.engine.fsdp.vision import vision_tower
from arl.engine.trial import transformer_layers


class ProcessGroupLease(Lease):
    """Torch's default process group, which FSDP2 needs even for one rank: the one that exists, or one of this process
    alone, which meets through memory and opens no port.
    """

    def __init__(self, device_type: str) -> None:
        backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] (documented, but not in __all__)
        start = functools.partial(dist.init_process_group, backend, store=store, rank=0, world_size=1)
        super().__init__(dist.is_initialized(), start)

    def _end(self) -> None:
        dist.destroy_process_group()


def rank_device(device: str) -> torch.device:
    """The device of this rank. device: train.device. Raises ConfigError."""
    if device == "cpu":
        return torch.device(device)
    if not torch.cuda.is_available():
        raise ConfigError(f"train.device is {device}, but this torch has no CUDA; set it to cpu")
    named, rank = torch.device(device).index, os.environ.get("LOCAL_RANK")
    if named is not None and rank is not None and named != int(rank):
        raise ConfigError(f"train.device is {device}, but this process is local rank {rank}; set it to plain cuda")
    index = named if named is not None else int(rank or 0)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def rank_mesh(device: torch.device, tensor_parallel: int) -> DeviceMesh:
    """All ranks as "dp", or "dp" x "tp" of neighbours; rank r trains share r // tensor_parallel. Raises ConfigError."""
    world_size = dist.get_world_size()
    if world_size % tensor_parallel:
        raise ConfigError(f"train.tensor_parallel is {tensor_parallel}, which does not divide the {world_size} rank(s)")
    if tensor_parallel == 1:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp",))
    sizes = (world_size // tensor_parallel, tensor_parallel)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "tp"))


@contextlib.contextmanager
def loading_turn() -> Iterator[None]:
    """Let a machine's ranks load in turn: it holds one whole model at a time. A rank that dies frees its lock."""
    if dist.get_world_size() == 1:
        yield
        return
    with (Path(tempfile.gettempdir()) / f"arl-loading-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def shard(module: TokenModel, mesh: DeviceMesh, config: TrainConfig) -> None:
    """Split, compile, checkpoint and shard the layers by `config`, and the rest at the root. Nothing is sent.

    One rank on a CPU keeps plain parameters if it computes in their dtype: sharding would only copy them.
    """
    layers, tower = list(transformer_layers(module.model)), vision_tower(module.model)
    blocks: list[nn.Module] = [] if tower is None else list(tower.blocks)  # pyright: ignore[reportArgumentType]
    if config.tensor_parallel > 1:
        split_layers(module.model, mesh["tp"])
    if config.compile or mesh.device_type == "cuda":
        _check_compiler(mesh.device_type, "train.compile" if config.compile else "attention on CUDA")
    # A layer's own computation is wrapped, inside the hooks that gather its weights.
    if config.compile:
        # Once for any number of tokens, except attention, which depends on the sequences' lengths.
        AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))
        for layer in layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
    if config.activation_checkpointing:
        for layer in (*layers, *blocks):
            layer.forward = _checkpointed(layer.forward)
    if mesh.size() == 1 and mesh.device_type == "cpu" and config.dtype == "float32":
        for parameter in module.parameters():
            # Into memory that torch aligns: kernels round otherwise at the addresses that a file's tensors have.
            parameter.data = parameter.data.clone()
        return

    compute = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    # The microbatch's temperatures stay float32, and so do the positions of patches.
    uncast = dataclasses.replace(precision, cast_forward_inputs=False)
    offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()
    # On one rank a gathered layer is a copy of its shard; kept until the backward pass it need not be copied twice.
    # With offloading the device has no room for it.
    keep = mesh["dp"].size() == 1 and not config.cpu_offload
    parts = *((layer, precision) for layer in layers), *((block, uncast) for block in blocks), (module, uncast)
    for part, casting in parts:
        fully_shard(part, mesh=mesh["dp"], mp_policy=casting, offload_policy=offload, reshard_after_forward=not keep)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # FSDP2 averages by default. Our ranks' losses are parts of one sum.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, keeping only its inputs for the backward pass. transformers' version needs training mode."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        # In evaluation mode nothing draws random numbers, so there is no random state to restore.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def _check_compiler(device_type: str, what: str) -> None:
    """Raises ConfigError if torch.compile lacks something; torch would only notice in the middle of the first step."""
    variable, names = ("CXX", ("g++", "clang++", "c++")) if device_type == "cpu" else ("CC", ("gcc", "clang", "cc"))
    wanted = [named] if (named := os.environ.get(variable)) else list(names)
    if not any(shutil.which(name.split()[0]) for name in wanted):
        names = " or ".join(wanted)
        raise ConfigError(f"{what} needs a compiler, and none is installed as {names}; install one, or set ${variable}")
    if device_type != "cpu" and importlib.util.find_spec("triton") is None:
        raise ConfigError(f"{what} needs the package triton; install it")


# Tensor parallelism


_FAMILIES = ("llama", "qwen2", "qwen3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Model types (config.json) whose layers have weights under the names in `split_layers` and no others. A vision tower
is not split: each rank of a group computes it, as the rest outside the layers."""


def split_layers(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split the layers' parameters in place by DTensor plans. Raises ModelError without a plan, or for uneven sizes."""
    if (kind := model.config.model_type) not in _FAMILIES:
        why = f"no plan for splitting the layers of a {kind}, only of {', '.join(_FAMILIES)}"
        raise ModelError(f"train.tensor_parallel is {mesh.size()}, but there is {why}; leave it at 1")
    config = model.config.get_text_config()
    sizes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "intermediate features": config.intermediate_size,
    }
    if uneven := [f"{size} {what}" for what, size in sizes.items() if size % mesh.size()]:
        what = f"train.tensor_parallel is {mesh.size()}, which does not divide this model's {' and '.join(uneven)}"
        counts = ", ".join(f"{size} {name}" for name, size in sizes.items())
        raise ModelError(f"{what}; choose a common divisor of {counts}")
    # Inputs become DTensors where a block begins: gradients are summed over ranks once.
    whole = Replicate()
    plan: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": whole}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        "mlp": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[name] = ColwiseParallel()
    if kind.startswith("qwen3"):
        # Weights are whole, inputs are [1, T, heads of this rank, head size]. Each rank has the gradient's share of
        # its heads; DTensors sum them.
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            plan[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
    for layer in transformer_layers(model):
        parallelize_module(layer, mesh, plan, src_data_rank=None)


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that may be sharded over "dp" and split over "tp", gathered; a collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    # One dimension of the mesh after the other: torch warns when both are gathered at once.
    placements = list(tensor.placements)
    for index in range(len(placements)):
        placements[index] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()

"""Tensor parallelism: each transformer layer split over a few ranks, by DTensor plans.

    hidden (whole) --q, k, v: columns--> this rank's heads --attention--> --o: rows, summed--> hidden (whole)
    hidden (whole) --gate, up: columns--> this rank's features ---------> --down: rows, summed--> hidden (whole)

(Megatron-LM, Shoeybi et al. 2019, section 3.) Embedding, norms between blocks and the head are whole on every rank, and
so are their gradients: every rank of a tensor-parallel group is given the same sequences.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from arl.api.errors import ModelError
from arl.engine.fsdp.model import transformer_layers

_FAMILIES = ("llama", "qwen2", "qwen3")
"""Model types (`model_type` in config.json) whose layers have the names below and nothing else with weights."""


def split_layers(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Replace the layers' parameters by this rank's parts, in place; `mesh` has one dimension.

    Every rank holds the whole model before, so nothing is sent. Raises ModelError for a model whose layers have no
    plan, or whose heads or intermediate size the ranks cannot share equally.
    """
    _check_divisible(model, mesh.size())
    has_head_norms = model.config.model_type == "qwen3"
    for layer in transformer_layers(model):
        parallelize_module(layer, mesh, _plan(has_head_norms=has_head_norms), src_data_rank=None)


def whole_tensor(tensor: DTensor) -> torch.Tensor:
    """All of a tensor that is sharded over "dp" and possibly split over "tp"; a collective.

    Dimension after dimension of the mesh: both at once is something that torch warns of.
    """
    placements = list(tensor.placements)
    for index in range(len(placements)):
        placements[index] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def _plan(*, has_head_norms: bool) -> dict[str, ParallelStyle]:
    """Styles by module name within a layer.

    Inputs become DTensors where a block begins, not at each projection: their gradients are then summed over the ranks
    once for the block.
    """
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
    if has_head_norms:
        # Their weights are whole, their inputs [1, T, heads of this rank, head size]. As DTensors, so that the
        # gradients, of which each rank has its heads' share, are summed.
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            plan[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return plan


def _check_divisible(model: PreTrainedModel, num_ranks: int) -> None:
    config = model.config
    if config.model_type not in _FAMILIES:
        raise ModelError(
            f"train.tensor_parallel is {num_ranks}, but there is no plan for splitting the layers of a "
            f"{config.model_type} ({type(model).__name__}), only for {', '.join(_FAMILIES)}; leave it at 1"
        )
    sizes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "intermediate features": config.intermediate_size,
    }
    if uneven := [f"{size} {what}" for what, size in sizes.items() if size % num_ranks]:
        raise ModelError(
            f"train.tensor_parallel is {num_ranks}, which does not divide this model's {' and '.join(uneven)}; choose "
            f"a common divisor of {', '.join(f'{size} {what}' for what, size in sizes.items())}"
        )

"""Attention that follows the radix tree of a packed row, registered with transformers so that models run unchanged.

A microbatch is one row [1, T] in which tokens that sequences share lie once; `packed_layout` travels through the
model's keyword arguments and says what each token comes after. A query sees its own sequence up to itself, no more.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface

from arl.api.errors import ModelError
from arl.engine.fsdp.attention_blocks import PackedLayout, block_attention, masked_attention
from arl.engine.fsdp.attention_cuda import cuda_attention

PACKED_ATTENTION = "arl_packed"
"""What the attention function is registered as (the model's `attn_implementation`)."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_layout: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, H_kv, T, D] -> ([1, T, H, D], no attention weights).

    A list windows_seen is given the sliding window of each layer, for whoever wants to know what the model asks for.
    Raises ModelError when the model asks for something that would be left out: soft-capping, sinks, position biases.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ModelError(f"{type(module).__name__} uses {name} in its attention, which arl cannot train with yet")
    if isinstance(windows_seen := kwargs.get("windows_seen"), list):
        windows_seen.append(sliding_window)
    if sliding_window is not None and sliding_window >= packed_layout.max_keys:
        sliding_window = None
    if query.is_cuda:
        return cuda_attention(query, key, value, packed_layout, scaling, sliding_window), None
    if sliding_window is None and query.shape[-1] == value.shape[-1]:
        return block_attention(query, key, value, packed_layout.blocks, scaling), None
    return masked_attention(query, key, value, packed_layout.stretches, scaling, sliding_window), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)

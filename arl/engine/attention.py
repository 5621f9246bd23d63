"""Attention that stays inside each packed sequence, registered with transformers so that models run unchanged.

A microbatch is one row [1, T] of sequences end to end; `packed_layout` travels through the model's keyword arguments
and says where each of them ends. No mask is built: each sequence is causal within itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from arl.api.errors import ModelError

PACKED_ATTENTION = "arl_packed"
"""What the attention function is registered as (the model's `attn_implementation`)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedLayout:
    """Where the sequences of a packed row lie: their lengths, in order, and cu_seqlens int32[S+1], their bounds."""

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> PackedLayout:
        bounds = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(lengths=lengths, cu_seqlens=bounds.to(device))


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

    Raises ModelError when the model asks for something that would be left out: soft-capping, sinks, position biases.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ModelError(f"{type(module).__name__} uses {name} in its attention, which arl cannot train with yet")
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(query, key, value, packed_layout, scaling, sliding_window), None
    return _per_sequence(query, key, value, packed_layout, scaling, sliding_window), None


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """One flash-attention call over all sequences (CUDA, half precision)."""
    from torch.nn.attention.varlen import varlen_attn

    longest = max(layout.lengths)
    window = (sliding_window - 1 if sliding_window is not None else -1, 0)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if query.shape[1] != key.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    output = varlen_attn(
        query,
        key,
        value,
        layout.cu_seqlens,
        layout.cu_seqlens,
        longest,
        longest,
        scale=scaling,
        window_size=window,
    )
    assert isinstance(output, torch.Tensor)  # a tuple only when auxiliary outputs are asked for
    return output.unsqueeze(0)


def _per_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """One causal call for each sequence: exact, and on CPUs as fast as a padded batch."""
    lengths = list(layout.lengths)
    gqa = query.shape[1] != key.shape[1]
    outputs: list[torch.Tensor] = []
    for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True):
        band = _band(q.shape[2], sliding_window, q.device)
        outputs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=gqa
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _band(length: int, sliding_window: int | None, device: torch.device) -> torch.Tensor | None:
    """bool[length, length], true where a query sees a key of its window; None where causality alone says it."""
    if sliding_window is None or length <= sliding_window:
        return None
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < sliding_window)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)

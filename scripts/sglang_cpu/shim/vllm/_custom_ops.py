"""Rotary position embedding in plain PyTorch, in place, with the signature that SGLang calls."""

from __future__ import annotations

import torch


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """Rotate query [T, heads * head_size] and key [T, kv heads * head_size] at positions int64[T].

    cos_sin_cache: [max position, rotary size], cosines then sines. is_neox: rotate halves; else interleaved pairs.
    """
    cos, sin = cos_sin_cache.index_select(0, positions.flatten()).float().unsqueeze(1).chunk(2, dim=-1)
    rotary_size = 2 * cos.shape[-1]
    for states in (query, key):
        if states is None:
            continue
        heads = states.view(positions.numel(), -1, head_size)[..., :rotary_size]
        wide = heads.float()
        first, second = wide.chunk(2, dim=-1) if is_neox else (wide[..., ::2], wide[..., 1::2])
        rotated = first * cos - second * sin, second * cos + first * sin
        heads.copy_(torch.cat(rotated, dim=-1) if is_neox else torch.stack(rotated, dim=-1).flatten(-2))

"""Attention over a packed row on a GPU: flash-attention over stretches of unequal length, or flex attention.

Flash-attention is torch's own, and flash-attention 3 in its place where that is installed on a GPU it is made for. It
computes in half precision. What it cannot do (float32, large heads, GPUs before Ampere) flex attention does.
"""

from __future__ import annotations

import importlib.util
import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from arl.engine.packed_layout import PackedLayout

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_FLASH_HEAD_SIZE = 256
_BLOCK = 128


def cuda_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D]."""
    if _flash_can(query, value):
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        return varlen_attention(query, key, value, layout, scaling, sliding_window).unsqueeze(0)
    return flex_row_attention(query, key, value, layout, scaling, sliding_window).transpose(1, 2)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """query [T, H, D], key and value [T, H_kv, D] -> [T, H, D].

    Each stretch is a sequence of fewer queries than keys; flash-attention lets the last query of each see all of its
    keys and those before it one fewer each (aligned at the bottom right), as the stretch's context comes first.
    """
    from torch.nn.attention.varlen import varlen_attn

    _use_flash_attention_3(query.device)
    if layout.key_places is not None:
        key, value = (_Gather.apply(x, layout.key_places) for x in (key, value))
    options: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        else:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    output = varlen_attn(
        query,
        key,
        value,
        layout.query_bounds,
        layout.key_bounds,
        layout.max_queries,
        layout.max_keys,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **options,
    )
    assert isinstance(output, torch.Tensor)  # a tuple only when auxiliary outputs are asked for
    return output


def flex_row_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, H, T, D]. Nothing is gathered: the mask is the tree."""
    if sliding_window not in layout.block_masks:
        layout.block_masks[sliding_window] = block_mask(layout, sliding_window)
    return _flex(query.is_cuda)(
        query,
        key,
        value,
        block_mask=layout.block_masks[sliding_window],
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def block_mask(layout: PackedLayout, sliding_window: int | None) -> BlockMask:
    """The row's mask for flex attention, from its blocks' extremes alone: no [T, T] is ever held."""
    from torch.nn.attention.flex_attention import BlockMask

    stops, positions = layout.subtree_stops, layout.positions

    def sees(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        seen = (k <= q) & (q < stops[k])
        return seen if sliding_window is None else seen & (positions[q] - positions[k] < sliding_window)

    some, every = _block_tables(stops, sliding_window)
    full = every & some
    partial = some & ~full
    return BlockMask.from_kv_blocks(
        *_block_lists(partial),
        *_block_lists(full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=sees,
        seq_lengths=(len(stops), len(stops)),
    )


def _block_tables(stops: torch.Tensor, sliding_window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """bool[N, N] for blocks of queries and of keys: whether any query may see any key, whether each sees every key."""
    num_blocks = -(-len(stops) // _BLOCK)
    padded = stops.new_zeros(num_blocks * _BLOCK)
    padded[: len(stops)] = stops
    latest, earliest = (by(padded.view(num_blocks, _BLOCK), dim=1) for by in (torch.amax, torch.amin))
    block = torch.arange(num_blocks, device=stops.device)
    q, k = block[:, None], block[None, :]
    some = (k == q) | ((k < q) & (latest > q * _BLOCK))
    every = (k < q) & (earliest >= ((q + 1) * _BLOCK).clamp(max=len(stops)))
    # A window leaves fewer keys than these; the mask itself says which.
    return some, every if sliding_window is None else torch.zeros_like(every)


def _block_lists(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int32[1, 1, N] how many, and int32[1, 1, N, N] which blocks of keys: those meant come first, in order."""
    order = torch.argsort(table.to(torch.int8), dim=1, descending=True, stable=True)
    return table.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


class _Gather(torch.autograd.Function):
    """x [T, ...], places int64[K] -> x[places]; gradients of places that occur often add up in float32 at least."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.num_rows = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (places,) = ctx.saved_tensors
        precise = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(ctx.num_rows, *grad.shape[1:], dtype=precise, device=grad.device)
        return total.index_add_(0, places, grad.to(precise)).to(grad.dtype), None


def _flash_can(query: torch.Tensor, value: torch.Tensor) -> bool:
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= _FLASH_HEAD_SIZE
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


@cache
def _use_flash_attention_3(device: torch.device) -> None:
    """Let torch call flash-attention 3 where it is installed: it is for Hopper, and faster there."""
    from torch.nn import attention

    known = "FA3" in attention.list_flash_attention_impls()
    installed = importlib.util.find_spec("flash_attn_interface") is not None
    if known and installed and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:
        attention.activate_flash_attention_impl("FA3")


@cache
def _flex(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention

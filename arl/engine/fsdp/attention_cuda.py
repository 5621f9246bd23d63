"""Attention over a packed row on a GPU: flash-attention over stretches of unequal length, or flex attention.

Flash-attention is torch's own, through the operations behind torch.nn.attention.varlen; where flash-attention 3 is
installed, on a GPU that it is made for, torch calls that instead. It computes in half precision. What it cannot do
(float32, large heads, GPUs before Ampere) flex attention does, which in turn needs heads of at least 16: models with
smaller ones get attention with masks.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from arl.engine.fsdp.attention_blocks import PackedLayout, masked_attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_MAX_FLASH_HEAD_SIZE = 256
_MIN_FLEX_HEAD_SIZE = 16
"""Triton multiplies no smaller matrices."""
_BLOCK = 128
_MOST_KERNELS = 64


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
    if min(query.shape[-1], value.shape[-1]) >= _MIN_FLEX_HEAD_SIZE:
        return flex_row_attention(query, key, value, layout, scaling, sliding_window).transpose(1, 2)
    return masked_attention(query, key, value, layout.stretches, scaling, sliding_window)


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
    _use_flash_attention_3(query.device)
    return _VarlenAttention.apply(query, key, value, layout, scaling, sliding_window)  # pyright: ignore[reportReturnType]


class _VarlenAttention(torch.autograd.Function):
    """Between the passes it keeps the row's keys alone, and gathers them anew: gathered, a context that many stretches
    share is there once for each of them, which is too much to hold in every layer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: PackedLayout,
        scaling: float | None,
        sliding_window: int | None,
    ) -> torch.Tensor:
        places = layout.key_places
        causal_only = sliding_window is None
        bounds = (layout.query_bounds, layout.key_bounds, layout.max_queries, layout.max_keys)
        ctx.options = {
            "scale": scaling,
            "window_size_left": -1 if sliding_window is None else sliding_window - 1,
            "window_size_right": 0,
        }
        output, logsumexp, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
            query, _gathered(key, places), _gathered(value, places), *bounds, 0.0, causal_only, False, **ctx.options
        )
        ctx.save_for_backward(query, key, value, output, logsumexp, rng_state, unused)
        ctx.places, ctx.bounds, ctx.causal_only = places, bounds, causal_only
        return output

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None, None]:
        query, key, value, output, logsumexp, rng_state, unused = ctx.saved_tensors
        grad_query, *grads = torch.ops.aten._flash_attention_backward(
            grad_output.contiguous(),
            query,
            _gathered(key, ctx.places),
            _gathered(value, ctx.places),
            output,
            logsumexp,
            *ctx.bounds,
            0.0,
            ctx.causal_only,
            rng_state,
            unused,
            **ctx.options,
        )
        grad_key, grad_value = (_scattered(grad, ctx.places, len(query)) for grad in grads)
        return grad_query, grad_key, grad_value, None, None, None


def _gathered(rows: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    return rows if places is None else rows.index_select(0, places)


def _scattered(gathered: torch.Tensor, places: torch.Tensor | None, num_rows: int) -> torch.Tensor:
    """The gradient of rows from that of `_gathered`: sums over many stretches, in float32 at least."""
    if places is None:
        return gathered
    precise = torch.promote_types(gathered.dtype, torch.float32)
    rows = torch.zeros(num_rows, *gathered.shape[1:], dtype=precise, device=gathered.device)
    return rows.index_add_(0, places, gathered.to(precise)).to(gathered.dtype)


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
        # Short rows too: the kernel for decoding would be one more to compile, and is made for other masks.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )


def block_mask(layout: PackedLayout, sliding_window: int | None) -> BlockMask:
    """The row's mask for flex attention, from its blocks' extremes alone: no [T, T] is ever held."""
    from torch.nn.attention.flex_attention import BlockMask

    stops, positions = layout.subtree_stops, layout.positions
    # As a tensor it is an argument of the kernel, the same for all windows.
    window = None if sliding_window is None else torch.full((), sliding_window, dtype=torch.int32, device=stops.device)

    def sees(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        seen = (k <= q) & (q < stops[k])
        return seen if window is None else seen & (positions[q] - positions[k] < window)

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


def _flash_can(query: torch.Tensor, value: torch.Tensor) -> bool:
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= _MAX_FLASH_HEAD_SIZE
        and query.shape[-1] % 8 == 0
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
    """For rows of any length one kernel. What is not compiled holds [H, T, T]: so on a GPU that is an error.

    Few are compiled all the same: with a window or without, with gradients or without, for one block of a row or more.
    torch's limit is 8 in all, which several models in one process would meet.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if not compiled:
        return flex_attention
    limits = torch._dynamo.config  # pyright: ignore[reportPrivateUsage]
    limits.recompile_limit = max(limits.recompile_limit, _MOST_KERNELS)
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)

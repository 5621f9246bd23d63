"""Exact attention over a packed row on a CPU: in blocks that each see a triangle or a rectangle of it, or with masks.

A query's softmax over several blocks of keys is put together from each block's output o_i and the logarithm l_i of its
normaliser (Milakov & Gimelshein 2018; Dao et al. 2022, section 3.1):

    l = log sum_i exp(l_i)        o = sum_i exp(l_i - l) o_i

A block's backward pass needs no more than o and l: its probabilities are exp(q k - l), whatever else was attended to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from arl.algorithm.prefix_tree import Block, PrefixOrder, RowPlan, Run, Stretch, positions_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def block_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Sequence[Block], scaling: float | None
) -> torch.Tensor:
    """query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D].

    The first blocks are causal and hold each query once. Keys that many queries share are read for all of them at once.
    """
    key, value = _repeated(key, query.shape[1]), _repeated(value, query.shape[1])
    output = _BlockAttention.apply(query, key, value, blocks, scaling)
    return output.transpose(1, 2)  # pyright: ignore[reportOptionalMemberAccess]


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    stretches: Sequence[Stretch],
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """As block_attention, and with a sliding window: a query sees the last `sliding_window` tokens up to itself."""
    key, value = _repeated(key, query.shape[1]), _repeated(value, query.shape[1])
    outputs: list[torch.Tensor] = []
    for stretch in stretches:
        places = positions_of((*stretch.context, (stretch.start, stretch.stop))).to(query.device)
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, stretch.start : stretch.stop],
                key[:, :, places],
                value[:, :, places],
                attn_mask=_band(stretch, sliding_window).to(query.device),
                scale=scaling,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)


class _BlockAttention(torch.autograd.Function):
    """query, key, value [1, H, T, D] -> [1, H, T, D]; sums are kept in float32 at least."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        blocks: Sequence[Block],
        scaling: float | None,
    ) -> torch.Tensor:
        total = _like_transposed(query, torch.promote_types(query.dtype, torch.float32))
        log_total = torch.empty(query.shape[:-1], dtype=total.dtype)
        for block in blocks:
            k, v = _of(key, block.keys), _of(value, block.keys)
            output, logsumexp = _flash(_of(query, block.queries), k, v, 0.0, block.is_causal, scale=scaling)
            if block.is_causal:
                _of(total, block.queries).copy_(output)
                _of(log_total, block.queries).copy_(logsumexp)
            else:
                _merge(_of(total, block.queries), _of(log_total, block.queries), output, logsumexp)
        output = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_total)
        ctx.blocks, ctx.scaling = blocks, scaling
        return output

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        query, key, value, output, log_total = ctx.saved_tensors
        sums = [_like_transposed(x, log_total.dtype).zero_() for x in (query, key, value)]
        for block in ctx.blocks:
            of_queries = (_of(x, block.queries) for x in (grad_output, query))
            grad, q = of_queries
            grads = _flash_backward(
                grad,
                q,
                _of(key, block.keys),
                _of(value, block.keys),
                _of(output, block.queries),
                _of(log_total, block.queries),
                0.0,
                block.is_causal,
                scale=ctx.scaling,
            )
            for total, part, run in zip(sums, grads, (block.queries, block.keys, block.keys), strict=True):
                _of(total, run).add_(part)
        grad_query, grad_key, grad_value = (total.to(query.dtype) for total in sums)
        return grad_query, grad_key, grad_value, None, None


def _merge(total: torch.Tensor, log_total: torch.Tensor, output: torch.Tensor, logsumexp: torch.Tensor) -> None:
    """Add a block's output [1, H, N, D], normalised by exp(logsumexp [1, H, N]), to what there is, in place."""
    both = torch.logaddexp(log_total, logsumexp)
    total.mul_((log_total - both).exp_()[..., None])
    total.addcmul_(output.to(total.dtype), (logsumexp - both).exp_()[..., None])
    log_total.copy_(both)


def _of(rows: torch.Tensor, run: Run) -> torch.Tensor:
    return rows[:, :, run[0] : run[1]]


def _like_transposed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Empty, of x's shape [1, H, T, D], and laid out as [1, T, H, D], which is how the model goes on with it."""
    batch, heads, length, size = x.shape
    return torch.empty(batch, length, heads, size, dtype=dtype).transpose(1, 2)


def _repeated(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Keys or values [1, H_kv, T, D] of grouped queries, once for each of the heads that share them."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _band(stretch: Stretch, sliding_window: int | None) -> torch.Tensor:
    """bool[queries, keys] of a stretch, true where a query sees a key."""
    queries = stretch.num_context_tokens + torch.arange(stretch.num_tokens)
    distance = queries[:, None] - torch.arange(stretch.num_context_tokens + stretch.num_tokens)
    return (distance >= 0) if sliding_window is None else (distance >= 0) & (distance < sliding_window)


# How the radix tree of a packed row is told to attention kernels: as stretches, as blocks, as bounds, as a mask.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedLayout:
    """What attends to what in a row of T tokens, as each kernel wants it said.

    stretches, blocks: see RowPlan. query_bounds, key_bounds int32[S+1]: where the queries and the keys of each of the
    S stretches begin and end. key_places int64[K]: the places in the row of these keys; None when they are the row,
    one after another. max_queries, max_keys: of a stretch. positions, subtree_stops int32[T]: see RowPlan.
    """

    stretches: tuple[Stretch, ...]
    blocks: tuple[Block, ...]
    query_bounds: torch.Tensor
    key_bounds: torch.Tensor
    key_places: torch.Tensor | None
    max_queries: int
    max_keys: int
    positions: torch.Tensor
    subtree_stops: torch.Tensor
    block_masks: dict[int | None, BlockMask] = field(default_factory=dict)

    @classmethod
    def of_plan(cls, plan: RowPlan, device: torch.device) -> PackedLayout:
        num_queries = [s.num_tokens for s in plan.stretches]
        num_keys = [s.num_tokens + s.num_context_tokens for s in plan.stretches]
        return cls(
            stretches=plan.stretches,
            blocks=tuple(plan.blocks()),
            query_bounds=_bounds(num_queries).to(device),
            key_bounds=_bounds(num_keys).to(device),
            key_places=plan.key_places().to(device) if plan.is_shared else None,
            max_queries=max(num_queries),
            max_keys=max(num_keys),
            positions=plan.positions().to(device, torch.int32),
            subtree_stops=plan.subtree_stops().to(device, torch.int32),
        )

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> PackedLayout:
        """Sequences end to end that share nothing."""
        return cls.of_plan(RowPlan.of(PrefixOrder.unshared(lengths)), device)


def _bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

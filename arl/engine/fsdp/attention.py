"""Attention over a packed row: each token sees its own sequence up to itself, and nothing else of the row.

In a microbatch's row [1, T], tokens that sequences share lie once, so a token sees a path of a radix tree.
`PackedLayout` describes it, and travels through the model's keyword arguments to `packed_attention`, which is
registered with transformers: models run unchanged. It calls one of

    block_attention     CPU: tiles and rectangles of the row, whose softmaxes are merged
    masked_attention    CPU: pieces of a stretch under a mask, for sliding windows, unequal head sizes and soft-capping
    flex_attention      GPU: one kernel under the tree's block mask, in any dtype

Two things change a softmax. Soft-capping bounds its scores: cap * tanh(scaling * q k / cap). A sink is a key of no
value whose score is a number that each head learns: it takes a share of the probability.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from arl.algorithm.prefix_tree import Block, PrefixOrder, RowPlan, Run, StepRange
from arl.api.errors import ModelError
from arl.engine.trial import note_scores, refuse_tensors

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

PACKED_ATTENTION = "arl_packed"
"""The `attn_implementation` under which transformers knows `packed_attention`."""

_MIN_FLEX_HEAD_SIZE = 16
"""Triton multiplies no smaller matrices; smaller heads get masked_attention on GPUs too."""
_PIECE = 512
"""Queries that masked_attention computes at once."""
_MOST_SCORES = 2**24
"""Numbers in the largest matrix of scores that it holds where torch's kernel cannot serve."""
_FLEX_BLOCK = 128
"""Tokens in a block of flex attention's mask."""
_MOST_KERNELS = 64

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class PackedLayout:
    """Which tokens of a row attend to which, in the form that each kernel reads.

    It is no dataclass: FSDP would look for tensors in all of it at each layer, and give each layer a copy.
    """

    def __init__(self, plan: RowPlan, device: torch.device) -> None:
        self.plan = plan
        self.blocks = tuple(plan.blocks()) if device.type == "cpu" else ()
        """See RowPlan.blocks."""
        self.max_keys = max(s.num_tokens + s.depth for s in plan.stretches)
        """The most keys that a query sees."""
        self.positions = plan.positions.to(device, torch.int32)
        """int32[T], see RowPlan.positions."""
        self.subtree_stops = plan.subtree_stops.to(device, torch.int32)
        """int32[T], see RowPlan.subtree_stops."""
        self._device = device
        self.block_masks: dict[int | None, BlockMask] = {}
        """Flex attention's masks by sliding window, made on first use."""

    @cached_property
    def apart(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See RowPlan.apart."""
        places, found = self.plan.apart
        return places.to(self._device), found.to(self._device)

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> PackedLayout:
        """Sequences that share nothing, end to end."""
        return cls(RowPlan.of(PrefixOrder.unshared(lengths)), device)


_row: PackedLayout | None = None


@contextmanager
def row_of(layout: PackedLayout) -> Iterator[None]:
    """While a layer computes, or computes again: the row, for modules that are not told of it."""
    global _row  # noqa: PLW0603
    before, _row = _row, layout
    try:
        yield
    finally:
        _row = before


def current_row() -> PackedLayout | None:
    """The innermost `row_of`."""
    return _row


def packed_attention(  # noqa: PLR0913 (transformers' arguments)
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_layout: PackedLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, H_kv, T, D] -> ([1, T, H, D], no attention weights).

    s_aux: float[H], the score of each head's sink. packed_layout: of `row_of` without one, as not every model passes
    arguments on to its attention. Raises ModelError for what no kernel here computes.
    """
    refuse_tensors(module, {"attention_mask": attention_mask} | kwargs)
    packed_layout = _row if packed_layout is None else packed_layout
    if packed_layout is None:
        raise ModelError(f"{type(module).__name__} does not pass keyword arguments on to its attention function")
    note_scores(module, query, key, scaling)
    if sliding_window is not None and sliding_window >= packed_layout.max_keys:
        sliding_window = None
    # Once here: the gradients of all queries are summed in this dtype.
    sinks = None if s_aux is None else s_aux.to(_at_least_float32(query))
    sizes, plan = (query.shape[-1], value.shape[-1]), packed_layout.plan
    if query.is_cuda and min(sizes) >= _MIN_FLEX_HEAD_SIZE:
        return flex_attention(query, key, value, packed_layout, scaling, sliding_window, softcap, sinks), None
    if query.is_cuda or sliding_window is not None or sizes[0] != sizes[1] or softcap is not None:
        return masked_attention(query, key, value, plan, scaling, sliding_window, softcap, sinks), None
    return block_attention(query, key, value, packed_layout.blocks, scaling, sinks), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def _at_least_float32(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _with_sinks(output: torch.Tensor, logsumexp: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The output [1, H, T, D] of a softmax with normalisers exp(l), l [1, H, T], once exp(sink) is added to them."""
    return (output * (logsumexp - sinks[:, None]).sigmoid()[..., None]).to(output.dtype)


# On a CPU


def block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Sequence[Block],
    scaling: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [1, H, T, D], key, value [1, H_kv, T, D], sinks [H] in float32 at least -> [1, T, H, D].

    Tiles come first, with each query in one.
    """
    key, value = _repeated(key, query.shape[1]), _repeated(value, query.shape[1])
    output = _BlockAttention.apply(query, key, value, blocks, scaling, sinks)
    return output.transpose(1, 2)  # pyright: ignore[reportOptionalMemberAccess]


class _BlockAttention(torch.autograd.Function):
    """query, key, value [1, H, T, D] -> [1, H, T, D]; sums are kept in float32 at least.

    A query's softmax over several blocks of keys is merged from each block's output o_i and the logarithm l_i of its
    normaliser (Milakov & Gimelshein 2018; Dao et al. 2022, section 3.1):

        l = log sum_i exp(l_i)        o = sum_i exp(l_i - l) o_i

    A sink s is one more block, of output 0 and l_i = s. A block's backward pass needs o and l alone, as its
    probabilities are exp(q k - l). As do/ds = -exp(s - l) o, the sink's gradient is -sum exp(s - l) (grad o) over all
    queries.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        blocks: Sequence[Block],
        scaling: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        total = _like_transposed(query, _at_least_float32(query))
        log_total = torch.empty(query.shape[:-1], dtype=total.dtype)
        for block in blocks:
            k, v, mask = _of(key, block.keys), _of(value, block.keys), _mask(block, query)
            output, logsumexp = _flash(
                _of(query, block.queries), k, v, 0.0, block.is_causal, attn_mask=mask, scale=scaling
            )
            own, log_own = _of(total, block.queries), _of(log_total, block.queries)
            if block.queries == block.keys:
                own.copy_(output)
                log_own.copy_(logsumexp)
            else:
                both = torch.logaddexp(log_own, logsumexp)
                own.mul_((log_own - both).exp_()[..., None])
                own.addcmul_(output.to(own.dtype), (logsumexp - both).exp_()[..., None])
                log_own.copy_(both)
        if sinks is not None:
            both = torch.logaddexp(log_total, sinks[:, None])
            total.mul_((log_total - both).exp_()[..., None])
            log_total = both
        output = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_total, sinks)
        ctx.blocks, ctx.scaling = blocks, scaling
        return output

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None, torch.Tensor | None]:
        query, key, value, output, log_total, sinks = ctx.saved_tensors
        sums = [_like_transposed(x, log_total.dtype).zero_() for x in (query, key, value)]
        for block in ctx.blocks:
            grads = _flash_backward(
                _of(grad_output, block.queries),
                _of(query, block.queries),
                _of(key, block.keys),
                _of(value, block.keys),
                _of(output, block.queries),
                _of(log_total, block.queries),
                0.0,
                block.is_causal,
                attn_mask=_mask(block, query),
                scale=ctx.scaling,
            )
            for total, part, run in zip(sums, grads, (block.queries, block.keys, block.keys), strict=True):
                _of(total, run).add_(part)
        grad_query, grad_key, grad_value = (total.to(query.dtype) for total in sums)
        grad_sinks = None
        if sinks is not None:
            moved = torch.linalg.vecdot(grad_output.to(sinks.dtype), output.to(sinks.dtype))
            grad_sinks = (sinks[:, None] - log_total).exp_().mul_(moved).sum((0, 2)).neg_()
        return grad_query, grad_key, grad_value, None, None, grad_sinks


def _mask(block: Block, query: torch.Tensor) -> torch.Tensor | None:
    return None if block.mask is None else block.mask.to(query.dtype)


def _of(rows: torch.Tensor, run: Run) -> torch.Tensor:
    return rows[:, :, run[0] : run[1]]


def _like_transposed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Empty, of x's shape [1, H, T, D], but [1, T, H, D] in memory, as the model reads it next."""
    batch, heads, length, size = x.shape
    return torch.empty(batch, length, heads, size, dtype=dtype).transpose(1, 2)


def _repeated(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Repeat the keys or values [1, H_kv, T, D] of grouped queries for each head that shares them."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: RowPlan,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As block_attention, but a query sees only the last `sliding_window` tokens up to itself, by soft-capped scores.

    The memory of each piece is freed after it, and backward passes compute it again. Together the pieces would need a
    multiple of the row: in an episode that branches at every turn, each stretch sees everything before it.
    """
    key, value = _repeated(key, query.shape[1]), _repeated(value, query.shape[1])
    is_plain = softcap is None and sinks is None

    def piece(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, stretch: StepRange, start: int, stop: int
    ) -> torch.Tensor:
        """The outputs of the stretch's tokens start to stop, counted from its first, for the keys that they see."""
        before = stretch.depth
        first = 0 if sliding_window is None else max(0, before + start - sliding_window + 1)
        own = torch.arange(stretch.start, stretch.start + stop)
        seen = torch.cat([plan.context(stretch), own])[first:].to(query.device)
        distance = torch.arange(before + start, before + stop)[:, None] - torch.arange(first, before + stop)
        mask = (distance >= 0) if sliding_window is None else (distance >= 0) & (distance < sliding_window)
        mask = mask.to(query.device)
        query = query[:, :, stretch.start + start : stretch.start + stop]
        key, value = key[:, :, seen], value[:, :, seen]
        if is_plain:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        wide = _at_least_float32(query)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = (query.to(wide) * scale) @ key.to(wide).transpose(2, 3)
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        scores = scores.masked_fill(~mask, -torch.inf)
        output = scores.softmax(-1) @ value.to(wide)
        if sinks is not None:
            output = _with_sinks(output, scores.logsumexp(-1), sinks)
        return output.to(query.dtype)

    outputs: list[Any] = []
    for stretch in plan.stretches:
        size, most_keys = _PIECE, stretch.depth + stretch.num_tokens
        if not is_plain:
            most_keys = most_keys if sliding_window is None else min(most_keys, sliding_window + _PIECE)
            size = min(_PIECE, max(16, _MOST_SCORES // (query.shape[1] * most_keys)))
        for start in range(0, stretch.num_tokens, size):
            own = query, key, value, stretch, start, min(start + size, stretch.num_tokens)
            outputs.append(checkpoint(piece, *own, use_reentrant=False, preserve_rng_state=False))
    return torch.cat([output.transpose(1, 2) for output in outputs], dim=1)


# On a GPU


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D]. Shared keys are read in place."""
    from torch.nn.attention.flex_attention import AuxRequest

    if sliding_window not in layout.block_masks:
        layout.block_masks[sliding_window] = block_mask(layout, sliding_window)
    more: dict[str, Any] = {}
    if softcap is not None:
        cap = torch.full((), softcap, dtype=_at_least_float32(query), device=query.device)  # as with windows
        more["score_mod"] = lambda score, batch, head, q, k: cap * torch.tanh(score / cap)
    if sinks is not None:
        more["return_aux"] = AuxRequest(lse=True)
    output = _flex(query.is_cuda)(
        query,
        key,
        value,
        block_mask=layout.block_masks[sliding_window],
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        # Else short rows would compile torch's kernel for decoding, which is made for other masks.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        **more,
    )
    if sinks is not None:
        output = _with_sinks(output[0], output[1].lse, sinks)
    return output.transpose(1, 2).contiguous()


def block_mask(layout: PackedLayout, sliding_window: int | None) -> BlockMask:
    """The row's mask for flex attention, from each block's extremes: it never holds [T, T]."""
    from torch.nn.attention.flex_attention import BlockMask

    stops, positions = layout.subtree_stops, layout.positions
    # As a tensor it is an argument of the kernel, so one kernel serves all windows.
    window = None if sliding_window is None else torch.full((), sliding_window, dtype=torch.int32, device=stops.device)

    def sees(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        seen = (k <= q) & (q < stops[k])
        return seen if window is None else seen & (positions[q] - positions[k] < window)

    # bool[N, N] by blocks of queries and of keys: any query may see any key; every query sees every key.
    num_blocks = -(-len(stops) // _FLEX_BLOCK)
    padded = stops.new_zeros(num_blocks * _FLEX_BLOCK)
    padded[: len(stops)] = stops
    latest, earliest = (by(padded.view(num_blocks, _FLEX_BLOCK), dim=1) for by in (torch.amax, torch.amin))
    block = torch.arange(num_blocks, device=stops.device)
    q, k = block[:, None], block[None, :]
    some = (k == q) | ((k < q) & (latest > q * _FLEX_BLOCK))
    full = some & (k < q) & (earliest >= ((q + 1) * _FLEX_BLOCK).clamp(max=len(stops)))
    if sliding_window is not None:
        full = torch.zeros_like(some)  # sees() decides
    return BlockMask.from_kv_blocks(
        *_block_lists(some & ~full),
        *_block_lists(full),
        BLOCK_SIZE=_FLEX_BLOCK,
        mask_mod=sees,
        seq_lengths=(len(stops), len(stops)),
    )


def _block_lists(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int32[1, 1, N]: how many blocks of keys are marked. int32[1, 1, N, N]: all blocks, the marked ones first."""
    order = torch.argsort(table.to(torch.int8), dim=1, descending=True, stable=True)
    return table.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


@cache
def _flex(compiled: bool) -> Any:
    """torch's flex attention, compiled once for rows of any length; uncompiled it holds [H, T, T].

    A model needs a few kernels (window or none, gradients or none, one block or more). Several models in one process
    would exceed torch's limit of 8.
    """
    from torch.nn.attention import flex_attention as torch_flex

    if not compiled:
        return torch_flex.flex_attention
    limits = torch._dynamo.config  # pyright: ignore[reportPrivateUsage]
    limits.recompile_limit = max(limits.recompile_limit, _MOST_KERNELS)
    return torch.compile(torch_flex.flex_attention, dynamic=True, fullgraph=True)

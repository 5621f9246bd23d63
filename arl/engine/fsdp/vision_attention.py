"""Attention within a vision tower: each patch sees its own image, or its own window of it, in both directions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface

from arl.algorithm.flat_sequences import runs

VISION_ATTENTION = "arl_flash_segments"
"""The `attn_implementation` under which transformers knows `segment_attention`. To those with "flash" in their name it
gives all images at once and tells where each begins; others it would call once for each image or window."""

_plans: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""_SegmentPlans by the tensor of the segments' bounds: a tower's layers share it, and reading it waits for the GPU."""


def segment_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """query, key, value [1, H, P, D] -> ([1, P, H, D], no weights). Each patch sees its own segment.

    cu_seq_lens_q: int32[S + 1], where the segments (images, or windows of them) begin, and P. Segments of one length
    are computed together.
    """
    plan = _plan_of(cu_seq_lens_q)
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]  # [P, H, D], as they are in memory
    if plan.order is not None:
        rows = [x.index_select(0, plan.order) for x in rows]
    outputs: list[torch.Tensor] = []
    start = 0
    for count, length in plan.batches:
        q, k, v = (x[start : start + count * length].unflatten(0, (count, length)).transpose(1, 2) for x in rows)
        outputs.append(F.scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2).flatten(0, 1))
        start += count * length
    output = torch.cat(outputs)
    return (output if plan.inverse is None else output.index_select(0, plan.inverse))[None], None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SegmentPlan:
    """Segments by length."""

    batches: tuple[tuple[int, int], ...]
    """(number of segments, their length)"""
    order: torch.Tensor | None
    """int64[P]: the patches of all batches, end to end; None: as they come."""
    inverse: torch.Tensor | None


def _plan_of(bounds: torch.Tensor) -> _SegmentPlan:
    if (plan := _plans.get(bounds)) is None:
        lengths = bounds.diff().long().cpu()
        by_length = lengths.argsort(stable=True)
        order = inverse = None
        if (by_length.diff() < 0).any():
            starts = lengths.cumsum(0) - lengths
            places = runs(starts[by_length], lengths[by_length])
            order, inverse = (x.to(bounds.device) for x in (places, places.argsort()))
        batches = tuple((count, length) for length, count in sorted(Counter(lengths.tolist()).items()))
        plan = _plans[bounds] = _SegmentPlan(batches=batches, order=order, inverse=inverse)
    return plan


AttentionInterface.register(VISION_ATTENTION, segment_attention)

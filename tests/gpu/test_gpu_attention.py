"""Attention over a packed row on a GPU is attention over each sequence by itself."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from arl.engine.fsdp.attention import packed_attention
from arl.engine.fsdp.attention_blocks import PackedLayout

LENGTHS = (1, 200, 37, 130, 64)


def rows(dtype: torch.dtype, heads: int, kv_heads: int) -> tuple[torch.Tensor, ...]:
    """query, key, value of a row, and a gradient for what comes out."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(heads, sum(LENGTHS)), (kv_heads, sum(LENGTHS)), (kv_heads, sum(LENGTHS))]
    inputs = [torch.randn(1, *size, 64, generator=generator).to("cuda", dtype).requires_grad_() for size in sizes]
    return *inputs, torch.randn(1, sum(LENGTHS), heads, 64, generator=generator).to("cuda", dtype)


def each_by_itself(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    outputs: list[torch.Tensor] = []
    groups = query.shape[1] // key.shape[1]
    for q, k, v in zip(*(x.double().split(LENGTHS, 2) for x in (query, key, value)), strict=True):
        place = torch.arange(q.shape[2], device=q.device)
        distance = place[:, None] - place[None, :]
        seen = (distance >= 0) & (distance < (window or len(place)))
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))
    return torch.cat(outputs, 2).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)])
@pytest.mark.parametrize("window", [None, 50])
def test_a_packed_row_attends_like_each_sequence_by_itself(dtype, heads: int, kv_heads: int, window: int | None):
    query, key, value, gradient = rows(dtype, heads, kv_heads)
    layout = PackedLayout.of(LENGTHS, torch.device("cuda"))
    ours, _ = packed_attention(
        nn.Module(), query, key, value, None, packed_layout=layout, scaling=64**-0.5, sliding_window=window
    )
    theirs = each_by_itself(query, key, value, window)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-4
    torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)
    pairs = zip(
        torch.autograd.grad(ours, (query, key, value), gradient),
        torch.autograd.grad(theirs, (query, key, value), gradient.double()),
        strict=True,
    )
    for mine, reference in pairs:
        torch.testing.assert_close(mine.double(), reference.double(), rtol=2 * tolerance, atol=2 * tolerance)


@torch.no_grad()
def test_rows_of_many_lengths_share_few_kernels():
    counters.clear()
    for length in (70, 130, 200, 333, 400, 512, 640, 777, 1000, 1024, 1300, 2000):
        query, key, value = (torch.randn(1, heads, length, 32, device="cuda") for heads in (4, 2, 2))
        layout = PackedLayout.of((length // 2, length - length // 2), torch.device("cuda"))
        packed_attention(nn.Module(), query, key, value, None, packed_layout=layout)
    assert 1 <= counters["stats"]["unique_graphs"] <= 4

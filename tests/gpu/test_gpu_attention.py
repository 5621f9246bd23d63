"""Attention over a packed row on a GPU is, for each token, the softmax over its own prefix, as on a CPU."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from arl.algorithm.prefix_tree import PrefixOrder, RowPlan
from arl.engine.fsdp.attention import PackedLayout, masked_attention, packed_attention

HEAD_SIZE, SCALING = 64, 0.125
APART = PrefixOrder.unshared((1, 200, 37, 130, 64))
SHARED = PrefixOrder(
    indices=torch.arange(6),
    lengths=torch.tensor([300, 250, 280, 90, 200, 150]),
    shared=torch.tensor([0, 200, 240, 0, 60, 140]),
)


@pytest.mark.parametrize("order", [APART, SHARED], ids=["apart", "shared"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 2e-4)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (2.0, False), (None, True)])
def test_outputs_and_gradients_are_those_of_a_cpu(
    order: PrefixOrder,
    dtype: torch.dtype,
    tolerance: float,
    heads: int,
    kv_heads: int,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
):
    plan = RowPlan.of(order)
    generator = torch.Generator().manual_seed(0)
    sizes = (heads, kv_heads, kv_heads)
    rows = [torch.randn(1, plan.num_tokens, n, HEAD_SIZE, generator=generator).to(dtype) for n in sizes]
    weights = torch.randn(1, plan.num_tokens, heads, HEAD_SIZE, generator=generator).to(dtype)

    if with_sinks:
        rows.append(torch.randn(heads, generator=generator).to(dtype))

    exact = [x.double().requires_grad_() for x in rows]
    query, key, value = (x.transpose(1, 2) for x in exact[:3])
    theirs = masked_attention(query, key, value, plan, SCALING, window, softcap, exact[3] if with_sinks else None)
    theirs.backward(weights.double())

    ours = [x.cuda().requires_grad_() for x in rows]
    query, key, value = (x.transpose(1, 2) for x in ours[:3])
    changes = {"sliding_window": window, "softcap": softcap, "s_aux": ours[3] if with_sinks else None}
    layout = PackedLayout(plan, torch.device("cuda"))
    output, _ = packed_attention(nn.Module(), query, key, value, None, packed_layout=layout, scaling=SCALING, **changes)
    output.backward(weights.cuda())

    for mine, twin in zip((output, *(x.grad for x in ours)), (theirs, *(x.grad for x in exact)), strict=True):
        assert mine is not None
        assert twin is not None
        assert mine.dtype == dtype
        difference = (mine.cpu().double() - twin).abs().max() / twin.abs().max()
        assert difference < tolerance


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_many_lengths_share_few_kernels(dtype: torch.dtype):
    counters.clear()
    for length in (70, 130, 200, 333, 400, 512, 640, 777, 1000, 1024, 1300, 2000):
        query, key, value = (torch.randn(1, heads, length, 32, device="cuda", dtype=dtype) for heads in (4, 2, 2))
        layout = PackedLayout.of((length // 2, length - length // 2), torch.device("cuda"))
        packed_attention(nn.Module(), query, key, value, None, packed_layout=layout)
    assert 1 <= counters["stats"]["unique_graphs"] <= 4

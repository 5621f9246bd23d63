"""On a GPU, attention over a row of shared prefixes is the softmax over each token's own prefix, as on a CPU."""

import pytest
import torch

from arl.algorithm.prefix_tree import PrefixOrder, RowPlan
from arl.engine.fsdp.attention_blocks import PackedLayout, masked_attention
from arl.engine.fsdp.attention_cuda import cuda_attention

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 64
LENGTHS, SHARED = (300, 250, 280, 90, 200, 150), (0, 200, 240, 0, 60, 140)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4)])
def test_outputs_and_gradients_are_those_of_a_cpu(dtype: torch.dtype, tolerance: float, window: int | None):
    plan = RowPlan.of(PrefixOrder(indices=tuple(range(len(LENGTHS))), lengths=LENGTHS, shared=SHARED))
    on_gpu = PackedLayout.of_plan(plan, torch.device("cuda"))
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randn(1, plan.num_tokens, heads, HEAD_SIZE, generator=generator).to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    weights = torch.randn(1, plan.num_tokens, HEADS, HEAD_SIZE, generator=generator).to(dtype)

    exact = [x.double().requires_grad_() for x in rows]
    query, key, value = (x.transpose(1, 2) for x in exact)
    theirs = masked_attention(query, key, value, plan.stretches, 0.125, window)
    theirs.backward(weights.double())

    ours = [x.cuda().requires_grad_() for x in rows]
    query, key, value = (x.transpose(1, 2) for x in ours)
    output = cuda_attention(query, key, value, on_gpu, 0.125, window)
    output.backward(weights.cuda())

    for mine, twin in zip((output, *(x.grad for x in ours)), (theirs, *(x.grad for x in exact)), strict=True):
        assert mine is not None
        assert twin is not None
        assert mine.dtype == dtype
        difference = (mine.cpu().double() - twin).abs().max() / twin.abs().max()
        assert difference < tolerance

"""Log-probabilities on a GPU: those of a full softmax, in memory that does not grow with tokens x vocabulary."""

import pytest
import torch

from arl.engine.fsdp.policy import token_logprobs

H, V, CHUNK = 64, 50_000, 128


def peak_bytes(num_tokens: int) -> int:
    """The most that the forward and backward pass held beside arguments and gradients."""
    hidden = torch.randn(num_tokens, H, device="cuda", requires_grad=True)
    weight = torch.randn(V, H, device="cuda", requires_grad=True)
    targets = torch.zeros(num_tokens, dtype=torch.int64, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprobs, entropies = token_logprobs(hidden, weight, targets, torch.ones(num_tokens, device="cuda"), CHUNK)
    (logprobs.sum() + entropies.sum()).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    few, many = peak_bytes(4 * CHUNK), peak_bytes(64 * CHUNK)
    logits_of_a_chunk = 4 * CHUNK * V
    assert many < few + logits_of_a_chunk
    assert many < 64 * logits_of_a_chunk / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_equal_a_full_log_softmax(dtype: torch.dtype):
    hidden = torch.randn(300, H, device="cuda", dtype=dtype) / 8
    weight = torch.randn(V, H, device="cuda", dtype=dtype)
    targets = torch.randint(V, (300,), device="cuda")
    temperatures = 0.5 + torch.rand(300, device="cuda")
    logprobs, entropies = token_logprobs(hidden, weight, targets, temperatures, CHUNK)
    full = torch.log_softmax(hidden.double() @ weight.double().T / temperatures[:, None], dim=-1)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-3  # logits rounded to bfloat16 would be off by more
    expected = full.gather(-1, targets[:, None])[:, 0], -(full.exp() * full).sum(-1)
    for ours, theirs in zip((logprobs, entropies), expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)

"""Chunked log-probabilities equal a full log-softmax, in value and gradient."""

import pytest
import torch

from arl.engine.fsdp.policy import token_logprobs

M, H, V = 37, 8, 50


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(M, H, generator=generator, requires_grad=True),
        "weight": torch.randn(V, H, generator=generator, requires_grad=True),
        "targets": torch.randint(0, V, (M,), generator=generator),
        "temperatures": 0.3 + torch.rand(M, generator=generator),
    }


def full(hidden, weight, targets, temperatures) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax(hidden.double() @ weight.double().T / temperatures.double()[:, None], dim=-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk_size", [1, 10, M, 1000])
def test_values_equal_a_full_log_softmax(inputs, chunk_size: int):
    for ours, theirs in zip(token_logprobs(**inputs, chunk_size=chunk_size), full(**inputs), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 10, M, 1000])
@pytest.mark.parametrize(("by_logprob", "by_entropy"), [(1.0, 0.0), (0.0, 1.0), (1.0, 0.7)])
def test_gradients_equal_those_of_a_full_log_softmax(inputs, chunk_size: int, by_logprob: float, by_entropy: float):
    upstream = torch.linspace(-1, 1, M)
    gradients: list[tuple[torch.Tensor, ...]] = []
    for logprob, entropy in (token_logprobs(**inputs, chunk_size=chunk_size), full(**inputs)):
        total = by_logprob * (logprob * upstream).sum() + by_entropy * (entropy * upstream.flip(0)).sum()
        gradients.append(torch.autograd.grad(total, (inputs["hidden"], inputs["weight"])))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_one_output_alone_can_be_differentiated(inputs):
    logprob, entropy = token_logprobs(**inputs, chunk_size=10)
    for output, reference in zip((logprob, entropy), full(**inputs), strict=True):
        (ours,) = torch.autograd.grad(output.sum(), inputs["hidden"], retain_graph=True)
        (theirs,) = torch.autograd.grad(reference.sum(), inputs["hidden"], retain_graph=True)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_no_tokens_give_no_logprobs_and_zero_gradients(inputs):
    nothing = {name: value[:0] if name != "weight" else value for name, value in inputs.items()}
    logprob, _ = token_logprobs(**nothing, chunk_size=10)
    (gradient,) = torch.autograd.grad(logprob.sum(), inputs["weight"])
    assert logprob.shape == (0,)
    assert not gradient.any()


def test_extreme_logits_stay_finite(inputs):
    hidden = (inputs["hidden"].detach() * 1e4).requires_grad_()
    logprob, entropy = token_logprobs(**(inputs | {"hidden": hidden}), chunk_size=10)
    (gradient,) = torch.autograd.grad((logprob + entropy).sum(), hidden)
    assert all(values.isfinite().all() for values in (logprob, entropy, gradient))

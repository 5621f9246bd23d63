"""Estimates of divergence: what their gradients are, by summing over a whole small vocabulary."""

import math

import pytest
import torch
from loss_references import gradient

from arl.algorithm.losses.reinforcement import kl_estimate, unbiased_kl

LOGITS = [0.3, -1.2, 0.8, 0.1, -0.4]
BEHAVIOR = [math.log(q) for q in (0.3, 0.1, 0.25, 0.15, 0.2)]
REFERENCE = [math.log(q) for q in (0.15, 0.35, 0.1, 0.3, 0.1)]


def log_softmax(logits: list[float]) -> list[float]:
    total = math.log(sum(math.exp(x) for x in logits))
    return [x - total for x in logits]


def divergence(p: list[float], q: list[float]) -> float:
    """KL(p || q) of two lists of logprobs."""
    return sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def float64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


ON_POLICY = log_softmax(LOGITS)
OF_THE_KL = gradient(lambda logits: divergence(log_softmax(list(logits)), REFERENCE), LOGITS)


@pytest.mark.parametrize("sampler", [ON_POLICY, BEHAVIOR], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_an_unbiased_estimates_gradient_is_that_of_the_divergence(estimator, sampler):
    """In the mean over tokens from the sampler, by the logits."""
    logits, behavior = float64(LOGITS).requires_grad_(), float64(sampler)
    estimates = unbiased_kl(logits.log_softmax(0), behavior, float64(REFERENCE), estimator)
    (slopes,) = torch.autograd.grad((behavior.exp() * estimates).sum(), logits)
    assert slopes.tolist() == pytest.approx(OF_THE_KL, abs=1e-8)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_penalty_draws_the_policy_back_from_either_side(estimator):
    """Its gradient never has the wrong sign, however far; beyond e^-20, k3's is gone."""
    far = [-1e4, -30.0, -19.0, -0.5, 0.5, 19.0, 30.0, 1e4]
    d = float64(far).requires_grad_()
    (slopes,) = torch.autograd.grad(kl_estimate(d, estimator).sum(), d)
    assert (slopes * d >= 0).all()
    assert slopes[2:].all()

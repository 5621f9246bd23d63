"""Estimates of divergence: their values, and what their gradients are, by summing over a whole small vocabulary."""

import math
from collections.abc import Callable

import pytest
import torch
from loss_references import gradient, kl

from arl.algorithm.losses.reinforcement import divergence_from_sampler, kl_estimate, unbiased_kl

LOGITS = [0.3, -1.2, 0.8, 0.1, -0.4]
BEHAVIOR = [math.log(q) for q in (0.3, 0.1, 0.25, 0.15, 0.2)]
REFERENCE = [math.log(q) for q in (0.15, 0.35, 0.1, 0.3, 0.1)]


def log_softmax(logits: list[float]) -> list[float]:
    total = math.log(sum(math.exp(x) for x in logits))
    return [x - total for x in logits]


def divergence(p: list[float], q: list[float]) -> float:
    """KL(p || q) of two lists of logprobs."""
    return sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def expected(estimate: Callable[[torch.Tensor], torch.Tensor], sampler: list[float]) -> tuple[float, list[float]]:
    """An estimate's mean over tokens from `sampler`, and the mean of its gradient by the logits."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    current = torch.log_softmax(logits, dim=0)
    mean = (torch.tensor(sampler, dtype=torch.float64).exp() * estimate(current)).sum()
    return mean.item(), torch.autograd.grad(mean, logits)[0].tolist()


def float64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


ON_POLICY = log_softmax(LOGITS)
OF_THE_KL = gradient(lambda logits: divergence(log_softmax(list(logits)), REFERENCE), LOGITS)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_an_estimate_is_that_of_its_formula(estimator):
    values = [-3.0, -0.5, 0.0, 1e-4, 0.7, 4.0]
    assert kl_estimate(float64(values), estimator).tolist() == pytest.approx([kl(d, 0.0, estimator) for d in values])


@pytest.mark.parametrize("sampler", [ON_POLICY, BEHAVIOR], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_an_unbiased_estimates_gradient_is_that_of_the_divergence(estimator, sampler):
    _, slopes = expected(lambda c: unbiased_kl(c, float64(sampler), float64(REFERENCE), estimator), sampler)
    assert slopes == pytest.approx(OF_THE_KL, abs=1e-8)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_k1_and_k3_estimate_the_divergence_itself(estimator):
    value, _ = expected(lambda c: unbiased_kl(c, float64(BEHAVIOR), float64(REFERENCE), estimator), BEHAVIOR)
    assert value == pytest.approx(divergence(ON_POLICY, REFERENCE), abs=1e-12)


TURNED_ROUND = gradient(lambda logits: divergence(REFERENCE, log_softmax(list(logits))), LOGITS)


@pytest.mark.parametrize(("estimator", "slopes"), [("k1", [0.0] * 5), ("k2", OF_THE_KL), ("k3", TURNED_ROUND)])
def test_on_policy_k1_has_no_gradient_and_k3_that_of_the_reverse_divergence(estimator, slopes):
    value, found = expected(lambda c: kl_estimate(c - float64(REFERENCE), estimator), ON_POLICY)
    assert found == pytest.approx(slopes, abs=1e-8)
    assert estimator == "k2" or value == pytest.approx(divergence(ON_POLICY, REFERENCE))


def test_the_samplers_divergence_is_estimated_without_bias():
    mean, _ = expected(lambda c: divergence_from_sampler(c.detach() - float64(BEHAVIOR)) + 0 * c, BEHAVIOR)
    assert mean == pytest.approx(divergence(BEHAVIOR, ON_POLICY))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_penalty_draws_the_policy_back_from_either_side(estimator):
    """Its gradient never has the wrong sign, however far; beyond e^-20, k3's is gone."""
    far = [-1e4, -30.0, -19.0, -0.5, 0.5, 19.0, 30.0, 1e4]
    d = float64(far).requires_grad_()
    (slopes,) = torch.autograd.grad(kl_estimate(d, estimator).sum(), d)
    assert (slopes * d >= 0).all()
    assert slopes[2:].all()

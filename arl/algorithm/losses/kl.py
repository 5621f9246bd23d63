"""Divergence of policies, estimated from the tokens that were sampled ("Approximating KL divergence", Schulman 2020).

d = c - ref, current minus reference logprob of a token that was sampled from pi = exp(c). At a context, over such
tokens, and with c differentiated:

    estimator            expectation     expected gradient
    k1 = d               KL(pi || ref)   0: E[grad c] = 0, so as a loss it teaches nothing
    k2 = d^2 / 2         not KL          that of KL(pi || ref), as E[d grad c]
    k3 = exp(-d) - 1 + d KL(pi || ref)   that of KL(ref || pi), as E[(1 - exp(-d)) grad c]
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from arl.algorithm.losses.ratios import MAX_LOG_RATIO, clamped

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(log_ratio: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """k1, k2 or k3 of d = log_ratio, float[M].

    Beyond +-MAX_LOG_RATIO k2 goes on as a straight line, and below -MAX_LOG_RATIO k3 stays where it is.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return F.huber_loss(log_ratio, torch.zeros_like(log_ratio), reduction="none", delta=MAX_LOG_RATIO)
    # d >= 20 needs no bound, as exp(-d) only vanishes, and has to keep the gradient that draws it back.
    d = log_ratio.clamp(min=-MAX_LOG_RATIO)
    return torch.expm1(-d) + d


def unbiased_kl(
    current: torch.Tensor, behavior: torch.Tensor, reference: torch.Tensor, estimator: Estimator
) -> torch.Tensor:
    """An estimate from tokens of the behavior policy whose expected gradient is that of KL(pi || ref), whatever c is.

        exp(c - b) k1,   exp(c - b) k3,   sg(exp(c - b)) k2

    (DeepSeek-V3.2, 2512.02556, section 3.1, with k3). The ratio is to b and not to p, as b is what the tokens were
    drawn from. For k1 and k3 it is differentiated too: sum(exp(b) exp(c - b) k) = sum(pi k) is the divergence itself.
    k2 is not an estimate of it, but its gradient is right without that of the ratio.
    """
    ratio = torch.exp(clamped(current - behavior))
    if estimator == "k2":
        ratio = ratio.detach()
    return ratio * kl_estimate(current - reference, estimator)


def divergence_from_sampler(log_ratio: torch.Tensor) -> torch.Tensor:
    """k3 seen from the other side, for metrics: exp(x) - 1 - x >= 0 with x = log(. / b), whose mean over tokens from b
    estimates KL(b || .), without bias and calmly."""
    x = clamped(log_ratio)
    return torch.expm1(x) - x

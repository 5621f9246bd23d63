"""Losses of pairs and of whole episodes: DPO and KTO, on episodes that the policy has just sampled.

A unit is what has one loss: a pair of episodes, or one episode, with all their trajectories. It lies in one microbatch.
h is the sum of c - reference over trained tokens. Each token carries its unit's whole loss. Under sequence_mean, where
a token weighs 1 / (S n_i), the sum is the mean over units: S counts both episodes of a pair, and so does the sum.

Neither loss is an expectation under the policy: it asks for the same order of the same episodes, whatever sampled them.
So tokens of older versions need no weight (semi-online DPO, 2506.21495).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from arl.algorithm.losses.supervised import share_won
from arl.algorithm.losses.surrogates import ROUNDING, Surrogate
from arl.api.settings.objective import DPOLossConfig, KTOLossConfig
from arl.api.train_engine import PackedTokens


def preference(current: torch.Tensor, tokens: PackedTokens, config: DPOLossConfig | KTOLossConfig) -> Surrogate:
    log_ratio = current - tokens.reference_logprobs
    return dpo(log_ratio, tokens, config) if isinstance(config, DPOLossConfig) else kto(log_ratio, tokens, config)


def dpo(log_ratio: torch.Tensor, tokens: PackedTokens, config: DPOLossConfig) -> Surrogate:
    """Online DPO (OAIF, 2402.04792) of a pair, with h = h_better - h_worse; A is 1 and -1:

        sigmoid (DPO, 2305.18290, eq. 7):   -log sigmoid(beta h)
        ipo (2310.12036, eq. 17):           (h - 1 / (2 beta))^2
        hinge (SLiC, 2305.10425):           max(0, 1 - beta h)

    Clipped: with hinge, pairs without gradient. Metrics, means over pairs: margin (beta h),
    accuracy (share of h > 0; a tie, up to rounding, counts half), chosen_logratio and rejected_logratio (h of each).
    """
    is_better = tokens.advantages > 0
    chosen = of_units(torch.where(is_better, log_ratio, 0), tokens)
    rejected = of_units(torch.where(is_better, 0, log_ratio), tokens)
    h = chosen - rejected
    is_held = torch.zeros_like(is_better)
    if config.link == "ipo":
        loss = (h - 1 / (2 * config.beta)).square()
    elif config.link == "hinge":
        loss = F.relu(1 - config.beta * h)
        is_held = (loss == 0).detach()
    else:
        loss = -F.logsigmoid(config.beta * h)
    metrics = {
        "margin": config.beta * h,
        "accuracy": share_won(torch.where(h.abs() < ROUNDING, 0, h)),
        "chosen_logratio": chosen,
        "rejected_logratio": rejected,
    }
    return Surrogate(loss=loss, is_clipped=is_held, weighted={name: value.detach() for name, value in metrics.items()})


def kto(log_ratio: torch.Tensor, tokens: PackedTokens, config: KTOLossConfig) -> Surrogate:
    """KTO (2402.01306, eq. 8) of an episode, with A = lambda_D or -lambda_U (see LabelsAdvantage.balanced):

        desirable:     lambda_D (1 - sigmoid(beta (h - z0)))
        undesirable:   lambda_U (1 - sigmoid(beta (z0 - h)))

    z0 is in `tokens.values`, without gradient (arl.algorithm.comparisons.reference_points). Nothing is clipped.
    Metrics, means over episodes: reference_point (z0), desirable_logratio and undesirable_logratio (h of each label).
    """
    h, sign = of_units(log_ratio, tokens), tokens.advantages.sign()
    loss = tokens.advantages.abs() * torch.sigmoid(-sign * config.beta * (h - tokens.values))
    shares = {"desirable": (sign > 0) * tokens.loss_weights, "undesirable": (sign < 0) * tokens.loss_weights}
    return Surrogate(
        loss=loss,
        is_clipped=torch.zeros_like(sign).bool(),
        weighted={"reference_point": tokens.values},
        quotients={f"{label}_logratio": (share * h.detach(), share) for label, share in shares.items()},
    )


def of_units(values: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
    """float[M]: for each token the sum of `values` over its unit."""
    # All sizes are M: to read the number of units from a GPU would mean to wait for it.
    return torch.zeros_like(values).index_add(0, tokens.unit_ids, values)[tokens.unit_ids]

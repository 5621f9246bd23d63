"""The weight that makes tokens of the behavior policy count as those of the proximal one, and its corrections."""

from __future__ import annotations

import math

import torch

from arl.algorithm.losses.ratios import Trajectories, clamped
from arl.api.algorithm import CorrectionConfig


def behavior_weight(log_weight: torch.Tensor, trajectories: Trajectories, config: CorrectionConfig) -> torch.Tensor:
    """w float[M], detached, from log_weight = p - b: the weight of decoupled PPO (2110.00641), and what corrects it.

        level: token      w = exp(p - b)
               sequence   w = exp(sum(p - b)), the product over the trajectory's trained tokens
               geometric  w = exp(mean(p - b))
        kind:  none       w
               truncate   min(w, upper)                          truncated importance sampling (IMPALA, 1802.01561)
               mask       w where w <= upper, else 0             masked importance sampling
               icepop     w where lower <= w <= upper, else 0    IcePop (Ring-1T, 2510.18855)
        veto:  0 for a trajectory in which any token has exp(p - b) < veto

    Denominators stay as they are: a token of weight 0 counts in its loss_weights as before.
    """
    log_weight = log_weight.detach()
    weight = torch.exp(clamped(_at_level(log_weight, trajectories, config.level)))
    if config.kind == "truncate":
        weight = weight.clamp(max=config.upper)
    elif config.kind in ("mask", "icepop"):
        lower = config.lower if config.kind == "icepop" else 0.0
        weight = weight * ((weight >= lower) & (weight <= config.upper))
    if config.veto is not None:
        is_low = (log_weight < math.log(config.veto)).to(log_weight.dtype)
        weight = weight * (trajectories.sums(is_low) == 0)
    return weight


def _at_level(log_weight: torch.Tensor, trajectories: Trajectories, level: str) -> torch.Tensor:
    if level == "sequence":
        return trajectories.sums(log_weight)
    return trajectories.means(log_weight) if level == "geometric" else log_weight

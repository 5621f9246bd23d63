"""Losses of trained tokens, as pure functions of one microbatch."""

from arl.algorithm.losses.finetuning import SFTLoss
from arl.algorithm.losses.policy import PolicyLoss

__all__ = ["PolicyLoss", "SFTLoss"]

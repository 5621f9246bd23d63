"""Losses of trained tokens, as pure functions of one microbatch."""

from arl.algorithm.losses.policy import PolicyLoss
from arl.algorithm.losses.supervised import SFTLoss

__all__ = ["PolicyLoss", "SFTLoss"]

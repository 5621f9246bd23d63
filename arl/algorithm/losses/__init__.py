"""Losses of trained tokens, as pure functions of one microbatch."""

from arl.algorithm.losses.reinforcement import PolicyLoss
from arl.algorithm.losses.supervised import SFTLoss

__all__ = ["PolicyLoss", "SFTLoss"]

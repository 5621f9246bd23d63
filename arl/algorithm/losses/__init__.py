"""Losses of trained tokens: pure, picklable functions of one microbatch, which never divide by a count."""

from arl.algorithm.losses.reinforcement import PolicyLoss
from arl.algorithm.losses.supervised import SFTLoss

__all__ = ["PolicyLoss", "SFTLoss"]

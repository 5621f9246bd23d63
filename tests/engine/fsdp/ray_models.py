"""What ranks in other processes are given: losses that fail on one of them, and a model that does not come out even."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from train_models import write_model
from train_sequences import LOSS

from arl.api.engine import PackedTokens, TokenLosses, TokenOutputs


@dataclass(frozen=True)
class RaisingLoss:
    """Raises on one rank; the others go on into the backward pass, and wait there."""

    rank: int

    def __call__(self, outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
        if dist.get_rank() == self.rank:
            raise ValueError("the loss is lost")
        return LOSS(outputs, tokens)


@dataclass(frozen=True)
class KillingLoss:
    """Kills one rank in the middle of a step."""

    rank: int

    def __call__(self, outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
        if dist.get_rank() == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return LOSS(outputs, tokens)


def write_uneven_model(directory: Path) -> Path:
    """A Qwen3 with tensors whose first dimension 3 or 4 ranks cannot share evenly (50), or not at all (2)."""
    return write_model(directory, tied=False, intermediate_size=50, num_key_value_heads=1, head_dim=2)

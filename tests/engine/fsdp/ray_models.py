"""A loss that fails on one of the ranks, which are other processes."""

import os
import signal
import time
from dataclasses import dataclass

import torch.distributed as dist
from train_sequences import LOSS

from arl.api.train_engine import PackedTokens, TokenLosses, TokenOutputs


@dataclass(frozen=True)
class FailingLoss:
    """Raises on one rank, or sends it a signal; the others go on into the backward pass, and wait there."""

    rank: int
    sends: signal.Signals | None = None

    def __call__(self, outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
        if dist.get_rank() != self.rank:
            return LOSS(outputs, tokens)
        if self.sends is not None:
            os.kill(os.getpid(), self.sends)
            time.sleep(60)  # another thread takes the signal, and this one may go on until then
        raise ValueError("the loss is lost")

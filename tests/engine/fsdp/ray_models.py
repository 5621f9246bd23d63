"""What ranks in other processes are given: losses that fail on one of them, and a model that does not come out even."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from train_sequences import LOSS
from transformers import Qwen3Config, Qwen3ForCausalLM

from arl.api.config import OptimizerConfig
from arl.api.engine import PackedTokens, TokenLosses, TokenOutputs
from arl.engine.tiny import tiny_tokenizer

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.1)
BUDGET = 30


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
    tokenizer = tiny_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=2,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory

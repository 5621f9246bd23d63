"""Tiny models on disk, and what transformers by itself says with them."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from arl.api.types import TrainSequence
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.tiny import tiny_tokenizer

MakeEngine = Callable[..., FSDPTrainEngine]


def write_model(
    directory: Path,
    *,
    tied: bool,
    dtype: torch.dtype = torch.float32,
    model_class: Callable[[Qwen3Config], PreTrainedModel] = Qwen3ForCausalLM,
    **sizes: int,
) -> Path:
    """A Qwen3 of two layers and some 30,000 parameters with grouped queries, and a tokenizer. sizes: of its config."""
    tokenizer = tiny_tokenizer()
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = Qwen3Config(vocab_size=len(tokenizer), initializer_range=0.2, tie_word_embeddings=tied, **(shape | sizes))
    torch.manual_seed(0)
    model_class(config).to(dtype).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def write_experts(directory: Path) -> Path:
    """A Qwen3 with four experts in each layer, which its files hold apart and transformers fuses."""
    tokenizer = tiny_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def load_twin(directory: Path) -> PreTrainedModel:
    """The model as transformers runs it by itself, with attention in plain operations."""
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()


def write_critic(directory: Path) -> Path:
    """A Qwen3 with a head of one label, which no one asks for the score of a padded text."""
    return write_model(directory, tied=False, model_class=Qwen3ForSequenceClassification, num_labels=1)


def load_critic(directory: Path) -> PreTrainedModel:
    """The model as transformers runs it by itself, with attention in plain operations."""
    return AutoModelForSequenceClassification.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    ).eval()


def score_of(model: PreTrainedModel) -> nn.Linear:
    return cast("nn.Linear", model.score)


@torch.no_grad()
def slow_values(model: PreTrainedModel, sequence: TrainSequence) -> torch.Tensor:
    """One forward pass of the model as it is for each trained token, over the tokens before it alone."""
    values = torch.zeros(len(sequence))
    for place in sequence.loss_mask.nonzero()[:, 0].tolist():
        values[place] = model(input_ids=sequence.token_ids[None, :place]).logits[0, 0]
    return values

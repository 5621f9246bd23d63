"""Tiny models on disk, and how transformers runs them by itself."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

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

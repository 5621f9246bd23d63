"""Tiny models on disk, and how transformers runs them by itself."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.tiny import tiny_tokenizer

MakeEngine = Callable[..., FSDPTrainEngine]


def write_model(directory: Path, *, tied: bool, dtype: torch.dtype = torch.float32, head_dim: int = 8) -> Path:
    """A Qwen3 of two layers and some 30,000 parameters with grouped queries, and a tokenizer."""
    tokenizer = tiny_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def load_twin(directory: Path) -> PreTrainedModel:
    """The model as transformers runs it by itself, with attention in plain operations."""
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()

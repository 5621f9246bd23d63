"""The short way through a decoder is taken where it leads to the same place, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_qwen import build_model, build_tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, GraniteConfig

from arl.engine.local.runner import ModelRunner, quicken_norms
from arl.engine.local.running_batch import Batch


def test_qwen3_takes_the_short_way(make_batch: Callable[..., Batch]) -> None:
    assert make_batch()._runner._stack is not None


def test_a_model_that_scales_its_embeddings_does_not(tmp_path: Any) -> None:
    config = GraniteConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        embedding_multiplier=3.0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    runner = ModelRunner(str(tmp_path), device="cpu", dtype="float32", max_rows=2, context_length=64)
    assert runner._stack is None


def test_quick_norms_equal_the_models_own_to_rounding() -> None:
    plain, quick = build_model(3), build_model(3)
    quicken_norms(quick)
    norms = [
        (own, new)
        for own, new in zip(plain.modules(), quick.modules(), strict=True)
        if hasattr(own, "variance_epsilon")
    ]
    assert len(norms) == 9
    for own, new in norms:
        nn.init.normal_(own.weight)
        new.weight.data.copy_(own.weight)
        assert "forward" in vars(new)
        for scale in (0.0, 1e-5, 1.0, 1e4):
            x = scale * torch.randn(3, 5, own.weight.shape[0])
            torch.testing.assert_close(new(x), own(x), rtol=1e-5, atol=1e-6)


class ShiftedRMSNorm(nn.Module):
    """As Gemma has it: scales by 1 + weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * (1 + self.weight)


@pytest.mark.parametrize("norm", [ShiftedRMSNorm(), build_model(0).to(torch.bfloat16).model.norm])
@torch.no_grad()
def test_norms_that_would_change_keep_their_own_forward(norm: nn.Module) -> None:
    quicken_norms(nn.ModuleList([norm]))
    x = torch.randn(2, norm.weight.shape[0], dtype=norm.weight.dtype)
    assert torch.equal(norm(x), type(norm).forward(norm, x))

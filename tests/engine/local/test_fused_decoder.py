"""The common decoder in few operations computes what the model's own code computes, and takes over new parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_qwen import (
    SIZES,
    Reference,
    build_model,
    make_batch_of,
    make_job,
    prompt_of,
    random_model,
    run_all,
    save,
    with_random_vectors,
)
from torch import nn
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from arl.engine.local.fused_decoder import _Norm
from arl.engine.local.runner import ModelRunner


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SIZES, head_dim=16),
        Qwen3Config(**SIZES, head_dim=16, attention_bias=True, tie_word_embeddings=True),
        Qwen2Config(**SIZES),
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
        MistralConfig(**SIZES, sliding_window=None),
    ],
    ids=lambda config: type(config).__name__,
)
def test_each_family_is_computed_as_its_own_code_does_before_and_after_new_weights(tmp_path: Path, config: Any) -> None:
    references = [Reference(with_random_vectors(random_model(config), seed)) for seed in range(2)]
    batch = make_batch_of(save(references[0].model, tmp_path), max_rows=4, prefill_tokens=20)
    assert batch._runner._fused is not None
    for reference in references:
        batch.load(reference.model.state_dict(), "0")
        jobs = [make_job(prompt_of(length, length)) for length in (1, 2, 3, 15, 40)]
        run_all(batch, jobs)
        for job in jobs:
            reference.check(job)


def test_a_model_in_bfloat16_is_computed_in_few_operations_too(tmp_path: Path) -> None:
    save(with_random_vectors(build_model(0), 0), tmp_path)
    runner = ModelRunner(str(tmp_path), device="cpu", dtype="bfloat16", max_rows=4, context_length=64)
    assert runner._fused is not None


@torch.no_grad()
def test_norms_equal_the_models_own_to_rounding_at_every_scale() -> None:
    modules = [Qwen3RMSNorm(16, eps=1e-6) for _ in range(2)]
    for module in modules:
        nn.init.normal_(module.weight)
    norm = _Norm(modules[0], modules[0], modules[1])
    for scale in (0.0, 1e-5, 1.0, 1e4):
        x = scale * torch.randn(5, 3, 16)
        wanted = torch.cat([modules[0](x[:, :2]), modules[1](x[:, 2:])], 1)
        torch.testing.assert_close(norm(x), wanted, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_norms_in_bfloat16_are_the_models_own() -> None:
    modules = [Qwen3RMSNorm(16, eps=1e-6).bfloat16() for _ in range(2)]
    x = torch.randn(5, 3, 16).bfloat16()
    wanted = torch.cat([modules[0](x[:, :2]), modules[1](x[:, 2:])], 1)
    assert torch.equal(_Norm(modules[0], modules[0], modules[1])(x), wanted)

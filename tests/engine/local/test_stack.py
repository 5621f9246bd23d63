"""The short way through a decoder is taken where it leads to the same place, and nowhere else."""

from pathlib import Path

import pytest
import torch
from tiny_qwen import SIZES, build_model, make_batch_of, random_model, save
from torch import nn
from transformers import GraniteConfig

from arl.engine.local.runner import quicken_norms


def test_a_model_that_scales_its_embeddings_takes_the_long_way(tmp_path: Path) -> None:
    model = random_model(GraniteConfig(**SIZES, embedding_multiplier=3.0))
    assert make_batch_of(save(model, tmp_path))._runner._stack is None


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

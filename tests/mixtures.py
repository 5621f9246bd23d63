"""Tiny mixtures of experts, and a slow twin of their layers that computes one token by one expert after another."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from arl.api.routed_experts import Routes
from arl.engine.tiny import TinyShape, tiny_model, tiny_tokenizer

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")
SHAPE = TinyShape(
    hidden_size=32, intermediate_size=64, num_layers=3, num_heads=2, num_kv_heads=2, head_dim=16, context_length=1024,
    initializer_range=0.3,
)  # fmt: skip
FIRST_MIXTURE = {"qwen3_moe": 0, "mixtral": 0, "deepseek_v2": 1, "deepseek_v3": 1}
"""The first layer with experts."""


def write_mixture(directory: Path, family: Any, seed: int = 0) -> Path:
    """Its router biases are large and differ, as they are zeros at first."""
    model = tiny_model(tiny_tokenizer(), SHAPE, seed, family)
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def load_mixture(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()


def random_routes(num_tokens: int, seed: int, family: str = "qwen3_moe") -> Routes:
    """Other experts than any router chooses; those of one token differ."""
    generator = np.random.default_rng(seed)
    experts = generator.permuted(np.tile(np.arange(8, dtype=np.uint8), (num_tokens, SHAPE.num_layers, 1)), axis=2)
    experts = np.ascontiguousarray(experts[:, :, :2])
    experts[:, : FIRST_MIXTURE[family]] = 0
    return Routes.of(experts)


def own_routes(model: Any, token_ids: torch.Tensor) -> Routes:
    """Those that the model's own routers choose for a sequence."""
    experts = np.zeros((len(token_ids), SHAPE.num_layers, 2), np.uint8)
    handles = []
    for index, block in mixtures_of(model):

        def note(module: Any, given: Any, output: Any, index: int = index) -> None:
            experts[:, index] = output[2].numpy()

        handles.append(block.gate.register_forward_hook(note))
    with torch.no_grad():
        model(input_ids=token_ids[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return Routes.of(experts)


def mixtures_of(model: Any) -> list[tuple[int, Any]]:
    """(layer, its block of experts)"""
    return [(i, layer.mlp) for i, layer in enumerate(model.get_decoder().layers) if hasattr(layer.mlp, "gate")]


def slowed(model: Any, routes: Routes) -> Any:
    """The model with layers that compute each token by the given experts, in a loop; all routes are known."""
    for index, block in mixtures_of(model):
        block.forward = SlowMixture(block, model.config, routes.experts[:, index]).forward
    return model


class SlowMixture:
    """w_e = softmax(x W^T)_e, or sigmoid, normalised over the token's experts where the family does so."""

    def __init__(self, block: Any, config: Any, experts: np.ndarray) -> None:
        self.block, self.config, self.experts = block, config, experts

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.flatten(0, 1)
        outputs = [self.of_token(x, chosen) for x, chosen in zip(rows, self.experts.tolist(), strict=False)]
        mixed = torch.stack(outputs).view_as(hidden)
        shared = getattr(self.block, "shared_experts", None)
        return mixed if shared is None else mixed + shared(hidden)

    def of_token(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        scores = self.block.gate.weight @ x
        kind = self.config.model_type
        scores = scores.sigmoid() if kind == "deepseek_v3" else scores.softmax(0)
        weights = torch.stack([scores[expert] for expert in chosen])
        if kind != "deepseek_v2":
            weights = weights / weights.sum()
        if kind.startswith("deepseek"):
            weights = weights * self.config.routed_scaling_factor
        total = torch.zeros_like(x)
        for expert, weight in zip(chosen, weights, strict=True):
            total = total + weight * self.of_expert(x, expert)
        return total

    def of_expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        gate, up = (self.block.experts.gate_up_proj[expert] @ x).chunk(2)
        return self.block.experts.down_proj[expert] @ (nn.functional.silu(gate) * up)

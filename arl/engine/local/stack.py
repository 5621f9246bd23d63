"""A shorter way through a Hugging Face decoder: its own layers, called one after another.

`model(...)` spends a quarter of a millisecond around the layers on defaults, masks, output records and rotary tables:
a fifth of a small model's step. The layers, which do the work, are the model's own in either case.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from arl.engine.local.slot_attention import SlotBatch

_FIXED_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend on the position alone, and not on how long the sequences are."""


class DecoderStack:
    """Embedding, layers and norm of the common decoder (Llama, Qwen2, Qwen3, Mistral, ...), and the model's head.

    Raises AttributeError if the model is not built so. That it computes what the model does is for the caller to try.
    """

    def __init__(self, model: Any, head: nn.Module, context_length: int) -> None:
        base = model.get_decoder()
        self._embed, self._layers, self._norm = base.embed_tokens, list(base.layers), base.norm
        self.head = head
        self._rotary = base.rotary_emb
        device = self._embed.weight.device
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None
        if self._rotary.rope_type in _FIXED_ROPES:
            states = torch.empty((), dtype=self._embed.weight.dtype, device=device)
            cos, sin = self._rotary(states, torch.arange(context_length, device=device)[None])
            self._table = cos[0], sin[0]

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None, batch: SlotBatch
    ) -> torch.Tensor:
        """token_ids and positions int64[1, N]; what `head` takes, [len(keep), hidden], at `keep`, or at all N."""
        states = self._embed(token_ids)
        if self._table is not None:
            rotary = (self._table[0][positions], self._table[1][positions])
        else:
            rotary = self._rotary(states, positions)
        for layer in self._layers:
            states = layer(
                states,
                attention_mask=None,
                position_ids=positions,
                past_key_values=None,
                use_cache=False,
                position_embeddings=rotary,
                slot_batch=batch,
            )
        if keep is not None:
            states = states[:, keep]
        return self._norm(states)[0]


def quicken_norms(model: nn.Module) -> None:
    """Give float32 RMSNorms a forward of five kernels in place of eight; those that it would change keep their own."""
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", None)
        weight = getattr(module, "weight", None)
        if type(module).__name__.endswith("RMSNorm") and eps is not None and weight is not None:
            own = module.forward
            module.forward = _quick_norm(module, weight.shape[0], eps)
            if weight.dtype != torch.float32 or not _agree(own, module.forward, weight):
                module.forward = own


def _quick_norm(module: Any, size: int, eps: float) -> Any:
    """x * w / sqrt(mean(x^2) + eps), with sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(size * eps)) / sqrt(size)."""
    floor = torch.tensor(math.sqrt(size * eps), device=module.weight.device)
    scale = 1 / math.sqrt(size)

    def forward(x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.mul(x, module.weight).div_(torch.hypot(length, floor).mul_(scale))

    return forward


def _agree(own: Any, quick: Any, weight: torch.Tensor) -> bool:
    scales = torch.tensor([[1e-4], [1.0], [1e3]], device=weight.device)
    x = scales * torch.linspace(-1, 2, weight.shape[0], device=weight.device)
    return torch.allclose(own(x), quick(x), rtol=1e-5, atol=1e-7)

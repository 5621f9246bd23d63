"""The common decoder (Llama, Mistral, Qwen2, Qwen3, those that see) in few operations, for steps so small that their
number counts.

It computes what the model's own code computes, to rounding, from the same parameters. One product makes the queries,
keys and values of a layer, one norm serves queries and keys, and each sum with the residual is part of a product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from arl.engine.local.adapters import LoadedAdapters
from arl.engine.local.slot_attention import SlotBatch, attend
from arl.engine.local.vision import ShownImages

_LAYERS = (
    "LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer",
    "Qwen2VLDecoderLayer", "Qwen2_5_VLDecoderLayer", "Qwen3VLTextDecoderLayer",
)  # fmt: skip
_FIXED_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend only on the position, and not on the sequences' lengths."""


class FusedDecoder:
    """Raises ValueError for another decoder. The caller must compare its results with the model's.

    The parameters that one product uses become parts of one tensor. Call `refresh` after a change of parameters.
    """

    def __init__(self, model: Any, adapters: LoadedAdapters, context_length: int) -> None:
        base = model.get_decoder()
        if {type(layer).__name__ for layer in getattr(base, "layers", ())} - set(_LAYERS):
            raise ValueError(f"{type(base).__name__} has other layers than {', '.join(_LAYERS)}")
        if base.rotary_emb.rope_type not in _FIXED_ROPES:
            raise ValueError(f"the rotary embedding {base.rotary_emb.rope_type} is not a function of the position")
        self._embed = base.embed_tokens
        names = {module: name for name, module in model.named_modules()}
        self._layers = [_Layer(layer, index, names, adapters) for index, layer in enumerate(base.layers)]
        self._norm = _Norm(base.norm)
        like = torch.empty((), dtype=self._embed.weight.dtype, device=self._embed.weight.device)
        self._axes: torch.Tensor | None = None
        """int64[head dim]: which of time, row and column turns each column, in a model that knows these."""
        if getattr(base.rotary_emb, "mrope_section", None) is not None:
            one_axis = torch.eye(3, dtype=torch.int64, device=like.device)[:, :, None]
            self._axes = base.rotary_emb(like, one_axis)[1][:, 0].abs().argmax(0)
        places = torch.arange(context_length, device=like.device)[None]
        cos, sin = base.rotary_emb(like, places if self._axes is None else places.expand(3, 1, -1))
        first, second = sin[0].chunk(2, -1)
        self._cos, self._sin = cos[0][:, None], torch.cat([-first, second], -1)[:, None]
        if cos.shape[-1] != base.layers[0].self_attn.head_dim:
            raise ValueError("the rotary embedding turns a part of each head only")

    def refresh(self) -> None:
        """Take over what parameters have become."""
        for norm in (self._norm, *(norm for layer in self._layers for norm in layer.norms)):
            norm.refresh()

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, batch: SlotBatch, shown: ShownImages | None = None
    ) -> torch.Tensor:
        """The last layer's output [N, hidden] for token_ids int64[N], to be passed to `final`.

        positions: int64[N], or [3, N] for a model with multimodal rotary positions. shown: at the placeholders.
        """
        states = F.embedding(token_ids, self._embed.weight)
        if shown is not None:
            states[shown.places] = shown.vectors[0]
        rotary = self._turned(self._cos, positions), self._turned(self._sin, positions)
        for number, layer in enumerate(self._layers, 1):
            states = layer(states, rotary, batch)
            if shown is not None and number < len(shown.vectors):
                states[shown.places] += shown.vectors[number]
        return states

    def _turned(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The rows [N, 1, head dim] of a table; of each column the one that its axis names."""
        if positions.dim() == 1 or self._axes is None:
            return table[positions]
        return table[:, 0].gather(0, positions[self._axes].T)[:, None]

    def final(self, states: torch.Tensor) -> torch.Tensor:
        """The states that the model's head takes."""
        return self._norm(states)


class _Layer:
    def __init__(self, layer: Any, index: int, names: dict[nn.Module, str], adapters: LoadedAdapters) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._index, self._scaling, self._head_dim = index, attention.scaling, attention.head_dim
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        self._qkv = _Product([q, k, v], names, adapters)
        self._out = _Product([attention.o_proj], names, adapters)
        self._gate_up = _Product([mlp.gate_proj, mlp.up_proj], names, adapters)
        self._down = _Product([mlp.down_proj], names, adapters)
        self._act = mlp.act_fn
        self._before, self._after = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self.norms = [self._before, self._after]
        self._num_heads, num_kv_heads = (x.out_features // self._head_dim for x in (q, k))
        self._num_turned = self._num_heads + num_kv_heads
        self._heads_norm: _Norm | None = None
        if getattr(attention, "q_norm", None) is not None:
            self._heads_norm = _Norm(*[attention.q_norm] * self._num_heads, *[attention.k_norm] * num_kv_heads)
            self.norms.append(self._heads_norm)

    def __call__(
        self, states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], batch: SlotBatch
    ) -> torch.Tensor:
        heads = self._qkv(self._before(states)).view(len(states), -1, self._head_dim)
        turned = heads[:, : self._num_turned]
        if self._heads_norm is not None:
            self._heads_norm(turned, out=turned)
        cos, sin = rotary
        other = turned.roll(self._head_dim // 2, -1)
        turned.mul_(cos).addcmul_(other, sin)
        seen = attend(self._index, heads[:, : self._num_heads], heads[:, self._num_heads :], batch, self._scaling)
        states = self._out(seen, add_to=states)
        gate, up = self._gate_up(self._after(states)).chunk(2, -1)
        return self._down(self._act(gate).mul_(up), add_to=states)


class _Product:
    """Linear layers of one input, side by side in one tensor: the layers' parameters become its parts."""

    def __init__(self, linears: Sequence[nn.Linear], names: dict[nn.Module, str], adapters: LoadedAdapters) -> None:
        if any(type(linear) is not nn.Linear for linear in linears):
            raise ValueError("a layer's product is no plain linear layer")
        self._weight = _side_by_side([linear.weight for linear in linears])
        self._bias = None
        if linears[0].bias is not None:
            self._bias = _side_by_side([linear.bias for linear in linears])
        sizes = [linear.out_features for linear in linears]
        ends = torch.tensor(sizes).cumsum(0).tolist()
        self._parts = [
            (names[linear], slice(end - size, end)) for linear, size, end in zip(linears, sizes, ends, strict=True)
        ]
        self._transposed = self._weight.t()
        self._adapters = adapters

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """The product of x [N, in], added to `add_to` [N, out] if given."""
        if add_to is None:
            y = F.linear(x, self._weight, self._bias)
        else:
            y = torch.addmm(add_to, x, self._transposed)
            if self._bias is not None:
                y += self._bias
        if self._adapters.is_used:
            for name, part in self._parts:
                self._adapters.update(name, x, y[:, part])
        return y


def _side_by_side(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parameters) == 1:
        return parameters[0].data
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole


class _Norm:
    """RMSNorm in float32 as x * w * sqrt(n) / hypot(|x|, sqrt(n * eps)): four kernels instead of eight.

    Several modules norm the vectors of one dimension, each its own. In other dtypes the module itself computes.
    """

    def __init__(self, *modules: Any) -> None:
        self._modules = modules
        weight = modules[0].weight
        self._size = weight.shape[0]
        self._is_quick = weight.dtype == torch.float32
        self._floor = torch.tensor(math.sqrt(self._size * modules[0].variance_epsilon), device=weight.device)
        self.refresh()

    def refresh(self) -> None:
        weights = [module.weight.detach() for module in self._modules]
        self._weight = (weights[0] if len(weights) == 1 else torch.stack(weights)) * math.sqrt(self._size)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if not self._is_quick:
            return self._slow(x) if out is None else out.copy_(self._slow(x))
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.mul(x, self._weight, out=out).div_(torch.hypot(length, self._floor))

    def _slow(self, x: torch.Tensor) -> torch.Tensor:
        if len(self._modules) == 1:
            return self._modules[0](x)
        counts = {module: self._modules.count(module) for module in self._modules}
        parts = x.split(list(counts.values()), 1)
        return torch.cat([module(part) for module, part in zip(counts, parts, strict=True)], 1)

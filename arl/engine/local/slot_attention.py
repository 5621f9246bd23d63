"""Attention over slot caches, as a function registered with transformers: the models' own code stays as it is.

A forward pass takes all tokens of a step as one sequence [1, tokens]: first one token for each decoding sequence
(cache rows 0, 1, ...), then the chunks of prompts. Linear layers see them together; here they part again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from arl.api.errors import ModelError
from arl.engine.local.slot_cache import SlotCache

SLOT_ATTENTION = "arl_slot_attention"
"""The name under which transformers knows the function."""

_BLOCK_ROWS = 16
"""Rows that are taken together, at least, when a batch is split by length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens of one prompt that a step computes: positions start..start+length-1 of cache row `row`."""

    row: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """Decoding rows first..last-1, which attend to `context` positions together.

    bias: [rows * kv heads, 1, context], 0 or -inf; None where all are of the same length.
    """

    first: int
    last: int
    context: int
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotBatch:
    """Where the tokens of one step belong.

    rows: int64[D], 0..D-1, and positions: int64[D], of the D decoding sequences; segments cover them in order.
    masks: for each chunk its bias [length, start + length], 0 or -inf; None where it begins its prompt.
    """

    cache: SlotCache
    rows: torch.Tensor
    positions: torch.Tensor
    segments: Sequence[Segment]
    chunks: Sequence[Chunk]
    masks: Sequence[torch.Tensor | None]

    @classmethod
    def of(cls, cache: SlotCache, rows: torch.Tensor, positions: Sequence[int], chunks: Sequence[Chunk]) -> SlotBatch:
        """A batch that decodes at `positions` of the first rows, and computes `chunks`."""
        places = torch.tensor(positions, dtype=torch.int64, device=rows.device)
        segments = [
            Segment(first=first, last=last, context=context, bias=_bias(cache, places, positions, first, last, context))
            for first, last, context in _split(positions)
        ]
        return cls(
            cache=cache,
            rows=rows[: len(positions)],
            positions=places,
            segments=segments,
            chunks=chunks,
            masks=[_causal_bias(cache, chunk, rows.device) if chunk.start else None for chunk in chunks],
        )


def _split(positions: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first row, end, context) of runs of blocks whose contexts are within a factor of two.

    All rows of a segment read as much of the cache as its longest: a long one must not make all others as slow.
    """
    segments: list[tuple[int, int, int]] = []
    for first in range(0, len(positions), _BLOCK_ROWS):
        block = positions[first : first + _BLOCK_ROWS]
        context = max(block) + 1
        last = first + len(block)
        if segments:
            start, _, before = segments[-1]
            if max(before, context) <= 2 * min(before, context):
                segments[-1] = (start, last, max(before, context))
                continue
        segments.append((first, last, context))
    return segments


def _bias(
    cache: SlotCache, places: torch.Tensor, positions: Sequence[int], first: int, last: int, context: int
) -> torch.Tensor | None:
    if min(positions[first:last]) + 1 == context:
        return None
    visible = torch.arange(context, device=places.device) <= places[first:last, None]
    bias = torch.zeros((), dtype=cache.shape.dtype, device=places.device).where(visible, float("-inf"))
    return bias.repeat_interleave(cache.shape.num_kv_heads, 0)[:, None]


def _causal_bias(cache: SlotCache, chunk: Chunk, device: torch.device) -> torch.Tensor:
    size = (chunk.length, chunk.start + chunk.length)
    return torch.full(size, float("-inf"), dtype=cache.shape.dtype, device=device).triu(chunk.start + 1)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    slot_batch: SlotBatch | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Write the step's keys and values into the cache and attend to it.

    query [1, heads, N, d], key and value [1, kv heads, N, d]; returns [1, N, heads, d]. Called by the model's layers.
    """
    if slot_batch is None:
        raise ModelError("the model does not pass keyword arguments to its attention; the embedded server needs that")
    _refuse_unknown(options, slot_batch)
    layer: Any = module.layer_idx
    num_decoding = len(slot_batch.rows)
    if not slot_batch.chunks:
        return _decode(layer, query[0], key[0], value[0], slot_batch, scaling).unsqueeze(0), None
    keys, values = slot_batch.cache.keys[layer], slot_batch.cache.values[layer]
    outputs = []
    if num_decoding:
        q, k, v = (x[0, :, :num_decoding] for x in (query, key, value))
        outputs.append(_decode(layer, q, k, v, slot_batch, scaling))
    start = num_decoding
    for chunk, mask in zip(slot_batch.chunks, slot_batch.masks, strict=True):
        q, k, v = (x[:, :, start : start + chunk.length] for x in (query, key, value))
        outputs.append(_prefill(q, k, v, keys[chunk.row], values[chunk.row], chunk, mask, scaling))
        start += chunk.length
    return torch.cat(outputs).unsqueeze(0), None


def _refuse_unknown(options: dict[str, Any], batch: SlotBatch) -> None:
    window = options.get("sliding_window")
    if window is not None and window < batch.cache.max_length:
        raise ModelError(
            f"the model attends to a sliding window of {window} tokens, which the embedded server does not know; "
            f"set context_length to at most {window}"
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ModelError(f"the model's attention uses {name}, which the embedded server does not know")


def _decode(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: SlotBatch, scaling: float
) -> torch.Tensor:
    """One token of each decoding sequence: query [heads, D, d], key and value [kv heads, D, d] -> [D, heads, d].

    The query heads that share a kv head become rows of one small matrix, so that keys are never repeated.
    """
    keys, values = batch.cache.keys[layer], batch.cache.values[layer]
    keys[batch.rows, :, batch.positions] = key.transpose(0, 1)
    values[batch.rows, :, batch.positions] = value.transpose(0, 1)
    num_heads, num_rows, head_dim = query.shape
    group = num_heads // key.shape[0]
    query = query.transpose(0, 1).reshape(-1, group, head_dim)
    if len(batch.segments) == 1:
        output = _attend(query, keys, values, batch.segments[0], scaling)
    else:
        per_row = key.shape[0]
        parts = [_attend(query[s.first * per_row : s.last * per_row], keys, values, s, scaling) for s in batch.segments]
        output = torch.cat(parts)
    return output.view(num_rows, num_heads, head_dim)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, segment: Segment, scaling: float
) -> torch.Tensor:
    """query [M, group, d] of the segment's M = rows * kv heads; keys and values of the whole layer."""
    k = keys[segment.first : segment.last, :, : segment.context].flatten(0, 1)
    v = values[segment.first : segment.last, :, : segment.context].flatten(0, 1)
    if segment.bias is None:
        scores = torch.bmm(query * scaling, k.transpose(1, 2))
    else:
        scores = torch.baddbmm(segment.bias, query, k.transpose(1, 2), alpha=scaling)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return torch.bmm(weights, v)


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chunk: Chunk,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """A chunk of one prompt: query [1, heads, T, d], key and value [1, kv heads, T, d] -> [T, heads, d].

    keys and values: the sequence's cache row in this layer, [kv heads, capacity, d].
    """
    end = chunk.start + chunk.length
    keys[:, chunk.start : end] = key[0]
    values[:, chunk.start : end] = value[0]
    output = F.scaled_dot_product_attention(
        query,
        keys[None, :, :end],
        values[None, :, :end],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[0].transpose(0, 1)


AttentionInterface.register(SLOT_ATTENTION, slot_attention)


# A shorter way through a Hugging Face decoder: its own layers, called one after another.


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

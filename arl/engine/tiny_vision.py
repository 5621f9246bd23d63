"""Tiny models that see: Qwen2-VL, Qwen2.5-VL and Qwen3-VL, built on the spot as in tiny.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from arl.engine.tiny import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, TinyShape, tiny_tokenizer, write_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"

_CONTENT = """\
{%- macro shown(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}
        {%- for part in content or [] %}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}{{- part.text }}{% endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
"""
VISION_TEMPLATE = _CONTENT + CHAT_TEMPLATE.replace("messages[0].content }}", "shown(messages[0].content) }}").replace(
    "+ message.content +", "+ shown(message.content) +"
).replace("(message.content or '')", "shown(message.content)")
"""Qwen's chat format, in which a message's content may be a list of parts: texts and images."""

VisionFamily = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyVision:
    """The size of a tiny vision tower, and of the images that it sees."""

    hidden_size: int = 64
    intermediate_size: int = 128
    depth: int = 2
    num_heads: int = 2
    patch_size: int = 8
    """Two by two neighbouring patches become one placeholder. In pixels."""
    min_pixels: int = 16 * 16
    max_pixels: int = 128 * 128
    """Larger images are scaled down to this many pixels."""


def tiny_vision_tokenizer(phrases: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """tiny_tokenizer with the tags around images, and a template that shows them."""
    tokenizer = tiny_tokenizer(phrases)
    tags: list[Any] = [VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD]
    tokenizer.add_special_tokens({"additional_special_tokens": tags})
    tokenizer.chat_template = VISION_TEMPLATE
    return tokenizer


def tiny_vision_model(
    tokenizer: PreTrainedTokenizerBase,
    shape: TinyShape | None = None,
    vision: TinyVision | None = None,
    seed: int = 0,
    family: VisionFamily = "qwen2_5_vl",
) -> PreTrainedModel:
    """A freshly initialised model for the tokenizer's vocabulary, float32, the same for a seed."""
    shape, vision, vocabulary = shape or TinyShape(), vision or TinyVision(), tokenizer.get_vocab()
    config = AutoConfig.for_model(
        family,
        text_config=_text_config(shape, tokenizer, family),
        vision_config=_vision_config(shape, vision, family),
        tie_word_embeddings=True,
        image_token_id=vocabulary[IMAGE_PAD],
        video_token_id=vocabulary[VIDEO_PAD],
        vision_start_token_id=vocabulary[VISION_START],
        vision_end_token_id=vocabulary[VISION_END],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForImageTextToText.from_config(config).float()


def _text_config(shape: TinyShape, tokenizer: PreTrainedTokenizerBase, family: VisionFamily) -> dict[str, Any]:
    vocabulary, half = tokenizer.get_vocab(), shape.head_dim // 2
    rows = 3 * half // 8
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta, "mrope_section": [half - 2 * rows, rows, rows]}
    of_family = {"head_dim": shape.head_dim} if family == "qwen3_vl" else {}
    return {
        "vocab_size": -(-len(tokenizer) // 32) * 32,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": shape.context_length,
        "initializer_range": shape.initializer_range,
        "rms_norm_eps": 1e-6,  # as Qwen's, and as the tower's: servers use one number for both
        "rope_parameters": rope | ({"mrope_interleaved": True} if family == "qwen3_vl" else {}),
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": vocabulary[TURN_END],
        "pad_token_id": vocabulary[END_OF_TEXT],
        **of_family,
    }


def _vision_config(shape: TinyShape, vision: TinyVision, family: VisionFamily) -> dict[str, Any]:
    side = int(vision.max_pixels**0.5) // vision.patch_size
    common: dict[str, Any] = {
        "depth": vision.depth,
        "num_heads": vision.num_heads,
        "patch_size": vision.patch_size,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": shape.initializer_range,
    }
    if family == "qwen2_vl":
        ratio = max(1, round(vision.intermediate_size / vision.hidden_size))  # transformers takes whole numbers
        return common | {"embed_dim": vision.hidden_size, "hidden_size": shape.hidden_size, "mlp_ratio": ratio}
    of_family: dict[str, dict[str, Any]] = {
        "qwen2_5_vl": {"window_size": 8 * vision.patch_size, "fullatt_block_indexes": [vision.depth - 1]},
        "qwen3_vl": {"num_position_embeddings": side**2, "deepstack_visual_indexes": list(range(vision.depth - 1))},
    }
    sizes = {"hidden_size": vision.hidden_size, "intermediate_size": vision.intermediate_size}
    return common | sizes | {"out_hidden_size": shape.hidden_size} | of_family[family]


def write_tiny_vision_model(
    directory: Path,
    phrases: Iterable[str] = (),
    shape: TinyShape | None = None,
    vision: TinyVision | None = None,
    seed: int = 0,
    family: VisionFamily = "qwen2_5_vl",
) -> Path:
    """Write a tiny model with tokenizer and image processor as a Hugging Face directory; whole or not at all."""
    from transformers import Qwen2VLImageProcessorPil

    sizes = vision or TinyVision()
    tokenizer = tiny_vision_tokenizer(phrases)
    processor = Qwen2VLImageProcessorPil(
        patch_size=sizes.patch_size, size={"shortest_edge": sizes.min_pixels, "longest_edge": sizes.max_pixels}
    )
    return write_model(directory, tiny_vision_model(tokenizer, shape, sizes, seed, family), tokenizer, processor)

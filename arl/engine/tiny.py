"""Tiny models and tokenizers, built on the spot: for tests, examples and benchmarks that download nothing.

The tokenizer has a token for each byte, for each tag of Qwen's chat format, and for each phrase that it is given. So it
encodes any text, copies numbers digit by digit, and spends few tokens on boilerplate.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.utils import logging

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
ROLES = ("system\n", "user\n", "assistant\n")

CHAT_TEMPLATE = """\
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{% endif %}
    {%- if tools %}
        {{- '\\n# Tools\\nThese functions may be called:\\n<tools>' }}
        {%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}
        {{- '\\n</tools>\\nA call is a JSON object with the function\\'s name and arguments:\\n<tool_call>\\n' }}
        {{- '{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
"""Qwen's chat format (ChatML, Hermes tool calls, tool results within a user turn), without thinking."""


Family = Literal["qwen3", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3"]
"""The model type in config.json. All but the first are mixtures of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyShape:
    """The size of a tiny model. The defaults, 0.6 million parameters as a Qwen3, suit tests and the math agent."""

    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 32
    context_length: int = 1024
    rope_theta: float = 10_000.0
    initializer_range: float = 0.02
    num_experts: int = 8
    """For a mixture of experts: the experts of each layer; each is a fourth as wide as the intermediate size."""
    experts_per_token: int = 2


def tiny_tokenizer(phrases: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a chat template, in which each of `phrases` is one token.

    Encodes and decodes every text without loss. The end-of-turn token is its end-of-sequence token.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in (END_OF_TEXT, TURN_START, TURN_END)]
    )
    known = dict.fromkeys((*TAGS, *ROLES, *phrases))
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in known if len(text) > 1])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(
    tokenizer: PreTrainedTokenizerBase, shape: TinyShape | None = None, seed: int = 0, family: Family = "qwen3"
) -> PreTrainedModel:
    """A freshly initialised model of the given shape for the tokenizer's vocabulary, float32, the same for a seed."""
    shape = shape or TinyShape()
    config = AutoConfig.for_model(
        family,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=family == "qwen3",  # SGLang ties the head of no mixture
        pad_token_id=tokenizer.get_vocab()[END_OF_TEXT],
        **_sizes(shape, tokenizer) | _of_family(shape, family),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).float()


def _sizes(shape: TinyShape, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "vocab_size": -(-len(tokenizer) // 32) * 32,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "max_position_embeddings": shape.context_length,
        "initializer_range": shape.initializer_range,
        "bos_token_id": None,
        "eos_token_id": tokenizer.get_vocab()[TURN_END],
    }


def _of_family(shape: TinyShape, family: Family) -> dict[str, Any]:
    """Heads and experts. DeepSeek's first layer is dense, and its experts are chosen within one of two groups."""
    heads = {"num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    if family == "qwen3":
        return heads
    width, per_token = shape.intermediate_size // 4, {"num_experts_per_tok": shape.experts_per_token}
    if family == "qwen3_moe":
        of_qwen = {"num_experts": shape.num_experts, "moe_intermediate_size": width, "norm_topk_prob": True}
        return {**heads, **per_token, **of_qwen, "mlp_only_layers": []}
    if family == "mixtral":
        of_mixtral = {"num_local_experts": shape.num_experts, "intermediate_size": width, "sliding_window": None}
        return {**heads, **per_token, **of_mixtral}
    half = shape.head_dim // 2
    sizes = {"qk_nope_head_dim": half, "qk_rope_head_dim": half, "v_head_dim": shape.head_dim}
    heads = {"num_key_value_heads": shape.num_heads, "q_lora_rank": None, "kv_lora_rank": half, **sizes}
    groups = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True}
    of_deepseek = {"n_routed_experts": shape.num_experts, "moe_intermediate_size": width, "n_shared_experts": 1}
    method = {"topk_method": "group_limited_greedy"} if family == "deepseek_v2" else {}
    return {**heads, **per_token, **groups, **of_deepseek, **method, "first_k_dense_replace": 1}


def write_tiny_model(
    directory: Path,
    phrases: Iterable[str] = (),
    shape: TinyShape | None = None,
    seed: int = 0,
    family: Family = "qwen3",
) -> Path:
    """Write a tiny model with its tokenizer as a Hugging Face directory; it appears complete or not at all."""
    tokenizer = tiny_tokenizer(phrases)
    return write_model(directory, tiny_model(tokenizer, shape, seed, family), tokenizer)


def write_model(directory: Path, model: PreTrainedModel, *companions: Any) -> Path:
    """Write a model and its companions, such as its tokenizer; the directory appears complete or not at all."""
    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # for the one file of a second's work
    try:
        for saved in (model, *companions):
            saved.save_pretrained(partial)
        partial.chmod(0o755)
        partial.rename(directory)
    finally:
        if was_shown:
            logging.enable_progress_bar()
        shutil.rmtree(partial, ignore_errors=True)
    return directory


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
    half = shape.head_dim // 2
    rows = 3 * half // 8
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta, "mrope_section": [half - 2 * rows, rows, rows]}
    config = AutoConfig.for_model(
        family,
        text_config={
            **_sizes(shape, tokenizer),
            "num_key_value_heads": shape.num_kv_heads,
            "rms_norm_eps": 1e-6,  # as Qwen's, and as the tower's: servers use one number for both
            "rope_parameters": rope | ({"mrope_interleaved": True} if family == "qwen3_vl" else {}),
            "tie_word_embeddings": True,
            **({"head_dim": shape.head_dim} if family == "qwen3_vl" else {}),
        },
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

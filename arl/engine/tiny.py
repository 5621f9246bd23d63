"""Tiny Qwen3 models and tokenizers, built on the spot: for tests, examples and benchmarks that download nothing.

The tokenizer has a token for each byte, for each tag of Qwen's chat format, and for each phrase that it is given. So it
encodes any text, copies numbers digit by digit, and spends few tokens on boilerplate.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyShape:
    """The size of a tiny Qwen3. The defaults, some 0.6 million parameters, suit tests and the math agent."""

    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 32
    context_length: int = 1024
    rope_theta: float = 10_000.0
    initializer_range: float = 0.02


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


def tiny_model(tokenizer: PreTrainedTokenizerBase, shape: TinyShape | None = None, seed: int = 0) -> Qwen3ForCausalLM:
    """A freshly initialised Qwen3 of the given shape for the tokenizer's vocabulary, float32, the same for a seed."""
    shape = shape or TinyShape()
    vocabulary = tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 32) * 32,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context_length,
        initializer_range=shape.initializer_range,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        eos_token_id=vocabulary[TURN_END],
        pad_token_id=vocabulary[END_OF_TEXT],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).float()


def write_tiny_model(
    directory: Path, phrases: Iterable[str] = (), shape: TinyShape | None = None, seed: int = 0
) -> Path:
    """Write a tiny model with its tokenizer as a Hugging Face directory; it appears complete or not at all."""
    tokenizer = tiny_tokenizer(phrases)
    model = tiny_model(tokenizer, shape, seed)
    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _save_quietly(model, partial)
        tokenizer.save_pretrained(partial)
        partial.chmod(0o755)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def _save_quietly(model: Qwen3ForCausalLM, directory: Path) -> None:
    """Without a progress bar for the one file of a second's work."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(directory)
    finally:
        if was_shown:
            logging.enable_progress_bar()

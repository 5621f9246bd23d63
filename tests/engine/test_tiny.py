"""Tiny models and tokenizers: any text, few tokens, the size that was asked for."""

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from arl.engine.tiny import TinyShape, tiny_model, tiny_tokenizer, write_tiny_model

TOKENIZER = tiny_tokenizer(["hello ", " world", "<tool_call>"])


@given(st.text())
def test_every_text_survives_encoding_and_decoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_phrases_and_tags_are_one_token_and_digits_stand_alone() -> None:
    pieces = [TOKENIZER.decode([i]) for i in TOKENIZER.encode("hello 42 world<tool_call>", add_special_tokens=False)]
    assert pieces == ["hello ", "4", "2", " world", "<tool_call>"]


def test_the_model_has_the_shape_asked_for_and_room_for_the_tokenizer() -> None:
    shape = TinyShape(hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
    model = tiny_model(TOKENIZER, shape)
    config = model.config
    assert config.model_type == "qwen3"
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (64, 96, 2)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert len(TOKENIZER) <= config.vocab_size < len(TOKENIZER) + 32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert config.eos_token_id == TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def test_a_seed_makes_one_model_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    weights = [tiny_model(TOKENIZER, seed=seed).model.embed_tokens.weight for seed in (1, 1, 2)]
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_written_model_is_read_back_by_transformers_as_it_was(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "deep" / "model", ["hello "], seed=3)
    tokenizer, text = AutoTokenizer.from_pretrained(directory), "hello <|im_end|>é\n"
    assert tokenizer.encode(text) == tiny_tokenizer(["hello "]).encode(text)
    assert tokenizer.chat_template == TOKENIZER.chat_template
    model = AutoModelForCausalLM.from_pretrained(directory)
    expected = tiny_model(tokenizer, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert [path.name for path in directory.parent.iterdir()] == ["model"]

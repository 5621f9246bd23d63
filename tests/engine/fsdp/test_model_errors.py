"""A model that is missing, broken or cannot be trained exactly is refused with what to do."""

import shutil
from pathlib import Path

import pytest
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from arl.api.errors import ModelError
from arl.engine.fsdp.model import load_model
from arl.engine.tiny import tiny_tokenizer

TINY = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def write(model: PreTrainedModel, directory: Path) -> Path:
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def test_an_incomplete_directory_is_refused_by_what_it_lacks(model_dir: Path, tmp_path: Path):
    with pytest.raises(ModelError, match="nowhere"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_model(tmp_path)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model_dir / name, tmp_path)
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_model(tmp_path)


def test_truncated_weights_are_refused(model_dir: Path, tmp_path: Path):
    broken = shutil.copytree(model_dir, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"cannot load it from .*broken"):
        load_model(broken)


def test_weights_that_lack_a_tensor_are_refused(model_dir: Path, tmp_path: Path):
    lacking = tmp_path / "lacking"
    model = Qwen3ForCausalLM.from_pretrained(model_dir)
    state = {name: value for name, value in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(lacking, state_dict=state)
    tiny_tokenizer().save_pretrained(lacking)
    with pytest.raises(ModelError, match=r"lack .*layers\.1\.mlp"):
        load_model(lacking)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"attn_logit_softcapping": None, "final_logit_softcapping": 1.0}, "transforms its logits"),
        ({"attn_logit_softcapping": 50.0, "final_logit_softcapping": None}, "softcap"),
    ],
)
def test_soft_capping_is_refused_rather_than_left_out(tmp_path: Path, options: dict, named: str):
    model = Gemma2ForCausalLM(Gemma2Config(**TINY, **options, initializer_range=1.0))
    with pytest.raises(ModelError, match=named):
        load_model(write(model, tmp_path))


def test_a_layer_type_that_cannot_be_packed_is_refused(tmp_path: Path):
    model = Qwen3ForCausalLM(Qwen3Config(**TINY))
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ModelError, match="linear_attention"):
        load_model(write(model, tmp_path))


def test_sliding_windows_that_the_attention_is_not_told_of_are_refused(tmp_path: Path):
    options = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    config = Qwen2MoeConfig(**TINY, **options, use_sliding_window=True, sliding_window=2, max_window_layers=2)
    assert "sliding_attention" in config.layer_types
    with pytest.raises(ModelError, match="sliding window"):
        load_model(write(Qwen2MoeForCausalLM(config), tmp_path))


@pytest.mark.parametrize("window", [None, 2])
def test_sliding_windows_that_the_attention_is_told_of_are_not(tmp_path: Path, window: int | None):
    config = Qwen3Config(**TINY, use_sliding_window=bool(window), sliding_window=window, max_window_layers=1)
    load_model(write(Qwen3ForCausalLM(config), tmp_path))

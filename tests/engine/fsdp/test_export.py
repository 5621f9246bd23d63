"""An export is a model directory that transformers loads to the same logits."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_models import MakeEngine, load_twin, write_experts, write_model
from train_sequences import random_sequences, twin_logprobs
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
)

from arl.algorithm.losses.supervised import SFTLoss
from arl.engine.fsdp import model as module
from arl.engine.tiny import tiny_tokenizer


@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
def test_an_export_has_the_tensors_that_were_stored_and_gives_transformers_the_engines_logprobs(
    kind: str, make_engine: MakeEngine, tmp_path: Path
):
    stored = write_experts(tmp_path / "in") if kind == "experts" else write_model(tmp_path / "in", tied=kind == "tied")
    engine, sequences = make_engine(stored), random_sequences(4)
    assert engine.train_batch([sequences], SFTLoss())["grad_norm"] > 0
    engine.export(tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert after.keys() == before.keys()
    twin = load_twin(tmp_path / "out")
    for sequence, logprobs in zip(sequences, engine.forward(sequences), strict=True):
        with torch.no_grad():
            expected, _ = twin_logprobs(twin, sequence)
        torch.testing.assert_close(logprobs[sequence.loss_mask], expected, rtol=1e-4, atol=1e-4)


def test_an_export_has_the_files_tensors_and_tokenizer_of_its_source(
    any_model_dir: Path, make_engine: MakeEngine, tmp_path: Path
):
    num_bytes = make_engine(any_model_dir).export(tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(any_model_dir))
    assert num_bytes == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_text() == (any_model_dir / name).read_text()
    source, out = (load_file(path / "model.safetensors") for path in (any_model_dir, tmp_path / "out"))
    assert out.keys() == source.keys()
    assert all(torch.equal(out[name], source[name]) for name in source)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("1+2") == [16, 10, 17]
    assert isinstance(GenerationConfig.from_pretrained(tmp_path / "out"), GenerationConfig)


def test_an_export_is_in_the_dtype_its_model_was_stored_in(make_engine: MakeEngine, tmp_path: Path):
    engine = make_engine(write_model(tmp_path / "half", tied=True, dtype=torch.bfloat16))
    engine.export(tmp_path / "out")
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert (tmp_path / "out" / "config.json").read_text() == (tmp_path / "half" / "config.json").read_text()


def test_tensors_that_a_model_keeps_in_float32_are_exported_in_it(make_engine: MakeEngine, tmp_path: Path):
    """The biases that choose among experts differ by less than bfloat16 can tell."""
    tokenizer = tiny_tokenizer()
    config = Glm4MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        first_k_dense_replace=1,
    )
    model, biases = Glm4MoeForCausalLM(config).bfloat16(), torch.tensor([10.01, 10.02, 10.03, 10.04])
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = biases
    model.save_pretrained(tmp_path / "moe")
    tokenizer.save_pretrained(tmp_path / "moe")
    make_engine(tmp_path / "moe").export(tmp_path / "out")
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(out.pop(name), biases)
    assert {tensor.dtype for tensor in out.values()} == {torch.bfloat16}


def test_an_export_replaces_the_older_one_and_leaves_nothing_beside_it(make_engine: MakeEngine, tmp_path: Path):
    engine = make_engine()
    engine.export(tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    engine.train_batch([random_sequences(2)], SFTLoss())
    engine.export(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != before
    assert os.listdir(tmp_path) == ["out"]


def test_an_export_that_fails_leaves_the_older_one(make_engine: MakeEngine, tmp_path: Path, monkeypatch):
    engine = make_engine()
    engine.export(tmp_path / "out")

    monkeypatch.setattr(module, "save_file", lambda *_, **__: os.stat(tmp_path / "gone"))
    with pytest.raises(OSError, match="gone"):
        engine.export(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]
    load_twin(tmp_path / "out")

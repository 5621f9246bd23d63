"""An export is a model directory that transformers loads to the same logits."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from train_models import MakeEngine, load_twin, write_experts, write_model
from train_sequences import random_sequences, twin_logprobs
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
)

from arl.algorithm.losses import SFTLoss
from arl.engine.fsdp import model as module
from arl.engine.tiny import tiny_tokenizer


def test_transformers_loads_an_export_to_the_engines_logprobs(
    any_model_dir: Path, make_engine: MakeEngine, tmp_path: Path
):
    engine, sequences = make_engine(any_model_dir), random_sequences(4)
    engine.train_batch([sequences], SFTLoss())
    engine.export(tmp_path / "out")
    twin = load_twin(tmp_path / "out")
    for sequence, logprobs in zip(sequences, engine.forward(sequences), strict=True):
        with torch.no_grad():
            expected, _ = twin_logprobs(twin, sequence)
        torch.testing.assert_close(logprobs[sequence.loss_mask], expected, rtol=1e-5, atol=1e-5)


def test_an_export_has_the_files_tensors_and_tokenizer_of_its_source(
    any_model_dir: Path, make_engine: MakeEngine, tmp_path: Path
):
    num_bytes = make_engine(any_model_dir).export(tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(any_model_dir))
    assert num_bytes == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_text() == (any_model_dir / name).read_text()
    with (
        safe_open(any_model_dir / "model.safetensors", "pt") as source,
        safe_open(tmp_path / "out" / "model.safetensors", "pt") as out,
    ):
        assert set(out.keys()) == set(source.keys())
        assert all(torch.equal(out.get_tensor(name), source.get_tensor(name)) for name in source.keys())  # noqa: SIM118
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("1+2") == [16, 10, 17]
    assert isinstance(GenerationConfig.from_pretrained(tmp_path / "out"), GenerationConfig)


def test_experts_are_trained_and_exported_apart_as_they_were_stored(make_engine: MakeEngine, tmp_path: Path):
    write_experts(tmp_path / "moe")
    engine, sequences = make_engine(tmp_path / "moe"), random_sequences(4)
    assert engine.train_batch([sequences], SFTLoss())["grad_norm"] > 0
    engine.export(tmp_path / "out")
    with (
        safe_open(tmp_path / "moe" / "model.safetensors", "pt") as source,
        safe_open(tmp_path / "out" / "model.safetensors", "pt") as out,
    ):
        assert set(out.keys()) == set(source.keys())
    twin = load_twin(tmp_path / "out")
    for sequence, logprobs in zip(sequences, engine.forward(sequences), strict=True):
        with torch.no_grad():
            expected, _ = twin_logprobs(twin, sequence)
        torch.testing.assert_close(logprobs[sequence.loss_mask], expected, rtol=1e-4, atol=1e-4)


def test_an_export_is_in_the_dtype_its_model_was_stored_in(make_engine: MakeEngine, tmp_path: Path):
    engine = make_engine(write_model(tmp_path / "half", tied=True, dtype=torch.bfloat16))
    engine.export(tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as out:
        assert {out.get_tensor(name).dtype for name in out.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert (tmp_path / "out" / "config.json").read_text() == (tmp_path / "half" / "config.json").read_text()


def test_what_a_model_keeps_in_float32_is_exported_in_it(make_engine: MakeEngine, tmp_path: Path):
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
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as out:
        assert torch.equal(out.get_tensor(name), biases)
        dtypes = {other: out.get_tensor(other).dtype for other in out.keys()}  # noqa: SIM118
    assert {dtype for other, dtype in dtypes.items() if other != name} == {torch.bfloat16}


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

    def disk_full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(module, "save_file", disk_full)
    with pytest.raises(OSError, match="no space left"):
        engine.export(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]
    load_twin(tmp_path / "out")

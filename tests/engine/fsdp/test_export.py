"""An export is a model directory that transformers loads to the same logits."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_models import EXPERTS, MakeEngine, build_model, load_twin, save_model, write_model
from train_sequences import random_sequences, twin_logprobs
from transformers import AutoTokenizer, GenerationConfig, Glm4MoeForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM

from arl.algorithm.losses.supervised import SFTLoss
from arl.api.errors import TransportError
from arl.engine.fsdp import model as module


@pytest.mark.parametrize(
    ("model_class", "config"),
    [(Qwen3ForCausalLM, {"tied": True}), (Qwen3ForCausalLM, {"tied": False}), (Qwen3MoeForCausalLM, EXPERTS)],
    ids=["tied", "untied", "experts"],
)
def test_an_export_is_its_source_and_after_a_step_gives_transformers_the_engines_logprobs(
    model_class: type[Any], config: dict[str, Any], make_engine: MakeEngine, tmp_path: Path
):
    source, out = write_model(tmp_path / "in", model_class, **config), tmp_path / "out"
    engine, sequences = make_engine(source, max_tokens_per_microbatch=40), random_sequences(6)
    num_bytes = engine.export(out)
    before, after = (load_file(path / "model.safetensors") for path in (source, out))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert sorted(os.listdir(out)) == sorted(os.listdir(source))
    assert num_bytes == sum(file.stat().st_size for file in out.iterdir())
    for name in ("config.json", "tokenizer.json"):
        assert (out / name).read_text() == (source / name).read_text()
    assert AutoTokenizer.from_pretrained(out).encode("1+2") == [16, 10, 17]
    assert isinstance(GenerationConfig.from_pretrained(out), GenerationConfig)

    assert engine.train_batch([sequences], SFTLoss())["grad_norm"] > 0
    engine.export(out)
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
    twin = load_twin(out)
    for sequence, logprobs in zip(sequences, engine.forward(sequences), strict=True):
        expected = torch.zeros(len(sequence))
        with torch.no_grad():
            expected[sequence.loss_mask], _ = twin_logprobs(twin, sequence)
        torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-4)


def test_an_export_has_the_dtypes_of_its_source_also_where_a_model_keeps_float32(
    make_engine: MakeEngine, tmp_path: Path
):
    """The biases that choose among experts differ by less than bfloat16 can tell."""
    config = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
    model, biases = build_model(Glm4MoeForCausalLM, **config).bfloat16(), torch.tensor([10.01, 10.02, 10.03, 10.04])
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = biases
    make_engine(save_model(model, tmp_path / "in")).export(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == (tmp_path / "in" / "config.json").read_text()
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(out.pop(name), biases)
    assert {tensor.dtype for tensor in out.values()} == {torch.bfloat16}


def test_an_export_that_fails_leaves_the_older_one(make_engine: MakeEngine, tmp_path: Path, monkeypatch):
    engine = make_engine()
    engine.export(tmp_path / "out")

    monkeypatch.setattr(module, "save_file", lambda *_, **__: os.stat(tmp_path / "gone"))
    with pytest.raises(TransportError, match=r"cannot write .*out on .*gone"):
        engine.export(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]
    load_twin(tmp_path / "out")

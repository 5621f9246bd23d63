"""Directories of value models: what is written is whole and loads elsewhere, and nothing that is read is made up."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_critics import BOTH, VALUE, score_of, sequences_with_returns
from train_models import MakeEngine, write_model
from train_sequences import random_sequences, same
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from arl.api.errors import ModelError
from arl.engine.tiny import tiny_tokenizer


def reloaded(auto_class: Any, directory: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    """By transformers alone, with its report of what was missing or left over."""
    return auto_class.from_pretrained(directory, output_loading_info=True)


def test_a_critics_directory_holds_its_weights_to_the_bit(model_dir: Path, make_engine: MakeEngine, tmp_path: Path):
    engine = make_engine(model_dir, head="value")
    engine.train_batch([sequences_with_returns()], VALUE)
    engine.export(tmp_path / "critic")
    twin, report = reloaded(AutoModelForSequenceClassification, tmp_path / "critic")
    assert not any(report.values())
    assert twin.config.architectures == ["Qwen3ForSequenceClassification"]
    assert twin.config.num_labels == 1
    assert score_of(twin).weight.any()
    for name, tensor in engine._policy.model.state_dict().items():
        assert torch.equal(tensor.full_tensor(), twin.state_dict()[name]), name
    again = make_engine(tmp_path / "critic", head="value")
    sequences = random_sequences(4)
    assert same(again.forward(sequences, "values"), engine.forward(sequences, "values"))


def test_servers_get_the_language_model_alone(any_model_dir: Path, make_engine: MakeEngine, tmp_path: Path):
    engine = make_engine(any_model_dir, head="policy_and_value")
    engine.train_batch([sequences_with_returns()], BOTH)
    specs = [spec.name for spec in engine.snapshot().specs]
    assert specs == [spec.name for spec in make_engine(any_model_dir).snapshot().specs]
    engine.export(tmp_path / "policy")
    _, report = reloaded(AutoModelForCausalLM, tmp_path / "policy")
    assert not any(report.values())
    sequences = random_sequences(3)
    policy = make_engine(tmp_path / "policy")
    assert same(policy.forward(sequences), engine.forward(sequences))


def with_pads(directory: Path, *, pad: str | None, vocab_size: int) -> Path:
    """A language model whose tokenizer pads with `pad`, and whose embedding has so many rows."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = pad
    write_model(directory, tied=True)
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.resize_token_embeddings(vocab_size)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("pad", "spare_rows", "expected"),
    [("<|endoftext|>", 0, "<|endoftext|>"), ("<|im_end|>", 8, "<|pad|>"), (None, 8, "<|pad|>"), (None, 0, None)],
)
def test_the_pad_token_of_a_critics_directory_is_one_that_no_text_ends_in(
    make_engine: MakeEngine, tmp_path: Path, pad: str | None, spare_rows: int, expected: str | None
):
    base = with_pads(tmp_path / "base", pad=pad, vocab_size=len(tiny_tokenizer()) + spare_rows)
    make_engine(base, head="value").export(tmp_path / "critic")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "critic")
    config = json.loads((tmp_path / "critic" / "config.json").read_text())
    assert tokenizer.pad_token == expected
    assert config["pad_token_id"] == tokenizer.pad_token_id


def edited(source: Path, target: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of a model directory with tensors (dots for underscores) replaced, or left out."""
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        weights.pop(name.replace("__", "."), None)
        if tensor is not None:
            weights[name.replace("__", ".")] = tensor
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_nothing_of_a_value_model_is_made_up(
    critic_dir: Path, model_dir: Path, make_engine: MakeEngine, tmp_path: Path
):
    with pytest.raises(ModelError, match=r"lack score\.weight: the download or copy is incomplete"):
        make_engine(edited(critic_dir, tmp_path / "headless", score__weight=None), head="value")
    with pytest.raises(ModelError, match=r"lack model\.norm\.weight"):
        make_engine(edited(model_dir, tmp_path / "broken", model__norm__weight=None), head="value")
    with pytest.raises(ModelError, match=r"has v_head\.weight, which .* save it as score\.weight"):
        make_engine(edited(model_dir, tmp_path / "other", v_head__weight=torch.ones(1, 32)), head="value")
    with pytest.raises(ModelError, match="cannot load it from"):
        make_engine(edited(critic_dir, tmp_path / "labels", score__weight=torch.ones(3, 32)), head="value")


def test_a_critic_is_no_policy(make_engine: MakeEngine, tmp_path: Path):
    make_engine(write_model(tmp_path / "tied", tied=True), head="value").export(tmp_path / "critic")
    for head in ("policy", "policy_and_value"):
        with pytest.raises(ModelError, match=r"has a value head \(score\.weight\)"):
            make_engine(tmp_path / "critic", head=head)

"""A model that is broken or not exactly trainable is refused with what to do; and which models are the same."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from huggingface_hub import constants
from torch.distributed.device_mesh import DeviceMesh
from train_models import MakeEngine, build_model, edited, save_model, write_model
from transformers import (
    Gemma2ForCausalLM,
    GemmaForCausalLM,
    LlamaForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from arl.api.errors import ConfigError, ModelError
from arl.api.train_engine import Head
from arl.engine.fsdp import attention
from arl.engine.fsdp.attention import masked_attention
from arl.engine.fsdp.model import load_model
from arl.engine.fsdp.parallel import split_layers
from arl.engine.model_files import model_digest
from arl.engine.tiny import TinyShape, write_tiny_model


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


@pytest.mark.parametrize(
    ("source", "head", "tensors", "message"),
    [
        ("model", "policy", {"model__layers__1__mlp__up_proj__weight": None}, r"lack .*layers\.1\.mlp"),
        ("model", "value", {"model__norm__weight": None}, r"lack model\.norm\.weight"),
        ("model", "value", {"v_head__weight": torch.ones(1, 32)}, r"has v_head\.weight, .* save it as score\.weight"),
        ("critic", "value", {"score__weight": None}, r"lack score\.weight: the download or copy is incomplete"),
        ("critic", "value", {"score__weight": torch.ones(3, 32)}, "cannot load it from"),
    ],
)
def test_missing_and_foreign_tensors_are_refused(
    model_dir: Path, critic_dir: Path, tmp_path: Path, source: str, head: Head, tensors: dict[str, Any], message: str
):
    directory = edited({"model": model_dir, "critic": critic_dir}[source], tmp_path / "edited", **tensors)
    with pytest.raises(ModelError, match=message):
        load_model(directory, head)


@pytest.mark.parametrize(("source", "head"), [("model", "policy"), ("model", "value"), ("critic", "value")], ids=str)
def test_weights_that_are_not_finite_are_named_with_their_file(
    model_dir: Path, critic_dir: Path, tmp_path: Path, source: str, head: Head
):
    broken = {"model__layers__1__mlp__up_proj__weight": torch.full((48, 32), math.nan)}
    directory = edited({"model": model_dir, "critic": critic_dir}[source], tmp_path / "edited", **broken)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight in .*edited/model\.safetensors"):
        load_model(directory, head)


def test_a_critic_is_no_policy(make_engine: MakeEngine, tmp_path: Path):
    make_engine(write_model(tmp_path / "tied", tied=True), head="value").export(tmp_path / "critic")
    with pytest.raises(ModelError, match=r"has a value head \(score\.weight\)"):
        make_engine(tmp_path / "critic")


WINDOWS = {"use_sliding_window": True, "sliding_window": 2}
FEW_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("model_class", "config", "way"),
    [
        (Gemma2ForCausalLM, {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}, "packed"),
        (Qwen3ForCausalLM, WINDOWS | {"max_window_layers": 1}, "packed"),
        # The attention is told of windows in a Qwen3, but not in a Qwen2Moe, whose mask alone has them.
        (Qwen2MoeForCausalLM, WINDOWS | FEW_EXPERTS | {"max_window_layers": 2}, "apart sdpa"),
    ],
)
def test_the_first_way_that_is_right_is_chosen(
    tmp_path: Path, model_class: type[Any], config: dict[str, Any], way: str
):
    assert load_model(write_model(tmp_path, model_class, **config)).decoder.way == way


@pytest.fixture
def _new_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is remembered of models that were loaded before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_new_trial")
def test_a_soft_cap_that_is_lost_is_told_from_rounding_though_scores_are_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    directory = write_model(tmp_path, Gemma2ForCausalLM, **caps, initializer_range=0.02)
    monkeypatch.setattr(attention, "masked_attention", lambda *args: masked_attention(*args[:6], None, args[7]))
    assert load_model(directory).decoder.way == "apart eager"


@pytest.mark.usefixtures("_new_trial")
def test_a_model_that_no_way_computes_rightly_is_refused_by_its_kind_and_how_far_off(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    own = Qwen3DecoderLayer.forward

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Of a layer that mixes a batch's sequences."""
        return own(self, hidden_states, *args, **kwargs) + hidden_states.mean(dim=(0, 1))

    monkeypatch.setattr(Qwen3DecoderLayer, "forward", forward)
    with pytest.raises(ModelError, match=r"Qwen3ForCausalLM \(model_type qwen3, layers: full_attention\).*differ by"):
        load_model(model_dir)


def test_what_the_models_own_code_cannot_compute_is_refused(tmp_path: Path):
    model = build_model()
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ModelError, match=r"layers: full_attention, linear_attention\) cannot compute a short text"):
        load_model(save_model(model, tmp_path))


# Layers that ranks share


@pytest.mark.parametrize(
    ("model_class", "config", "num_ranks", "message"),
    [
        (Qwen3ForCausalLM, {}, 4, "tensor_parallel is 4, which does not divide this model's 2 key-value heads"),
        (
            LlamaForCausalLM,
            {"intermediate_size": 49},
            2,
            "49 intermediate features; choose a common divisor of 4 attention heads",
        ),
        (GemmaForCausalLM, {}, 2, "no plan for splitting the layers of a gemma"),
    ],
)
def test_layers_that_the_ranks_cannot_share_are_refused(
    model_class: type[Any], config: dict[str, Any], num_ranks: int, message: str
):
    mesh = cast("DeviceMesh", SimpleNamespace(size=lambda: num_ranks))
    with pytest.raises(ModelError, match=message):
        split_layers(build_model(model_class, **config), mesh)


def test_more_parts_than_ranks_are_refused(make_engine: MakeEngine):
    with pytest.raises(ConfigError, match=r"tensor_parallel is 2, which does not divide the 1 rank"):
        make_engine(num_ranks=2, tensor_parallel=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", ["Say a number"])


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def test_a_copy_is_the_same_model_also_in_the_hubs_cache_and_with_another_chat_template(
    model: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({"transformers_version": "9.9", **config, "_name_or_path": "x"}))
    assert model_digest(str(copy)) == model_digest(str(model)) is not None
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert model_digest("org/tiny") is None
    cached = tmp_path / "hub" / "models--org--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0123456789abcdef0123456789abcdef01234567")
    shutil.copytree(model, cached / "snapshots" / "0123456789abcdef0123456789abcdef01234567")
    assert model_digest("org/tiny") == model_digest(str(model))


@pytest.mark.parametrize(
    "change",
    [
        lambda directory: write_tiny_model(directory, ["Say a number"], seed=1),
        lambda directory: write_tiny_model(directory, ["Say a letter"]),
        lambda directory: write_tiny_model(directory, ["Say a number"], TinyShape(num_layers=1)),
    ],
    ids=["weights", "vocabulary", "shape"],
)
def test_other_weights_another_vocabulary_or_shape_make_another_model(
    model: Path, tmp_path: Path, change: Callable[[Path], Path]
) -> None:
    digest = model_digest(str(change(tmp_path / "other")))
    assert digest is not None
    assert digest != model_digest(str(model))


def test_weights_of_terabytes_are_not_read(copy: Path) -> None:
    with (copy / "model.safetensors").open("r+b") as file:
        file.truncate(10**12)
    assert model_digest(str(copy)) is not None


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_directory_without_its_files_has_no_digest(copy: Path, name: str) -> None:
    (copy / name).unlink()
    assert model_digest(str(copy)) is None

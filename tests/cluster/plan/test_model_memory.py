"""What a model takes of servers' and trainer's memory is counted from its files."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_log import MadeRun, known_costs
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from arl.cluster.plan.fitting import fitted
from arl.cluster.plan.model_memory import model_memory
from arl.engine.tiny import TinyShape, write_tiny_model, write_tiny_vision_model

SHAPE = TinyShape(hidden_size=32, intermediate_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), ["Question 1"], SHAPE, 0)


@pytest.mark.parametrize(("served_as", "value_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_servers_hold_weights_keys_and_values_in_their_dtype(model: Path, served_as: str, value_bytes: int):
    parameters = AutoModelForCausalLM.from_pretrained(model).num_parameters()
    memory = model_memory({"model": model, "engine": {"dtype": served_as}})
    assert memory.server_weights == value_bytes * parameters
    assert memory.kv_per_token == value_bytes * 2 * 3 * 2 * 8  # keys and values of 3 layers, 2 heads of 8
    assert memory.trainer_state == 16 * parameters


def test_an_adapter_needs_neither_gradients_nor_moments_of_the_model(model: Path):
    whole, adapter = (model_memory({"model": model, "train": {"lora": lora}}) for lora in (None, {"rank": 4}))
    assert adapter.trainer_state == whole.trainer_state / 4


def test_a_model_that_sees_is_counted_with_its_tower_which_may_be_frozen(tmp_path: Path):
    model = write_tiny_vision_model(tmp_path / "model", shape=SHAPE)
    loaded = AutoModelForImageTextToText.from_pretrained(model)
    parameters, tower = loaded.num_parameters(), loaded.model.visual.num_parameters()
    settings = {"model": model, "engine": {"dtype": "bfloat16"}}
    memory = model_memory(settings)
    assert (memory.server_weights, memory.kv_per_token) == (2 * parameters, 2 * 2 * 3 * 2 * 8)
    assert memory.trainer_state == 16 * parameters
    frozen = model_memory({**settings, "train": {"freeze_vision_tower": True}})
    assert frozen.trainer_state == 16 * (parameters - tower) + 4 * tower


def test_a_reward_model_is_a_second_model_with_a_reference_of_its_own_which_adapters_do_not_hold(model: Path):
    rewarded = {"model": model, "algorithm": {"reward_model": {}}}
    alone, beside, adapters = map(
        model_memory, ({"model": model}, rewarded, {**rewarded, "train": {"lora": {"rank": 4}}})
    )
    assert beside.trainer_state == (2 * 16 + 4) / 16 * alone.trainer_state
    assert adapters.trainer_state == 2 * 4 / 16 * alone.trainer_state


@pytest.mark.parametrize(
    ("algorithm", "held"),
    [
        ({"kl": {"coefficient": 0.0}, "loss": {"kind": "clip"}}, 16),
        ({"kl": {"coefficient": 0.1}, "loss": {"kind": "clip"}}, 20),
        ({"kl": {"coefficient": 0.0}, "loss": {"kind": "dpo"}}, 20),
        ({"kl": {"coefficient": 0.0}, "loss": {"kind": "kto"}}, 20),
    ],
)
def test_a_run_holds_a_reference_if_its_kl_or_its_loss_asks_for_one(
    model: Path, tmp_path: Path, algorithm: dict[str, Any], held: int
):
    MadeRun(known_costs()).write(tmp_path, model=str(model), algorithm=algorithm)
    parameters = AutoModelForCausalLM.from_pretrained(model).num_parameters()
    assert fitted(tmp_path).memory.trainer_state == held * parameters


def test_without_a_dtype_servers_take_that_of_the_models_config(model: Path, tmp_path: Path):
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    (tmp_path / "model.safetensors").symlink_to(next(model.glob("*.safetensors")))
    assert model_memory({"model": tmp_path}).kv_per_token == 2 * 2 * 3 * 2 * 8


def test_a_run_whose_model_has_gone_says_that_memory_is_unknown(tmp_path: Path):
    MadeRun(known_costs()).write(tmp_path)
    costs = fitted(tmp_path)
    assert costs.memory.server_weights == 0
    assert any(note.startswith("memory is unknown") for note in costs.measured.notes)

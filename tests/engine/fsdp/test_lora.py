"""Adapters: peft's own model trains alike, the model beside them stays as it is, and servers get it merged or apart."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from train_models import EXPERTS, MakeEngine, edited, load_critic, load_twin, write_model
from train_sequences import LOSS, assert_same_rows, random_sequences, same, twin_rows, twin_steps
from train_variants import VALUE, assert_same_tensors, weights_of
from transformers import Qwen3MoeForCausalLM

from arl.api.errors import CheckpointError, ConfigError, ModelError, TransportError
from arl.api.settings.engines import LoRAConfig, OptimizerConfig, TrainConfig
from arl.api.train_engine import Head, TokenLoss
from arl.api.version import install_command
from arl.engine.fsdp.lora import LoRAOrigin
from arl.engine.fsdp.saving import _check_origin
from arl.engine.fsdp.train_engine import FSDPTrainEngine

LORA = LoRAConfig(rank=4, alpha=8)
MINIBATCHES = [random_sequences(6, seed=1), random_sequences(5, seed=2)]
RETURNS = [[replace(s, returns=s.advantages + s.loss_mask) for s in minibatch] for minibatch in MINIBATCHES]
OPTIMIZER = OptimizerConfig(lr=2e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5)


def write_adapter(engine: FSDPTrainEngine, directory: Path) -> Path:
    engine.snapshot_adapter().write(directory)
    return directory


# Training


def test_steps_equal_those_of_peft_one_sequence_at_a_time(any_model_dir: Path, make_engine: MakeEngine, tmp_path: Path):
    engine = make_engine(any_model_dir, optimizer=OPTIMIZER, max_tokens_per_microbatch=60, lora=LORA)
    start = write_adapter(engine, tmp_path / "start")
    twin = peft.PeftModel.from_pretrained(load_twin(any_model_dir), start, is_trainable=True).eval()
    norms = twin_steps(twin, MINIBATCHES, LOSS, OPTIMIZER)
    metrics = engine.train_batch(MINIBATCHES, LOSS)
    assert max(norms) > OPTIMIZER.max_grad_norm
    assert metrics["grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-4)
    twin.save_pretrained(tmp_path / "twin")
    ours = load_file(write_adapter(engine, tmp_path / "ours") / "adapter_model.safetensors")
    assert_same_tensors(ours, load_file(tmp_path / "twin" / "adapter_model.safetensors"))
    assert_same_rows(engine.forward(MINIBATCHES[0]), twin_rows(twin, MINIBATCHES[0]), 1e-4)


@pytest.mark.parametrize(("head", "loss"), [("policy", LOSS), ("value", VALUE)])
def test_adapters_and_a_value_head_move_and_the_model_stays_to_the_bit(
    make_engine: MakeEngine, head: Head, loss: TokenLoss
):
    engine = make_engine(optimizer=OPTIMIZER, head=head, lora=LORA)
    before, adapters = weights_of(engine, trained=False), weights_of(engine)
    engine.train_batch(RETURNS, loss)
    assert not [n for n, tensor in weights_of(engine, trained=False).items() if not torch.equal(tensor, before[n])]
    assert not [n for n, tensor in weights_of(engine).items() if torch.equal(tensor, adapters[n])]
    assert ("model.score.weight" in adapters) is (head == "value")
    assert set(engine._optimizer.state) == {p for p in engine._policy.parameters() if p.requires_grad}


def test_a_model_stored_and_computed_in_bfloat16_is_held_in_it(make_engine: MakeEngine, tmp_path: Path):
    directory = write_model(tmp_path / "half", tied=True, dtype=torch.bfloat16)
    engine, plain = (make_engine(directory, optimizer=OPTIMIZER, dtype="bfloat16", lora=on) for on in (LORA, None))
    assert same(engine.forward(MINIBATCHES[0]), plain.forward(MINIBATCHES[0]))
    engine.export(tmp_path / "before")
    assert (tmp_path / "before" / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()
    before = weights_of(engine, trained=False)
    metrics = engine.train_batch(MINIBATCHES, LOSS)
    assert {tensor.dtype for tensor in weights_of(engine, trained=False).values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in weights_of(engine).values()} == {torch.float32}
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(engine, trained=False).items())
    full = make_engine(directory, optimizer=OPTIMIZER, lora=LORA)
    assert metrics["loss"] == pytest.approx(full.train_batch(MINIBATCHES, LOSS)["loss"], rel=0.05, abs=0.05)
    engine.save(tmp_path / "checkpoint").wait()
    full.load(tmp_path / "checkpoint")


def test_a_seed_fixes_the_adapters(model_dir: Path):
    def start(seed: int) -> dict[str, torch.Tensor]:
        engine = FSDPTrainEngine(model_dir, TrainConfig(lora=LORA), seed=seed)
        adapters = weights_of(engine)
        engine.close()
        return {name: tensor for name, tensor in adapters.items() if "lora_A" in name}

    first, again, other = start(1), start(1), start(2)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert not torch.equal(tensor, other[name])


# What servers get


@pytest.mark.parametrize(
    ("head", "tied", "dtype"),
    [
        ("policy", True, torch.float32),
        ("policy", False, torch.float32),
        ("policy", True, torch.bfloat16),
        ("value", False, torch.float32),
    ],
)
def test_an_export_is_what_peft_merges_rounded_once_to_the_dtype_of_the_model(
    make_engine: MakeEngine, tmp_path: Path, head: Head, tied: bool, dtype: torch.dtype
):
    base, load = write_model(tmp_path / "base", tied=tied, dtype=dtype), load_critic if head == "value" else load_twin
    engine = make_engine(base, optimizer=OPTIMIZER, head=head, lora=LORA)
    engine.train_batch(RETURNS, VALUE if head == "value" else LOSS)
    engine.export(tmp_path / "merged")
    adapter = write_adapter(engine, tmp_path / "adapter")
    twin = peft.PeftModel.from_pretrained(load(base), adapter).merge_and_unload().state_dict()
    merged = load(tmp_path / "merged").state_dict()
    assert merged.keys() == twin.keys()
    for name, tensor in merged.items():
        if dtype == torch.float32:
            torch.testing.assert_close(tensor, twin[name], rtol=1e-4, atol=1e-5, msg=name)
        else:  # products that are summed in another order may fall on the other side
            assert (tensor != twin[name].bfloat16()).float().mean() < 0.01, name
    ours, stored = (load_file(path / "model.safetensors") for path in (tmp_path / "merged", base))
    if head == "value":
        assert ours["score.weight"].any()
    else:
        assert sorted(os.listdir(tmp_path / "merged")) == sorted(os.listdir(base))
        assert {n: (t.dtype, t.shape) for n, t in ours.items()} == {n: (t.dtype, t.shape) for n, t in stored.items()}
    written = json.loads((adapter / "adapter_config.json").read_text())
    expected = ("SEQ_CLS", ["score"]) if head == "value" else ("CAUSAL_LM", None)
    assert (written["task_type"], written["modules_to_save"]) == expected


def test_an_adapters_directory_names_its_model_and_suffixes_and_later_steps_do_not_change_it(
    model_dir: Path, make_engine: MakeEngine, tmp_path: Path
):
    engine = make_engine(optimizer=OPTIMIZER, lora=LORA)
    snapshot = engine.snapshot_adapter()
    contents: list[dict[str, bytes]] = []
    for _ in range(2):
        num_bytes = snapshot.write(tmp_path / "adapter")
        contents.append({file.name: file.read_bytes() for file in (tmp_path / "adapter").iterdir()})
        engine.train_batch([MINIBATCHES[0]], LOSS)
    assert contents[0] == contents[1]
    assert num_bytes == sum(map(len, contents[0].values()))
    assert os.listdir(tmp_path) == ["adapter"]
    written = json.loads(contents[0]["adapter_config.json"])
    assert (written["r"], written["lora_alpha"]) == (4, 8)
    assert written["base_model_name_or_path"] == str(model_dir)
    projections = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert written["target_modules"] == projections


def test_targets_are_found_by_the_end_of_their_names(make_engine: MakeEngine, tmp_path: Path):
    engine = make_engine(lora=LoRAConfig(rank=2, alpha=2, target_modules=("q_proj", "1.mlp.up_proj")))
    layers = {name.rpartition(".lora_")[0] for name in weights_of(engine)}
    assert layers == {
        "model.model.layers.0.self_attn.q_proj",
        "model.model.layers.1.self_attn.q_proj",
        "model.model.layers.1.mlp.up_proj",
    }
    adapter = write_adapter(engine, tmp_path / "adapter")
    # up_proj would be that of layer 0 too.
    assert json.loads((adapter / "adapter_config.json").read_text())["target_modules"] == [
        name.removeprefix("model.") for name in sorted(layers)
    ]


def test_experts_stay_frozen_and_are_exported_as_they_were_stored(make_engine: MakeEngine, tmp_path: Path):
    engine = make_engine(write_model(tmp_path / "moe", Qwen3MoeForCausalLM, **EXPERTS), optimizer=OPTIMIZER, lora=LORA)
    engine.train_batch(MINIBATCHES, LOSS)
    engine.export(tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("moe", "out"))
    assert before.keys() == after.keys()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "self_attn" in name and "proj" in name}


def test_only_adapters_that_are_there_are_written(make_engine: MakeEngine, tmp_path: Path):
    plain, engine = make_engine(), make_engine(lora=LORA)
    with pytest.raises(ConfigError, match=r"no adapters to publish.* set train\.lora"):
        plain.snapshot_adapter()
    snapshot = engine.snapshot_adapter()
    snapshot.release()
    with pytest.raises(TransportError, match="was released"):
        snapshot.write(tmp_path / "adapter")


# Checkpoints


def test_a_checkpoint_holds_what_is_trained_alone(make_engine: MakeEngine, tmp_path: Path):
    engine = make_engine(lora=LORA)
    engine.save(tmp_path / "checkpoint").wait()
    progress = json.loads((tmp_path / "checkpoint" / "progress.json").read_text())
    assert progress["parameters"].keys() == weights_of(engine).keys()
    stored = FileSystemReader(tmp_path / "checkpoint").read_metadata().state_dict_metadata
    expected = {f"{kind}.{name}" for kind in ("model", "exp_avg", "exp_avg_sq", "step") for name in weights_of(engine)}
    assert {name for name in stored if not name.startswith("rng")} == expected


MADE = LoRAOrigin(rank=4, alpha=8, target_modules=["q_proj"], frozen={"norm": 1})


@pytest.mark.parametrize(
    ("stored", "here", "message"),
    [
        (MADE, None, r"with train\.lora, which is unset here; set it alike"),
        (None, MADE, r"without train\.lora, which is set here; unset it"),
        (MADE, replace(MADE, rank=8), r"train\.lora\.rank=4, and here it is 8"),
        (MADE, replace(MADE, alpha=16), r"train\.lora\.alpha=8, and here it is 16"),
        (MADE, replace(MADE, target_modules=["k_proj"]), r"target_modules=\['q_proj'\], and here it is \['k_proj'\]"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused_naming_what_differs(
    stored: LoRAOrigin | None, here: LoRAOrigin | None, message: str
):
    with pytest.raises(CheckpointError, match=message):
        _check_origin(Path("checkpoint"), stored, here)


def test_adapters_of_another_model_are_refused_naming_a_tensor_that_differs(
    model_dir: Path, make_engine: MakeEngine, tmp_path: Path
):
    make_engine(lora=LORA).save(tmp_path / "checkpoint").wait()
    weight = load_file(model_dir / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    weight[5, 3] += 1e-6
    other = edited(model_dir, tmp_path / "other", model__layers__1__mlp__up_proj__weight=weight)
    with pytest.raises(CheckpointError, match=r"of another model: its .*layers\.1\.mlp\.up_proj.* differs"):
        make_engine(other, lora=LORA).load(tmp_path / "checkpoint")


# What cannot be adapted


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("nowhere",), r"target_modules names nowhere, but no layer"),
        (("q_proj", "nowhere"), r"target_modules names nowhere, but no layer"),
        (("q_proj", "lm_head"), r"target_modules is q_proj, lm_head, which includes lm_head: not a linear layer"),
        (("embed_tokens",), r"target_modules is embed_tokens, which includes model\.embed_tokens: not a linear"),
        (
            ("q_norm",),
            r"target_modules is q_norm, which includes model\.layers\.0\.self_attn\.q_norm: not a linear layer",
        ),
    ],
)
def test_targets_that_are_no_layers_to_adapt_are_refused_by_name(
    make_engine: MakeEngine, targets: tuple[str, ...], message: str
):
    with pytest.raises(ModelError, match=message):
        make_engine(lora=LoRAConfig(target_modules=targets))


def test_settings_that_cannot_be_honoured_are_refused():
    with pytest.raises(ValueError, match="target_modules has no names"):
        LoRAConfig(target_modules=())
    with pytest.raises(ValueError, match="lora is set and tensor_parallel is 2"):
        TrainConfig(num_ranks=2, tensor_parallel=2, lora=LORA)
    with pytest.raises(ValueError, match="compile is set and tensor_parallel is 2"):
        TrainConfig(num_ranks=2, tensor_parallel=2, compile=True)


def test_without_peft_the_extra_to_install_is_named(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("lora"))):
        make_engine(lora=LORA)

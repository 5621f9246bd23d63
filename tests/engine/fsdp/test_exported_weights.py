"""A checkpoint becomes the model directory that its engine would have written, to the bit, or is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from train_models import EXPERTS, MakeEngine, write_model
from train_sequences import LOSS, random_sequences
from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

from arl.api.errors import CheckpointError, ConfigError, TransportError
from arl.api.settings.engines import LoRAConfig, OptimizerConfig
from arl.engine.fsdp import model as module
from arl.engine.fsdp.export import export_weights
from arl.engine.fsdp.train_engine import FSDPTrainEngine

LORA = LoRAConfig(rank=4, alpha=8, target_modules=("q_proj", "o_proj"))
MODELS: dict[str, dict[str, Any]] = {
    "tied, in bfloat16": {"tied": True, "dtype": torch.bfloat16},
    "experts": {"model_class": Qwen3MoeForCausalLM, **EXPERTS},
}


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def trained(make_engine: MakeEngine, model: Path, checkpoint: Path, **options: Any) -> FSDPTrainEngine:
    """An engine that has trained and saved; with a reference, which an export leaves out."""
    engine = make_engine(model, optimizer=OptimizerConfig(lr=1e-2), **options)
    engine.update_reference()
    engine.train_batch([random_sequences(4, seed=1)], LOSS)
    engine.save(checkpoint).wait()
    return engine


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole model", "adapters"])
@pytest.mark.parametrize("name", MODELS)
def test_an_export_is_what_the_engine_would_have_written_to_the_bit(
    make_engine: MakeEngine, tmp_path: Path, name: str, lora: LoRAConfig | None
) -> None:
    model = write_model(tmp_path / "model", **{"model_class": Qwen3ForCausalLM} | MODELS[name])
    engine = trained(make_engine, model, tmp_path / "checkpoint", lora=lora)
    engine.export(tmp_path / "written")
    export_weights(tmp_path / "checkpoint", str(model), tmp_path / "exported", adapter=False)
    assert contents(tmp_path / "exported") == contents(tmp_path / "written")
    assert contents(tmp_path / "exported")["model.safetensors"] != contents(model)["model.safetensors"]
    assert {"config.json", "generation_config.json", "tokenizer.json"} < contents(tmp_path / "exported").keys()
    if lora is None:
        with pytest.raises(ConfigError, match="has no adapters: the run trained the whole model"):
            export_weights(tmp_path / "checkpoint", str(model), tmp_path / "adapter", adapter=True)
        return
    engine.snapshot_adapter().write(tmp_path / "written adapter")
    export_weights(tmp_path / "checkpoint", str(model), tmp_path / "adapter", adapter=True)
    assert contents(tmp_path / "adapter") == contents(tmp_path / "written adapter")


def test_an_export_that_fails_leaves_nothing(
    make_engine: MakeEngine, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(make_engine, model_dir, tmp_path / "checkpoint", lora=LORA)
    other = write_model(tmp_path / "other", Qwen3ForCausalLM, rope_theta=5.0, initializer_range=0.1)
    with pytest.raises(CheckpointError, match="holds adapters of another model"):
        export_weights(tmp_path / "checkpoint", str(other), tmp_path / "exported", adapter=False)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(TransportError, match=r"cannot write .*/exported on .*No space left"):
        export_weights(tmp_path / "checkpoint", str(model_dir), tmp_path / "exported", adapter=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "other"]

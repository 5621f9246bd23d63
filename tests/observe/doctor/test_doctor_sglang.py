"""`arl doctor` on stock SGLang: healthy, and with faults of its settings and files."""

import asyncio
import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.servers import python_of, stock
from mixtures import write_mixture
from observe.doctor.planted import USUAL, diagnosis_of
from safetensors.torch import load_file, save_file

from arl.api.settings.engines import AdapterWeightsConfig, LoRAConfig, SGLangEngineConfig, TrainConfig
from arl.api.settings.run import Config
from arl.engine.model_files import load_tokenizer
from arl.observe.doctor.causes import Diagnosis

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

DENSE = ("--context-length", "640", "--chunked-prefill-size", "128")
ADAPTERS = (
    "--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "4", "--lora-target-modules", "all",
)  # fmt: skip


def diagnosed(model: Path, tmp_path: Path, *options: str, served: Path | None = None, **more: Any) -> Diagnosis:
    """served: another directory than the trained model's. more: of the settings."""
    python_of("sglang")
    with stock("sglang", served or model, tmp_path / "log", *options) as server:
        engine = SGLangEngineConfig(addresses=(server.url,))
        config = Config(model=str(model), run_dir=tmp_path / "run", engine=engine, **more)
        return asyncio.run(diagnosis_of(config, USUAL))


def changed(file: Path, **values: Any) -> None:
    """Change values of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def causes(diagnosis: Diagnosis) -> list[str]:
    return list(dict.fromkeys(one.cause.name for one in diagnosis.faults if one.cause is not None))


def test_healthy_sglang_is_not_accused(model: Path, tmp_path: Path) -> None:
    """Its own defaults of top_k and temperature have no effect, because arl's requests name theirs."""
    served = shutil.copytree(model, tmp_path / "served")
    changed(served / "generation_config.json", top_k=5, temperature=0.1)
    defaults = '{"top_k": 5, "temperature": 0.1}'
    diagnosis = diagnosed(model, tmp_path, *DENSE, "--preferred-sampling-params", defaults, served=served)
    assert diagnosis.is_healthy, diagnosis.verdict
    skipped = [one.check for one in diagnosis.checked if one.outcome == "skipped"]
    assert skipped == ["routing", "truncation"]


def test_another_template_a_short_context_bfloat16_and_logprobs_before_the_temperature_are_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    options = ("--context-length", "60", "--dtype", "bfloat16", "--chat-template", str(template))
    diagnosis = diagnosed(model, tmp_path, *options)
    expected = ["chat template", "context length", "precision", "logprobs of another temperature"]
    assert causes(diagnosis) == expected, diagnosis.verdict


def test_another_tokenizer_cut_prompts_and_another_layer_are_named(model: Path, tmp_path: Path) -> None:
    served = shutil.copytree(model, tmp_path / "served")
    weights = load_file(served / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] += 0.1 * torch.randn(
        64, 128, generator=torch.Generator().manual_seed(0)
    )
    save_file(weights, served / "model.safetensors", metadata={"format": "pt"})
    tokenizer: Any = copy.deepcopy(load_tokenizer(str(model)))
    tokenizer.add_tokens(["brown fox"])
    tokenizer.save_pretrained(served)
    diagnosis = diagnosed(model, tmp_path, *DENSE, "--allow-auto-truncate", served=served)
    assert causes(diagnosis) == ["tokenizer", "context length", "other weights"], diagnosis.verdict


@pytest.mark.parametrize("kind", ["adapters", "mixture"])
def test_healthy_adapters_and_mixtures_in_sglang_are_not_accused(kind: str, model: Path, tmp_path: Path) -> None:
    if kind == "adapters":
        more: dict[str, Any] = {
            "train": TrainConfig(lora=LoRAConfig(rank=4, alpha=8)),
            "weights": AdapterWeightsConfig(),
        }
        diagnosis = diagnosed(model, tmp_path, *DENSE, *ADAPTERS, **more)
    else:
        mixture = write_mixture(tmp_path / "model", "qwen3_moe")
        diagnosis = diagnosed(mixture, tmp_path, "--context-length", "1024", "--enable-return-routed-experts")
    assert diagnosis.is_healthy, diagnosis.verdict

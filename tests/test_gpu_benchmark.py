"""The GPU benchmark runs from end to end, on a CPU and a tiny shape; and it counts what the models have."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

GPU = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "gpu.py"))
TINY = ["--shape", "tiny", "--device", "cpu", "--tokens", "128", "--sequence-length", "32", "--microbatch", "64"]
TINY += ["--steps", "1", "--concurrency", "1,3", "--new-tokens", "8", "--dtype", "float32"]


def run(parts: str, tmp_path: Path) -> dict[str, dict[str, float]]:
    GPU["main"]([*TINY, "--parts", parts, "--json", str(tmp_path / "figures.json")])
    return json.loads((tmp_path / "figures.json").read_text())


@pytest.mark.runs
def test_training_and_logprobs_are_measured(tmp_path: Path):
    figures = run("train,logprobs", tmp_path)
    assert figures.keys() == {"train", "logprobs"}
    assert figures["train"]["tokens_per_s"] == pytest.approx(128 / figures["train"]["step_s"])
    assert "mfu" not in figures["train"]  # nobody says what a CPU's peak is


@pytest.mark.slow
def test_publishing_and_serving_are_measured(tmp_path: Path):
    figures = run("publish,serve", tmp_path)
    assert {"disk_pause_s", "distributed_publish_s", "export_s"} <= figures["publish"].keys()
    assert figures["serve"].keys() == {"tokens_per_s_at_1", "tokens_per_s_at_3"}


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-4b"])
def test_weights_are_counted_as_the_models_have_them(name: str):
    shape: Any = GPU["SHAPES"][name]
    with torch.device("meta"):
        model = Qwen3ForCausalLM(GPU["config_of"](shape))
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert shape.layer_weights + shape.vocabulary * shape.hidden == matrices

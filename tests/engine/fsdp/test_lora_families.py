"""Adapters on mixtures with dense parts, on hybrids and on other kinds: which layers get them, and what servers get."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_families import VOCABULARY, write_family
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from arl.api.settings.engines import LoRAConfig
from arl.engine.fsdp.lora import Adapters
from arl.engine.fsdp.model import ModelWriter, load_model
from arl.engine.fsdp.parallel import ProcessGroupLease
from arl.engine.local.adapters import LoadedAdapters
from arl.engine.weights.distributed import torch_dtype

TOKENS = torch.randint(VOCABULARY - 32, (1, 20), generator=torch.Generator().manual_seed(0))
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
LATENT = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
DENSE = {"gate_proj", "up_proj", "down_proj"}
HYBRID = {"in_proj_qkvz", "in_proj_ba", "out_proj"}
ADAPTED = {
    "deepseek_v3": LATENT | DENSE,
    "glm4_moe": ATTENTION | DENSE,
    "gpt_oss": ATTENTION,
    "qwen2_moe": ATTENTION | DENSE | {"shared_expert_gate"},
    "qwen3_next": ATTENTION | DENSE | HYBRID | {"shared_expert_gate"},
    # A router that is a linear layer, or a subclass of one with three outputs.
    "hunyuan_v1_moe": ATTENTION | DENSE,
    "phimoe": ATTENTION,
    "jamba": ATTENTION | DENSE | {"in_proj", "x_proj", "dt_proj", "out_proj"},
    # A subclass of a linear layer that computes the same; weights that several layers share stay frozen.
    "falcon": {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
    "zamba": {"in_proj", "out_proj", "linear"},
}


@pytest.fixture(autouse=True)
def _ranks() -> Iterator[None]:
    lease = ProcessGroupLease("cpu")
    yield
    lease.release()


def load(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=TOKENS, use_cache=False).logits


def adapted(directory: Path, config: LoRAConfig) -> tuple[ModelWriter, Adapters]:
    """Adapters that were trained far from zero."""
    loaded = load_model(directory)
    loaded.decoder.close()  # so that the model computes its own logits
    writer = ModelWriter(loaded)
    adapters = Adapters(writer, directory, config, "float32", seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in writer.model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return writer, adapters


@pytest.mark.parametrize("family", ADAPTED)
def test_linear_layers_beside_experts_and_routers_are_trained_alone(family: str, tmp_path: Path):
    writer, _ = adapted(write_family(family, tmp_path / "model"), LoRAConfig(rank=2, alpha=4))
    trained = {name for name, parameter in writer.model.named_parameters() if parameter.requires_grad}
    layers = {name.rpartition(".lora_")[0] for name in trained}
    assert trained == {f"{layer}.lora_{part}.default.weight" for layer in layers for part in "AB"}
    assert {layer.rpartition(".")[2] for layer in layers} == ADAPTED[family]
    assert not [layer for layer in layers if ".experts" in layer or ".router" in layer]


@pytest.mark.parametrize("family", [family for family in ADAPTED if family != "jamba"])
def test_merged_weights_and_adapters_beside_a_served_model_give_the_trainers_logits(family: str, tmp_path: Path):
    directory = write_family(family, tmp_path / "model")
    writer, adapters = adapted(directory, LoRAConfig(rank=2, alpha=4))
    expected = logits(writer.model)
    merged = adapters.merged()
    writer.write(tmp_path / "merged", {s.name: merged[s.name].to(torch_dtype(s)) for s in writer.own_specs})
    torch.testing.assert_close(logits(load(tmp_path / "merged")), expected, rtol=1e-3, atol=1e-3)
    served: Any = load(directory)
    assert (logits(served) - expected).abs().max() > 0.1
    adapters.copy(0).write(tmp_path / "adapter")
    held = LoadedAdapters(served, served.get_output_embeddings())
    adapter = held.read("one", str(tmp_path / "adapter"))
    held.add(adapter)
    held.use([(adapter, TOKENS.numel())], torch.device("cpu"))
    torch.testing.assert_close(logits(served), expected, rtol=1e-3, atol=1e-3)


def test_a_target_that_peft_takes_for_experts_is_the_dense_layer_of_that_name(tmp_path: Path):
    directory = write_family("glm4_moe", tmp_path / "model")
    writer, _ = adapted(directory, LoRAConfig(rank=2, alpha=4, target_modules=("down_proj",)))
    layers = {name.rpartition(".")[0] for name, module in writer.model.named_modules() if name.endswith("base_layer")}
    assert layers == {
        "model.layers.0.mlp.down_proj",
        *(f"model.layers.{i}.mlp.shared_experts.down_proj" for i in range(1, 4)),
    }
